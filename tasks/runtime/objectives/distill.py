"""`distill`: learn the distributions of a teacher with the same vocabulary, in addition to the next token."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.model import Model
from strata_platform.spec.objectives import Distill as Settings
from strata_platform.spec.run_spec import Objective
from tasks.runtime.checkpoint.state import dtypes_of, model_tensors, set_dtypes
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch
from tasks.runtime.data.tokenizer import read_tokenizer
from tasks.runtime.models.build import (
    build_model,
    build_model_on_meta,
    build_planning_model,
    compute_dtype,
    has_fused_loss,
    load_config,
    move_to_device,
    patch,
    require_embeddings,
)
from tasks.runtime.models.lora import base_fingerprint
from tasks.runtime.models.packing_support import require_packing_support, require_position_embeddings
from tasks.runtime.models.varlen_attention import set_varlen_attention, uses_varlen
from tasks.runtime.objectives.head_sums import Head
from tasks.runtime.objectives.objective import (
    MicroBatchLoss,
    ObjectiveContext,
    model_inputs,
    next_labels,
    target_tokens,
    without_varlen_inputs,
)
from tasks.runtime.objectives.teacher_divergence import distillation
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.record import NATS

log = logging.getLogger(__name__)

# Key of the teacher's fingerprint in a checkpoint's metadata.
_METADATA_KEY = "teacher"


class Distill:
    """Cross entropy and the divergence from a teacher, averaged over the target tokens."""

    unit = NATS

    def __init__(self, spec: RunSpec, *, fused: bool) -> None:
        assert isinstance(spec.objective, Settings)
        self._settings, self._spec, self._fused = spec.objective, spec, fused
        self._teacher: nn.Module | None = None
        self._teacher_fused = self._varlen = False
        self._fingerprint = ""

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Load the teacher: sharded like the model under `fsdp`, replicated under other strategies.

        Raises:
            ValueError: the teacher has too few positions or token embeddings for the rows, or other weights than at
                the start of the run.
            Unreachable: the Hub does not answer.
        """
        spec, processes = self._teacher_spec(), context.processes
        try:
            processes.on_main(lambda: _require_fit(spec.model, context.data, spec.data.sequence_length))
            teacher = build_model(spec.model, spec.seed) if processes.is_main else build_model_on_meta(spec.model)
            found = processes.on_main(lambda: _checked_fingerprint(teacher, spec))
            self._adopt(teacher)
            self._varlen = all(
                uses_varlen(settings, spec.parallel, config, processes.device)
                for settings, config in (
                    (context.spec.model, load_config(context.spec.model)),
                    (spec.model, teacher.config),
                )
            )
        except (ValueError, Unreachable) as error:
            kind = Unreachable if isinstance(error, Unreachable) else ValueError
            raise kind(f"objective.teacher: {error}") from error
        # Checkpoints of earlier versions have no fingerprint of the teacher.
        self._require_same(found, context.metadata.get(_METADATA_KEY, found))
        self._fingerprint = found
        set_dtypes(teacher, processes.on_main(lambda: dtypes_of(teacher)))
        if self._varlen:
            set_varlen_attention(teacher)
        if spec.parallel.type == "fsdp" and processes.world_size > 1:
            self._teacher = context.strategy.wrap(teacher, weights_loaded_later=False)
        else:
            _broadcast_teacher(teacher, processes)
        return context.data

    def metadata(self) -> dict[str, Any]:
        """The fingerprint of the teacher's weights."""
        return {_METADATA_KEY: self._fingerprint}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Return the data unchanged."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """The columns of a row. Loads the teacher on the meta device."""
        spec = self._teacher_spec()
        self._adopt(build_planning_model(spec.model, compute_dtype(spec.model, spec.parallel)))
        return dict.fromkeys(("input_ids", "labels", "position_ids"), tokens)

    def count(self, batch: Batch) -> Tensor:
        """The number of target tokens."""
        return target_tokens(batch)

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Do nothing."""

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """Loss, cross entropy and divergence, divided by the target tokens of the whole step."""
        labels = next_labels(batch)
        teacher_x, teacher = self._run_teacher(batch)

        def loss(hidden: Tensor, *head: Any) -> Tensor:
            settings = self._settings
            return torch.stack(
                distillation(hidden, Head(*head), labels, teacher_x, teacher, settings, items, max_targets)
            )

        inputs = model_inputs(batch)
        sums: Tensor = model(**inputs, head_loss=loss).loss if self._fused else loss(model(**inputs).logits)
        return MicroBatchLoss(
            sums[0], {"next_token_loss": sums[1].detach(), self._settings.divergence: sums[2].detach()}
        )

    @torch.no_grad()
    def _run_teacher(self, batch: Batch) -> tuple[Tensor, Head]:
        """The teacher's hidden states [B, T, H], and the head that turns them into logits."""
        assert self._teacher is not None
        found: list[Head] = []

        def keep(hidden: Tensor, *head: Any) -> Tensor:
            found.append(Head(*head))
            return hidden

        # Without varlen attention, a model may not accept these inputs.
        inputs = model_inputs(batch) if self._varlen else without_varlen_inputs(model_inputs(batch))
        if not self._teacher_fused:
            return self._teacher(**inputs).logits, Head()
        hidden: Tensor = self._teacher(**inputs, head_loss=keep).loss
        return hidden, found[0]

    def _require_same(self, found: str, expected: str) -> None:
        if found != expected:
            raise ValueError(
                f"objective.teacher {self._settings.teacher!r} has other weights than at the start of the run; "
                "restore them, pin a teacher on the Hub with objective.teacher_revision, or choose another name and "
                "train again"
            )

    def _adopt(self, teacher: PreTrainedModel) -> None:
        teacher.requires_grad_(False)
        teacher.eval()
        patched = patch(teacher, self._spec.kernels)
        log.info("kernels of the teacher: %s", patched.summary() if patched else "off")
        self._teacher_fused = has_fused_loss(patched)
        self._teacher = teacher

    def _teacher_spec(self) -> RunSpec:
        """The spec of a run whose model is the teacher."""
        # The student's code is not the teacher's.
        named = {
            "name": self._settings.teacher,
            "revision": self._settings.teacher_revision,
            "trust_remote_code": False,
        }
        return self._spec.model_copy(update={"model": self._spec.model.model_copy(update=named)})


