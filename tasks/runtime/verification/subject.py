"""What is verified: the user's spec, cut to a size that takes minutes, with its model and a sample of its data.

The model keeps its configuration and the weights of its first layers; only the others are left out. The sample is
prepared by the same code as that of a run. All that checks train is in one folder, removed at the end.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from strata_platform.spec import RunSpec
from strata_platform.spec.objectives import Distill
from tasks.runtime.data import PreparedData, prepare, recipe_of
from tasks.runtime.data.tokenizer import read_tokenizer
from tasks.runtime.models.build import PRESETS, compute_dtype, load_config, model_dtype
from tasks.runtime.models.pretrained import load_pretrained
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# Samples are read until there are rows for every step that checks take, or so many were read.
_SAMPLES = (256, 1024, 4096)
_ROWS = 8
# Of one forward pass; a reference in fp64 has eight bytes for each of their logits.
_TOKENS = 1024
# What a run does beside training, which is not verified here, and what needs more than one machine.
_PLAIN: dict[str, Any] = {
    "name": "verify",
    "parallel": {"type": "single"},
    "topology": {},
    "resources": {},
    "tracking": {"report_to": [], "log_every": 1},
    "evaluation": {"samples": 0},
    "export": {},
    "checkpoint": {},
    "faults": {"health_check": False},
}


@dataclass
class Subject:
    """A cut spec of one process, its data, and a folder for what checks write."""

    asked: RunSpec
    """As the user wrote it."""
    spec: RunSpec
    data: PreparedData
    folder: Path
    layers: tuple[int, int]
    """How many the model has here, and in the run."""
    worker: tuple[str, ...] = ("-m", "tasks.runtime.verification.worker")
    """What processes of their own are started by; tests plant errors there."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What several checks need, by name."""
    _numbers: Any = field(default_factory=lambda: count(1))

    @property
    def rows(self) -> int:
        """Rows of an optimizer step that is compared."""
        fitting = max(2, _TOKENS // self.spec.data.sequence_length)
        return min(_ROWS if self.spec.data.sequence_length <= 512 else 4, max(fitting, 4), len(self.data.train))

    @property
    def micro_batch(self) -> int:
        """Rows of a forward pass whose reference is in fp64."""
        fitting = max(1, _TOKENS // self.spec.data.sequence_length)
        return min(self.spec.training.micro_batch_size, fitting, len(self.data.train))

    @cached_property
    def weights_dtype(self) -> torch.dtype:
        """The type of the weights in the run."""
        return model_dtype(self.asked.model)

    @cached_property
    def computes_in(self) -> torch.dtype:
        """The type of the run's forward and backward passes."""
        return compute_dtype(self.asked.model, self.asked.parallel)

    @property
    def device(self) -> torch.device:
        """Where checks compute."""
        return Processes().device

    def variant(self, **changes: Any) -> RunSpec:
        """The spec with other fields in sections, and an output folder of its own: references are kept there."""
        output = self.folder / "runs" / str(next(self._numbers))
        output.mkdir(parents=True)
        return changed(self.spec, {"output": str(output), **changes})

    def new_file(self, suffix: str) -> Path:
        """A name that nobody has."""
        return self.folder / f"{next(self._numbers)}{suffix}"

    def start(self, request: Path, processes: int) -> subprocess.Popen[str]:
        """Start processes that do what `request` says; see `worker`. More than one are started by torch elastic."""
        command, environment = [sys.executable], dict(os.environ)
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if processes > torch.cuda.device_count():
            # A GPU is one process's; without one for each they compute on the CPU.
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # Two are at work at a time; threads that wait for each other on a busy core cost more than they bring.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))
        return subprocess.Popen(
            [*command, *self.worker, str(request)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def changed(spec: RunSpec, changes: Mapping[str, Any]) -> RunSpec:
    """`spec` with other fields; of a section those that are named, or all of it where that has another `type`."""
    values = spec.model_dump(mode="json")
    for name, change in changes.items():
        replaces = not isinstance(change, Mapping) or not change or "type" in change
        values[name] = change if replaces else {**values[name], **change}
    return RunSpec.model_validate(values)


def make_subject(asked: RunSpec, folder: Path, *, layers: int) -> Subject:
    """Cut the model to `layers` layers (0: all), and prepare a sample of the data.

    Raises ValueError where the model or the data cannot be read.
    """
    spec = changed(asked, _PLAIN | {"output": str(folder)})
    training = {"tokens_per_step": None, "epochs": None, "steps": 3, "gradient_accumulation_steps": 1}
    kernels = {"warmup": False, "store": {}}
    spec = changed(spec, {"training": training, "kernels": kernels, "optimizer": {"lr": asked.peak_lr}})
    spec, kept = _cut_model(spec, folder / "model", layers)
    if isinstance(spec.objective, Distill):
        name, revision = spec.objective.teacher, spec.objective.teacher_revision
        teacher = changed(spec, {"model": {"name": name, "revision": revision, "tokenizer": None}})
        teacher, _ = _cut_model(teacher, folder / "teacher", layers)
        cut = {"teacher": teacher.model.name, "teacher_revision": teacher.model.revision}
        spec = changed(spec, {"objective": spec.objective.model_dump() | cut})
    data = _sample(spec, folder)
    size = min(spec.training.micro_batch_size, len(data.train))
    return Subject(asked, changed(spec, {"training": {"micro_batch_size": size}}), data, folder, kept)


def _sample(spec: RunSpec, folder: Path) -> PreparedData:
    """The first samples of the data, as many as make some rows."""
    limit = spec.data.max_samples or _SAMPLES[-1]
    for samples in _SAMPLES:
        sampled = changed(spec, {"data": {"max_samples": min(samples, limit)}})
        data = prepare(recipe_of(sampled), folder / "data" / str(samples), report=log.debug)
        if len(data.train) >= _ROWS or data.manifest.samples_read < samples or samples >= limit:
            break
    return data


def _cut_model(spec: RunSpec, folder: Path, layers: int) -> tuple[RunSpec, tuple[int, int]]:
    """The spec of a model of fewer layers, and how many it has now and had; the model is written to `folder`."""
    config = load_config(spec.model)
    text = config.get_text_config()
    there = int(getattr(text, "num_hidden_layers", 0))
    kept = max(layers, _least_layers(text))
    if spec.model.name in PRESETS or layers == 0 or there <= kept:
        return spec, (there, there)
    text.num_hidden_layers = kept
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, getattr(text, name)[:kept])
    # The layers that were cut off are extra tensors.
    model = load_pretrained(
        spec.model.name,
        allow_extra=True,
        revision=spec.model.revision,
        config=config,
        dtype=model_dtype(spec.model),
    )
    model.save_pretrained(folder)
    del model
    if spec.model.tokenizer is None:
        read_tokenizer(spec.model.name, spec.model.revision, field="model.name").save_pretrained(str(folder))
    return changed(spec, {"model": {"name": str(folder), "revision": None}}), (kept, there)


def _least_layers(config: PretrainedConfig) -> int:
    """So many of the first layers have one of every kind."""
    kinds = list(getattr(config, "layer_types", None) or ())
    last_new = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    return max(2, last_new, int(getattr(config, "first_k_dense_replace", 0) or 0) + 1)
