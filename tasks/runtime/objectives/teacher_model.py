"""The teacher of a distillation: a frozen model, loaded beside the one that is trained."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Objective, Parallel
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.objectives import Distill as Settings
from tasks.runtime.checkpoint.state import dtypes_of, model_tensors, set_dtypes
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch
from tasks.runtime.data.preparation.tokenizer import read_tokenizer
from tasks.runtime.models.adapters.lora import base_fingerprint
from tasks.runtime.models.attention.packing_support import require_packing_support, require_position_embeddings
from tasks.runtime.models.attention.varlen_attention import set_varlen_attention, uses_varlen
from tasks.runtime.models.build import (
    build_model,
    build_model_on_meta,
    build_planning_model,
    has_fused_loss,
    move_to_device,
    patch,
    require_embeddings,
)
from tasks.runtime.models.config import compute_dtype, load_config
from tasks.runtime.objectives.head_sums import Head
from tasks.runtime.objectives.objective import model_inputs, without_varlen_inputs
from tasks.runtime.parallel import Strategy
from tasks.runtime.parallel.tensor import require_tensor_parallel_support
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)


class Teacher:
    """The model of `objective.teacher`.

    model: as the strategy wrapped it, or None before `load` and `plan`. fingerprint: of its weights. varlen: whether
    its attention takes the inputs of `add_cu_seqlens`, where a batch has them.
    """

    def __init__(self, spec: RunSpec) -> None:
        settings = spec.objective
        assert isinstance(settings, Settings) and settings.teacher is not None
        self.name, self._spec = settings.teacher, spec
        # The student's code is not the teacher's.
        named = {
            "name": self.name,
            "init": "pretrained",
            "revision": settings.teacher_revision,
            "trust_remote_code": False,
        }
        # The spec of a run whose model is the teacher.
        self._own = spec.model_copy(update={"model": spec.model.model_copy(update=named)})
        self.model: nn.Module | None = None
        self._fused = self.varlen = False
        self.fingerprint = ""

    def load(self, processes: Processes, data: PreparedData, strategy: Strategy, expected: str | None = None) -> None:
        """Load it: sharded like the model under `fsdp`, replicated under other strategies. A collective.

        expected: its fingerprint at the start of the run, if it is known.

        Raises:
            ValueError: the teacher has too few positions or token embeddings for the rows, or other weights than at
                the start of the run.
            Unreachable: the Hub does not answer.
        """
        spec = self._own
        try:
            processes.on_main(lambda: _require_fit(spec.model, spec.parallel, data, spec.data.sequence_length))
            teacher = build_model(spec.model, spec.seed) if processes.is_main else build_model_on_meta(spec.model)
            self.fingerprint = processes.on_main(lambda: _checked_fingerprint(teacher, spec))
            self._adopt(teacher)
            self.varlen = all(
                uses_varlen(settings, spec.parallel, config, processes.device)
                for settings, config in (
                    (self._spec.model, load_config(self._spec.model)),
                    (spec.model, teacher.config),
                )
            )
        except (ValueError, Unreachable) as error:
            kind = Unreachable if isinstance(error, Unreachable) else ValueError
            raise kind(f"objective.teacher: {error}") from error
        if expected not in (None, self.fingerprint):
            raise ValueError(
                f"objective.teacher {self.name!r} has other weights than at the start of the run; restore them, pin a "
                "teacher on the Hub with objective.teacher_revision, or choose another name and train again"
            )
        set_dtypes(teacher, processes.on_main(lambda: dtypes_of(teacher)))
        if self.varlen:
            set_varlen_attention(teacher)
        if spec.parallel.type == "fsdp" and processes.world_size > 1:
            self.model = strategy.wrap(teacher, weights_loaded_later=False)
        else:
            _broadcast(teacher, processes)

    def plan(self) -> None:
        """Load it on the meta device, to plan kernels."""
        self._adopt(build_planning_model(self._own.model, compute_dtype(self._own.model, self._own.parallel)))

    @torch.no_grad()
    def run(self, batch: Batch) -> tuple[Tensor, Head]:
        """Its hidden states [B, T, H], and the head that turns them into logits."""
        assert self.model is not None
        found: list[Head] = []

        def keep(hidden: Tensor, *head: Any) -> Tensor:
            found.append(Head(*head))
            return hidden

        # Without varlen attention, a model may not accept these inputs.
        inputs = model_inputs(batch) if self.varlen else without_varlen_inputs(model_inputs(batch))
        if not self._fused:
            return self.model(**inputs).logits, Head()
        hidden: Tensor = self.model(**inputs, head_loss=keep).loss
        return hidden, found[0]

    def _adopt(self, teacher: PreTrainedModel) -> None:
        teacher.requires_grad_(False)
        teacher.eval()
        patched = patch(teacher, self._spec.kernels)
        log.info("kernels of the teacher: %s", patched.summary() if patched else "off")
        self._fused = has_fused_loss(patched)
        self.model = teacher


def require_same_tokens(objective: Objective, data: PreparedData) -> None:
    """Raises ValueError if a token of the data has another number in the teacher's vocabulary."""
    if not isinstance(objective, Settings) or objective.teacher is None:
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


def _require_fit(teacher: Model, parallel: Parallel, data: PreparedData, sequence_length: int) -> None:
    """Raises ValueError if the teacher has too few positions or token embeddings for the rows, or cannot be sharded."""
    require_position_embeddings(teacher, sequence_length)
    require_embeddings(teacher, data)
    require_tensor_parallel_support(teacher, parallel)


def _checked_fingerprint(teacher: PreTrainedModel, spec: RunSpec) -> str:
    """The fingerprint of the teacher's weights. Raises ValueError if the teacher does not support the rows."""
    require_packing_support(teacher, spec)
    return base_fingerprint(teacher)


def _broadcast(teacher: PreTrainedModel, processes: Processes) -> None:
    """Copy the teacher of rank 0 to the device of every rank. A collective."""
    move_to_device(teacher, processes.device)
    if processes.world_size > 1:
        for tensor in model_tensors(teacher).values():
            dist.broadcast(tensor, src=0)
