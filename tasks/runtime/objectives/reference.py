"""What the first model gives the answers, computed once for all passes over the data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate, chain
from pathlib import Path
from uuid import uuid4

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, ReferenceLogProbs, RowDataset
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.models.build import compute_dtype
from tasks.runtime.objectives.objective import ObjectiveContext
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# The model's sums of log-probabilities for the answers of a batch, in their order, then anything: [D].
Score = Callable[[Batch], Tensor]


def with_reference(context: ObjectiveContext, score: Score) -> PreparedData:
    """The data whose rows to train on bring what the first model gives their answers. A collective.

    It is kept in the output folder, for every attempt and for every run of the same model and data.

    Raises ValueError when a run that continues finds it gone: the model is not the first one any more.
    """
    spec, data = context.spec, context.data
    path = reference_file(spec, data.manifest.content_hash, context.base)
    if not context.processes.on_main(path.is_file):
        if context.continues:
            raise ValueError(
                f"{path} is gone: the log-probabilities that objective.reference 'precomputed' compares with; restore "
                "it to continue this run, or choose another name and train anew"
            )
        log.info("reference: reading %d rows once", len(data.train))
        size = spec.training.micro_batch_size
        found = score_rows(data.train, len(data.train), score, context.processes, size, context.collate)
        context.processes.on_main(lambda: _save(path, found))
    tensors = load_file(path)
    return data.with_reference_log_probs(train=ReferenceLogProbs(tensors["log_probs"], tensors["rows"]))


def reference_file(spec: RunSpec, content_hash: str, base: str) -> Path:
    """Where runs keep what the model of fingerprint `base` gives the answers of these data, as they compute it."""
    weights = str(compute_dtype(spec)).removeprefix("torch.") + ("-nf4" if spec.is_quantized else "")
    return Path(spec.output).absolute() / "reference" / f"{content_hash}-{base}-{weights}.safetensors"


def score_rows(
    rows: RowDataset, count: int, score: Score, processes: Processes, size: int, collate: Callable[[list[Row]], Batch]
) -> ReferenceLogProbs | None:
    """Scores of the answers of the first `count` rows, `size` rows at a time; for the main process. A collective."""
    batches = [range(first, min(first + size, count)) for first in range(0, count, size)]
    rounds = -(-len(batches) // processes.world_size)
    found: dict[int, tuple[list[int], list[float]]] = {}
    for number in range(processes.rank, rounds * processes.world_size, processes.world_size):
        # All processes go through the model as often: those that have no batch left repeat the last one.
        read = [rows[index] for index in batches[min(number, len(batches) - 1)]]
        batch = {name: tensor.to(processes.device) for name, tensor in collate(read).items()}
        answers = [int(((row["position_ids"] == 0) & (row["sides"] != 0)).sum()) for row in read]
        scores = score(batch)[: sum(answers)].tolist()
        if number < len(batches):
            found[number] = answers, scores
    parts = processes.gather(found)
    if parts is None:
        return None
    ordered = [item for _, item in sorted(chain.from_iterable(part.items() for part in parts))]
    counts = [count for answers, _ in ordered for count in answers]
    values = [value for _, scores in ordered for value in scores]
    return ReferenceLogProbs(torch.tensor(values), torch.tensor([0, *accumulate(counts)]))


def _save(path: Path, reference: ReferenceLogProbs | None) -> None:
    assert reference is not None
    path.parent.mkdir(exist_ok=True)
    # A name of its own: another run may be at the same work.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    save_file(reference._asdict(), temporary)
    temporary.replace(path)
