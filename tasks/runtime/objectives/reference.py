"""Log-probabilities of the reference model, computed once for all epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal
from uuid import uuid4

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.model import Lora
from tasks.runtime.data import PreparedData, ReferenceLogProbs, RowDataset, collator
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.models.config import compute_dtype
from tasks.runtime.models.media.media_inputs import with_model_inputs
from tasks.runtime.objectives.objective import ObjectiveContext
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder

log = logging.getLogger(__name__)

# Fields that name the model before training.
_INITIAL_MODEL = ("model.name", "adapter.init_from")
# Sums of log-probabilities for each answer of a batch, in order; the values after them are ignored: [D] or [D, 2].
Score = Callable[[Batch], Tensor]


def disables_adapter(reference: str, adapter: Adapter) -> bool:
    """Whether the reference is the model with its adapter disabled. `reference`: of the objective's settings."""
    is_reference = isinstance(adapter, Lora) and adapter.starts_from_base
    return is_reference and reference != "precomputed"


def with_initial_log_probs(context: ObjectiveContext, score: Score) -> PreparedData:
    """Add the log-probabilities of the model before training to all rows that training reads. A collective."""
    data = with_reference_log_probs(context, score)
    if context.spec.evaluation.interval_field is None:
        return data
    return with_reference_log_probs(replace(context, data=data), score, split="validation")


def with_validation_log_probs(data: PreparedData, spec: RunSpec, model: nn.Module, score: Score) -> PreparedData:
    """Add log-probabilities of `model` to the validation rows that evaluation reads; drop the others. One process."""
    rows, size = data.validation, spec.training.micro_batch_size
    limit = spec.evaluation.max_batches
    # With several sources, evaluation reads the first rows of each.
    read = len(rows) if limit is None or data.manifest.sources else min(len(rows), size * limit)
    found = score_rows(
        rows, read, score, Processes(), size, with_model_inputs(collator(spec.model.attention), model, data)
    )
    assert found is not None
    return data.with_reference_log_probs(validation=found)


def with_reference_log_probs(
    context: ObjectiveContext, score: Score, split: Literal["train", "validation"] = "train"
) -> PreparedData:
    """Add the reference model's log-probabilities to the rows of a split. A collective.

    A file in the output folder keeps them for every attempt, and for every run with the same model and data.

    Raises:
        ValueError: a resumed run finds no file. Its model is not the reference model any more.
    """
    spec, data = context.spec, context.data
    path = context.processes.on_main(lambda: reference_file(spec, data.manifest.content_hash, context.base, split))
    if not context.processes.on_main(path.is_file):
        if context.continues and split == "validation":
            raise ValueError(
                f"{path} is missing: {spec.evaluation.interval_field} compares validation rows with the model before "
                "training, whose log-probabilities only the first start of a run can compute; leave "
                f"{spec.evaluation.interval_field} out to continue this run, or choose another name and train again"
            )
        if context.continues:
            raise ValueError(
                f"{path} is missing: it holds the log-probabilities for objective.reference 'precomputed'; restore it "
                "to continue this run, or choose another name and train again"
            )
        rows, size = getattr(data, split), spec.training.micro_batch_size
        log.info("reference: reading %d %s rows once", len(rows), split)
        found = score_rows(rows, len(rows), score, context.processes, size, context.collate)
        context.processes.on_main(lambda: _save(path, found))
    tensors = load_file(path)
    return data.with_reference_log_probs(**{split: ReferenceLogProbs(tensors["log_probs"], tensors["rows"])})


def reference_file(spec: RunSpec, content_hash: str, base: str, split: str = "train") -> Path:
    """The file with log-probabilities of the model with fingerprint `base`, and with the configuration and the adapter
    that the run began with, for this split and compute dtype.
    """
    began_with = RunFolder.of(spec).initial_weights_ids
    initial = "-".join([base, *(began_with[field] for field in _INITIAL_MODEL if field in began_with)])
    weights = str(compute_dtype(spec.model, spec.parallel)).removeprefix("torch.") + (
        "-nf4" if spec.is_quantized else "" if spec.training.float8 == "none" else f"-float8-{spec.training.float8}"
    )
    rows = "" if split == "train" else f"-{split}"
    return Path(spec.output).absolute() / "reference" / f"{content_hash}-{initial}-{weights}{rows}.safetensors"


def score_rows(
    rows: RowDataset, count: int, score: Score, processes: Processes, size: int, collate: Callable[[list[Row]], Batch]
) -> ReferenceLogProbs | None:
    """Score the answers of the first `count` rows, `size` rows at a time. Returns None except on rank 0. A
    collective.
    """
    batches = [range(first, min(first + size, count)) for first in range(0, count, size)]
    rounds = -(-len(batches) // processes.dp_size)
    found: dict[int, tuple[list[int], list[float] | list[list[float]]]] = {}
    for number in range(processes.dp_rank, rounds * processes.dp_size, processes.dp_size):
        # All ranks run the same number of passes. A rank without a batch of its own repeats the last one. Those of a
        # tensor-parallel group score the same batch.
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
    # A unique name, because another run may write the same file.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    save_file(reference._asdict(), temporary)
    temporary.replace(path)
