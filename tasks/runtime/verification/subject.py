"""The subject of a verification: the user's spec, reduced to minutes of work, with its model and a sample of its data.

The model keeps its configuration and, unless it is trained from scratch, the weights of its first layers; only the
other layers are removed. The sample is prepared by the same code as a run's data. Everything that checks write is in
one folder, which is removed at the end.
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
from transformers.dynamic_module_utils import custom_object_save

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Distill
from tasks.runtime.data import PreparedData, prepare, recipe_of
from tasks.runtime.data.preparation.tokenizer import read_tokenizer
from tasks.runtime.models.build import build_model_on_meta
from tasks.runtime.models.config import PRESETS, compute_dtype, load_config, model_dtype
from tasks.runtime.models.pretrained import load_pretrained
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# Numbers of samples to read, one after the other, until they make at least `_ROWS` rows.
_SAMPLES = (256, 1024, 4096)
_ROWS = 8
# Tokens of a forward pass; the fp64 reference needs eight bytes for each of their logits.
_TOKENS = 1024
# Turn off the parts of a run that are not verified here, or that need more than one machine.
_PLAIN: dict[str, Any] = {
    "name": "verify",
    "parallel": {"type": "single"},
    "topology": {},
    "resources": {},
    "tracking": {"report_to": [], "log_every": 1},
    "runtime": {"callbacks": []},
    "evaluation": {"samples": 0},
    "export": {},
    "checkpoint": {},
    "faults": {"health_check": False},
}


@dataclass
class Subject:
    """The reduced spec, for one process, its data, and a folder for files of checks."""

    asked: RunSpec
    """The spec as the user wrote it."""
    spec: RunSpec
    data: PreparedData
    folder: Path
    layers: tuple[int, int]
    """Number of layers of the reduced model and of the whole model."""
    worker: tuple[str, ...] = ("-m", "tasks.runtime.verification.worker")
    """Command of the processes that checks start; tests replace it to plant errors."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Results that several checks share, by name."""
    _numbers: Any = field(default_factory=lambda: count(1))

    @property
    def rows(self) -> int:
        """Rows of a compared optimizer step."""
        fitting = max(2, _TOKENS // self.spec.data.sequence_length)
        return min(_ROWS if self.spec.data.sequence_length <= 512 else 4, max(fitting, 4), len(self.data.train))

    @property
    def micro_batch(self) -> int:
        """Rows of a forward pass that has an fp64 reference."""
        fitting = max(1, _TOKENS // self.spec.data.sequence_length)
        return min(self.spec.training.micro_batch_size, fitting, len(self.data.train))

    @cached_property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the weights in the run."""
        return model_dtype(self.asked.model)

    @cached_property
    def computes_in(self) -> torch.dtype:
        """The dtype of the run's forward and backward passes."""
        return compute_dtype(self.asked.model, self.asked.parallel)

    @property
    def device(self) -> torch.device:
        """The device that checks compute on."""
        return Processes().device

    def variant(self, **changes: Any) -> RunSpec:
        """The spec with changed fields and its own output folder, which also holds reference log-probabilities."""
        output = self.folder / "runs" / str(next(self._numbers))
        output.mkdir(parents=True)
        return changed(self.spec, {"output": str(output), **changes})

    def new_file(self, suffix: str) -> Path:
        """An unused path."""
        return self.folder / f"{next(self._numbers)}{suffix}"

    def start(self, request: Path, processes: int) -> subprocess.Popen[str]:
        """Start `processes` processes for a request, see `worker`; more than one under torch elastic."""
        command, environment = [sys.executable], dict(os.environ)
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if processes > torch.cuda.device_count():
            # Each process needs a GPU of its own; otherwise all compute on the CPU.
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # Two processes run at a time. More threads than cores would slow both down.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))
        return subprocess.Popen(
            [*command, *self.worker, str(request)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def changed(spec: RunSpec, changes: Mapping[str, Any]) -> RunSpec:
    """`spec` with changed fields. A change with a `type` replaces its whole section."""
    values = spec.model_dump(mode="json")
    for name, change in changes.items():
        replaces = not isinstance(change, Mapping) or not change or "type" in change
        values[name] = change if replaces else {**values[name], **change}
    return RunSpec.model_validate(values)


def make_subject(asked: RunSpec, folder: Path, *, layers: int) -> Subject:
    """Reduce the model to `layers` layers (0: all), and prepare a sample of the data.

    Raises:
        ValueError: the model or the data cannot be read, or the model scores texts, or generates what it learns from.
    """
    if asked.model.head == "score":
        raise ValueError("objective.type 'reward': the checks are for models that write texts; verify the base model")
    if asked.objective.type == "grpo":
        raise ValueError(
            "objective.type 'grpo': the checks are for rows with answers; verify the model with objective.type 'sft'"
        )
    spec = changed(asked, _PLAIN | {"output": str(folder)})
    training = {"tokens_per_step": None, "epochs": None, "steps": 3, "gradient_accumulation_steps": 1}
    # Noise differs from pass to pass, and a model with fewer layers lacks names that these fields may have.
    spec = changed(spec, {"training": {"neftune_noise_alpha": None}, "optimizer": {"groups": []}})
    spec = changed(spec, {"model": {"freeze": [], "trainable": []}})
    if spec.adapter.type == "lora":
        spec = changed(spec, {"adapter": {"init_from": None, "init_lora_weights": "default"}})
    kernels = {"warmup": False, "store": {}}
    local = {"shuffle": "global", "streaming": False, "prepared_url": None}
    spec = changed(spec, {"training": training, "kernels": kernels, "optimizer": {"lr": asked.peak_lr}, "data": local})
    spec, kept = _cut_model(spec, folder / "model", layers)
    if isinstance(spec.objective, Distill) and spec.objective.teacher is not None:
        name, revision = spec.objective.teacher, spec.objective.teacher_revision
        teacher = changed(
            spec, {"model": {"name": name, "init": "pretrained", "revision": revision, "tokenizer": None}}
        )
        teacher, _ = _cut_model(teacher, folder / "teacher", layers)
        cut = {"teacher": teacher.model.name, "teacher_revision": teacher.model.revision}
        spec = changed(spec, {"objective": spec.objective.model_dump() | cut})
    data = _sample(spec, folder)
    size = min(spec.training.micro_batch_size, len(data.train))
    return Subject(asked, changed(spec, {"training": {"micro_batch_size": size}}), data, folder, kept)


def _sample(spec: RunSpec, folder: Path) -> PreparedData:
    """The first samples of the data, enough for at least `_ROWS` rows if the data has them."""
    sources = spec.data.single_sources()
    limit = max(source.data.max_samples or _SAMPLES[-1] for source in sources)
    for samples in _SAMPLES:
        sampled = changed(spec, {"data": _limited(spec.data.model_dump(mode="json"), samples)})
        data = prepare(recipe_of(sampled), folder / "data" / str(samples), report=log.debug)
        if len(data.train) >= _ROWS or data.manifest.samples_read < samples or samples >= limit:
            break
    return data


def _limited(section: dict[str, Any], samples: int) -> dict[str, Any]:
    """The section `data`, or one inside it, with at most so many samples of each source."""
    limited = {**section, "max_samples": min(samples, section["max_samples"] or samples)}
    if section.get("validation_source"):
        limited["validation_source"] = _limited(section["validation_source"], samples)
    if section.get("sources"):
        limited["sources"] = [_limited(source, samples) for source in section["sources"]]
    return limited


def _cut_model(spec: RunSpec, folder: Path, layers: int) -> tuple[RunSpec, tuple[int, int]]:
    """Write a model with fewer layers to `folder`. Returns its spec, and the numbers of layers after and before."""
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
    if spec.model.from_scratch:
        config.save_pretrained(folder)
        if spec.model.trust_remote_code:
            # A configuration brings the file of its own class alone.
            custom_object_save(build_model_on_meta(spec.model), folder)
    else:
        # The layers that were cut off are extra tensors.
        load_pretrained(
            spec.model.name,
            allow_extra=True,
            revision=spec.model.revision,
            config=config,
            dtype=model_dtype(spec.model),
        ).save_pretrained(folder)
    if spec.model.tokenizer is None:
        read_tokenizer(spec.model.name, spec.model.revision, field="model.name").save_pretrained(str(folder))
    # The folder has a copy of the code, if the model brings some.
    cut = {"name": str(folder), "revision": None, "trust_remote_code": bool(spec.model.trust_remote_code)}
    return changed(spec, {"model": cut}), (kept, there)


def _least_layers(config: PretrainedConfig) -> int:
    """The number of first layers that contain every kind of layer."""
    kinds = list(getattr(config, "layer_types", None) or ())
    last_new = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    return max(2, last_new, int(getattr(config, "first_k_dense_replace", 0) or 0) + 1)
