"""Documents of a packed row must not depend on each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata_platform.spec.sections.objectives import PAIRED
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch, Row, document_of
from tasks.runtime.objectives.objective import next_labels
from tasks.runtime.objectives.token_losses import token_losses
from tasks.runtime.training.job import Job
from tasks.runtime.verification.finding import Measured
from tasks.runtime.verification.observe import with_job
from tasks.runtime.verification.subject import Subject

# Checked documents of the row; each takes a backward pass.
_DOCUMENTS = 4
# Roundings by which losses alone and packed may differ: their attention may have different implementations.
_ROUNDINGS = 16


def does_not_apply(subject: Subject) -> str | None:
    """Why the check does not apply, or None."""
    if not (subject.spec.data.packing or subject.spec.objective.type in PAIRED):
        return "data.packing is false: no two documents share a row"
    if _shared_row(subject) is None:
        return "no row of the sample holds two documents with targets; raise data.sequence_length to pack any"
    return None


def packing(subject: Subject) -> Measured:
    """Measure the gradient of a document's loss at other documents of its row, and compare its loss alone."""
    row, found = _shared_row(subject), []
    assert row is not None
    spec = subject.variant(training={"micro_batch_size": 1}, optimizer={"in_backward": False})
    with_job(spec, subject.data, lambda job: found.append(_look(job, row)))
    leak, apart, where = found[0]
    limit = _ROUNDINGS * torch.finfo(subject.weights_dtype).eps / 2
    detail = (
        f"largest gradient of a document's loss at another document of its row{where}; losses alone and packed "
        f"differ by {apart:.2g} (limit {limit:.2g})"
    )
    return Measured(leak, 0.0, detail, None if apart <= limit else "losses alone and in a packed row differ")


def _shared_row(subject: Subject) -> Row | None:
    """The row with the most documents that have targets, among the first rows; None if no row has two."""
    rows = subject.data.train
    first = [rows[index] for index in range(min(len(rows), 64))]
    most = max(first, key=lambda row: len(_learned(row)))
    return most if len(_learned(most)) > 1 else None


def _numbers(batch: Batch) -> Tensor:
    """The number of each token's document, counted over all rows."""
    return (batch["position_ids"] == 0).flatten().cumsum(0).view_as(batch["position_ids"]) - 1


def _learned(row: Row) -> list[int]:
    """Numbers of the documents with targets."""
    return sorted(set(_numbers(row)[row["labels"] != IGNORE_INDEX].tolist()))


def _look(job: Job, row: Row) -> tuple[float, float, str]:
    """The largest leaking gradient, the largest relative difference of a loss, and the document of the leak."""
    leak, apart, where = 0.0, 0.0, ""
    job.model.eval()
    documents = _learned(row)
    # The last documents have the most tokens before them.
    for number in documents[-_DOCUMENTS:]:
        mine = _numbers(row) == number
        labels = row["labels"].where(mine, torch.tensor(IGNORE_INDEX))
        batch = _on_device(job, {**row, "labels": labels})
        loss, gradient = _loss_and_gradient(job, batch)
        others = gradient.flatten(0, 1)[(_numbers(batch) != number).flatten()]
        found = float(others.abs().max()) if others.numel() else 0.0
        if not found <= leak:
            leak, where = found, f" (that of document {number + 1} of {len(documents)})"
        single, _ = _loss_and_gradient(job, _on_device(job, document_of(row, number)))
        apart = max(apart, abs(single - loss) / abs(loss))
    return leak, apart, where


def _on_device(job: Job, row: Row) -> Batch:
    return {name: tensor.to(job.processes.device) for name, tensor in job.collate([row]).items()}


def _loss_and_gradient(job: Job, batch: Batch) -> tuple[float, Tensor]:
    """The sum of the losses of a batch, and its gradient at the token embeddings: [B, T, D]."""
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        # Some families change their embeddings in place.
        return embedded[0].clone()

    hook = job.unwrapped_model.get_input_embeddings().register_forward_hook(keep)
    try:
        losses = token_losses(job.model, batch, fused=job.spec.fused_loss)
        loss = losses.where(next_labels(batch) != IGNORE_INDEX, 0.0).sum()
        (gradient,) = torch.autograd.grad(loss, embedded)
    finally:
        hook.remove()
    return float(loss.detach()), gradient
