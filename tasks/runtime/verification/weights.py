"""Checks of weights: loaded, updated, merged, exported."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.parallel import GROUPS
from tasks.runtime.checkpoint.state import read_model_tensors
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.export.export_model import write_model
from tasks.runtime.models.adapters.lora import add_adapter, base_fingerprint, without_adapter
from tasks.runtime.models.build import build_model, build_model_on_meta, build_saved_model, materialize
from tasks.runtime.models.config import attention_of, load_config
from tasks.runtime.models.media.multimodal import auto_class
from tasks.runtime.models.pretrained import load_pretrained
from tasks.runtime.models.trained_weights import ADAPTER, build_trained_model
from tasks.runtime.verification.exact import error, scale
from tasks.runtime.verification.finding import Measured
from tasks.runtime.verification.observe import plain_buffers, with_job
from tasks.runtime.verification.subject import Subject
from tasks.runtime.verification.trained import Trained, trained
from tasks.runtime.verification.worker import Request, wait

# Largest share of an fp32 update that rounding may lose.
_LOST = 0.1
# Limits of relative errors of logits. Merging an adapter rounds the weights once more, so `_MERGED` is higher.
_LOGITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# Training used 4-bit weights, and the export has exact ones; rounding does not bound their difference.
_FOUR_BITS = 0.5
_MERGED = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
_TOKENS = 64


def updates(subject: Subject) -> Measured:
    """Compare updates of the spec's optimizer at its learning rate with fp32, and find frozen weights that changed."""
    found = trained(subject).updates
    problem = None
    if found.frozen_moved:
        problem = f"{found.frozen_moved[0]} is frozen but changed ({len(found.frozen_moved)} in all)"
    elif found.without_gradient:
        problem = f"{found.without_gradient[0]} is trainable but has no gradient ({len(found.without_gradient)} in all)"
    detail = (
        f"share of the fp32 update that is lost in {_name(subject.weights_dtype)} at lr {subject.spec.peak_lr:.2g}; "
        f"{found.moved:.1%} of the weights changed, {found.moved_exactly:.1%} in fp32"
    )
    return Measured(abs(1.0 - found.arrived), _LOST, detail, problem)


def buffers(subject: Subject) -> Measured:
    """Compare buffers outside of weights files, in every way that a run loads its model."""
    settings, seed = subject.spec.model, subject.spec.seed
    expected = _expected_buffers(settings)
    ways: dict[str, dict[str, Tensor]] = {}
    for dtype in dict.fromkeys((subject.weights_dtype, torch.bfloat16)):
        ways[f"loaded in {_name(dtype)}"] = plain_buffers(build_model(settings, seed, dtype=dtype))
        ways[f"empty in {_name(dtype)}, then filled"] = _filled(build_model_on_meta(settings, dtype=dtype), subject)
    spec = subject.variant(optimizer={"in_backward": False})
    with_job(spec, subject.data, lambda job: ways.update({"in the job": plain_buffers(job.unwrapped_model)}))
    saved = trained(subject)
    if saved.spec.adapter.type == "none":
        from_checkpoint = build_saved_model(_checkpoint(saved), saved.spec.model.attention)
        ways["from a checkpoint"] = _filled(from_checkpoint, subject)
    if subject.asked.parallel.type in ("ddp", "fsdp", "deepspeed"):
        ways |= _of_two_processes(subject)
    wrong = [
        f"{name}, {way}: {problem}"
        for way, found in ways.items()
        for name, tensor in expected.items()
        if (problem := _buffer_problem(found.get(name), tensor))
    ]
    detail = f"of {len(expected)} buffers in {len(ways)} ways of loading that differ from the configuration's in fp32"
    return Measured(float(len(wrong)), 0.0, detail, wrong[0] if wrong else None)


def _expected_buffers(settings: Model) -> dict[str, Tensor]:
    """The buffers that transformers computes from the configuration alone, in fp32."""
    with init_empty_weights(include_buffers=False):
        config = load_config(settings)
        model = auto_class(config).from_config(config, dtype=torch.float32)
    return plain_buffers(model)


def _filled(model: PreTrainedModel, subject: Subject) -> dict[str, Tensor]:
    materialize(model, subject.device)
    return plain_buffers(model)