def require_same_tokens(objective: Objective, data: PreparedData) -> None:
    """Raises ValueError if a token of the data has another number in the teacher's vocabulary."""
    if not isinstance(objective, Settings):
        return
    name = objective.teacher
    theirs = read_tokenizer(name, objective.teacher_revision, field="objective.teacher").get_vocab()
    ours = data.tokenizer().get_vocab()
    other = sorted(token for token in ours if theirs.get(token) != ours[token])
    if other:
        raise ValueError(
            f"objective.teacher {name!r} has another vocabulary: {len(other)} of the data's {len(ours)} tokens are "
            f"missing or have other numbers, such as {other[0]!r}; choose a teacher of the same family, or, for a "
            "model from scratch, set model.tokenizer to the teacher's"
        )


def _require_fit(teacher: Model, data: PreparedData, sequence_length: int) -> None:
    """Raises ValueError if the teacher has too few positions or token embeddings for the rows."""
    require_position_embeddings(teacher, sequence_length)
    require_embeddings(teacher, data)


def _checked_fingerprint(teacher: PreTrainedModel, spec: RunSpec) -> str:
    """The fingerprint of the teacher's weights. Raises ValueError if the teacher does not support the rows."""
    require_packing_support(teacher, spec)
    return base_fingerprint(teacher)


def _broadcast_teacher(teacher: PreTrainedModel, processes: Processes) -> None:
    """Copy the teacher of rank 0 to the device of every rank. A collective."""
    move_to_device(teacher, processes.device)
    if processes.world_size > 1:
        for tensor in model_tensors(teacher).values():
            dist.broadcast(tensor, src=0)