def _buffer_problem(found: Tensor | None, expected: Tensor) -> str | None:
    if found is None:
        return "missing"
    if found.dtype != expected.dtype:
        return f"{_name(found.dtype)}, not {_name(expected.dtype)}"
    if not torch.equal(found, expected):
        return f"values differ by up to {float((found.double() - expected.double()).abs().max()):.2g}"
    return None


def _of_two_processes(subject: Subject) -> dict[str, dict[str, Tensor]]:
    """Buffers of a process that reads the weights, and of one that receives them."""
    asked = subject.asked.parallel.model_dump()
    if asked["type"] == "fsdp":
        asked |= {"replicas": 1, **dict.fromkeys(GROUPS, 1)}
    spec = subject.variant(
        # The processes may compute on the CPU, where `auto` is another dtype.
        model={"dtype": _name(subject.weights_dtype)},
        parallel=asked,
        topology={"nproc_per_node": 2},
        optimizer={"in_backward": False},
    )
    request = Request("buffers", spec.model_dump_json(), str(subject.data.folder), str(subject.new_file(".step.")))
    wait(subject.start(request.write(subject.new_file(".json")), 2))
    return {f"rank {rank} under {asked['type']}": request.found(rank).buffers for rank in range(2)}


def adapter(subject: Subject) -> Measured:
    """Compare the logits of the merged model with those of the model with its adapter, relative to its effect."""
    dtype = subject.weights_dtype
    spec = subject.variant(adapter=subject.spec.adapter.model_dump() | {"quantization": "none"})
    model = build_model(spec.model, spec.seed)
    assert add_adapter(model, spec.adapter, spec.seed) is not None
    # A new adapter has no effect, so that its merge would be invisible.
    generator = torch.Generator().manual_seed(spec.seed)
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in learned.items():
        if "lora_B" in name:
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    folder = subject.new_file(".weights")
    folder.mkdir()
    tensors = {name: parameter.detach().contiguous() for name, parameter in learned.items()}
    save_file(tensors, folder / ADAPTER, metadata={"base": base_fingerprint(model)})
    tokens = {"input_ids": subject.data.train[0]["input_ids"][None, :_TOKENS]}
    model.to(subject.device)
    beside = _logits(model, tokens)
    with without_adapter(model):
        without = _logits(model, tokens)
    merged = _logits(build_trained_model(spec, folder).to(subject.device), tokens)
    figure = error(merged, beside) / error(beside, without)
    detail = (
        f"error of the merged logits as a share of the adapter's effect, in {_name(dtype)}; the adapter changes "
        f"logits by {error(beside, without) / scale([without]):.0%}"
    )
    return Measured(figure, _MERGED[dtype], detail)


def export(subject: Subject) -> Measured:
    """Compare the exported folder, read by transformers alone, with the model after its last step."""
    run = trained(subject)
    folder = subject.new_file(".model")
    write_model(run.spec, subject.data, run.weights, folder)
    model = load_pretrained(str(folder), dtype="auto", attn_implementation=attention_of(run.spec.model))
    different = _other_tensors(run, model) if run.spec.adapter.type == "none" else []
    dtype = model.dtype
    # Merging the adapter for the export rounds the weights once more.
    limit = _LOGITS[dtype] if run.spec.adapter.type == "none" else _MERGED[dtype]
    if run.spec.is_quantized:
        limit = _FOUR_BITS
    logits = _logits(model.to(subject.device), run.inputs)
    figure = error(logits, run.logits) / scale([run.logits])
    problem = f"{different[0]} differs from the checkpoint ({len(different)} in all)" if different else None
    detail = f"relative error of logits read back by transformers, in {_name(dtype)}, from those of the last step"
    return Measured(figure, limit, detail, problem)


def _other_tensors(run: Trained, model: PreTrainedModel) -> list[str]:
    """Names of weights that are not bit for bit those of the last checkpoint."""
    saved, read = read_model_tensors(Index(_checkpoint(run))), model.state_dict()
    return [name for name, tensor in saved.items() if name not in read or not torch.equal(read[name], tensor)]


def _checkpoint(run: Trained) -> Path:
    return Path(run.record.checkpoint)


@torch.no_grad()
def _logits(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.eval()(**{name: tensor.to(model.device) for name, tensor in inputs.items()}).logits
    return found.float().cpu()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
