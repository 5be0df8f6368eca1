"""Pass the trained weights from the checkpoint to evaluation and export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from strata_kernels import join_weight
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.model import Lora
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import load_model, read_model_tensors
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.models.adapters.adapter_folder import load_initial_adapter
from tasks.runtime.models.adapters.lora import add_adapter, base_fingerprint, merge_adapter, require_base
from tasks.runtime.models.adapters.pissa import INITIAL, InitialMatrices, read_initial_matrices, set_initial_matrices
from tasks.runtime.models.build import build_model, build_saved_model, materialize
from tasks.runtime.optim.library_optimizers import average
from tasks.runtime.optim.state_tensors import REMAINDER
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel

AVERAGED_BY = "averaged_by"
"""Metadata of a checkpoint: the first of `optimizer.betas`, by which schedule-free AdamW averages weights."""

# Holds an adapter's tensors by their names in the model; its header has the fingerprint of the base weights.
ADAPTER = "adapter.safetensors"


def collect_weights(folder: RunFolder, adapter: Adapter, record: CompletionRecord) -> Path:
    """Write the trained weights and the run's metrics to `weights/` of its folder, for evaluation and export.

    The weights are a model in Hugging Face format, or an adapter alone.
    """
    weights = folder.weights
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir()
    source = Path(record.checkpoint)
    index, metadata = Index(source), checkpoint.metadata_of(source)
    if adapter.type == "none":
        model = build_saved_model(source)
        materialize(model, torch.device("cpu"))
        load_model(index, model)
        _average(index, {name: parameter.data for name, parameter in model.named_parameters()}, metadata)
        model.save_pretrained(weights)
    else:
        tensors = read_model_tensors(index)
        _average(index, tensors, metadata)
        tensors |= {INITIAL + name: tensor for name, tensor in read_initial_matrices(index).items()}
        save_file(tensors, weights / ADAPTER, metadata={"base": metadata["base"]})
    shutil.copyfile(folder.metrics, weights / folder.metrics.name)
    return weights


def _average(index: Index, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Replace the weights of a run with schedule-free AdamW by their averages, which are those to evaluate."""
    beta1 = metadata.get(AVERAGED_BY)
    if beta1 is None:
        return
    for name, weight in tensors.items():
        keys = {entry: f"optimizer.{entry}.{name}" for entry in ("z", REMAINDER)}
        state = {entry: index.empty(key) for entry, key in keys.items() if key in index}
        index.read({keys[entry]: tensor for entry, tensor in state.items()})
        if "z" in state:
            exact = join_weight(weight, state[REMAINDER]) if REMAINDER in state else weight.float()
            weight.copy_(average(exact, state["z"], beta1))


def build_trained_model(spec: RunSpec, weights: Path) -> PreTrainedModel:
    """The model of `collect_weights` on the CPU, in the spec's dtype, with an adapter merged.

    Raises:
        ValueError: the adapter's base model has other weights now, or the adapter is not finite.
    """
    if spec.adapter.type == "none":
        return build_model(spec.model, spec.seed, weights=str(weights))
    return merge_adapter(build_adapted_model(spec, weights))


def build_adapted_model(spec: RunSpec, weights: Path) -> LoraModel:
    """PEFT's view of the model of `build_trained_model`, with its adapter beside it. `.model` is the model."""
    model = build_model(spec.model, spec.seed)
    adapted = add_adapter(model, spec.adapter, spec.seed)
    assert adapted is not None
    initial, base = initial_matrices(weights)
    require_base(base_fingerprint(model), base, spec.model.name)
    set_initial_matrices(model, initial)
    tensors = {name: t for name, t in load_file(weights / ADAPTER).items() if not name.startswith(INITIAL)}
    _, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, f"{unexpected} are of another adapter, which the run's folder does not allow"
    return adapted


def initial_matrices(weights: Path) -> tuple[InitialMatrices, str]:
    """The matrices that the adapter of `collect_weights` began with, {} if it is not PiSSA; and the fingerprint of the
    weights that it was trained for.
    """
    with safe_open(str(weights / ADAPTER), framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(INITIAL)]  # noqa: SIM118
        return {name.removeprefix(INITIAL): file.get_tensor(name) for name in names}, file.metadata()["base"]


def build_initial_model(spec: RunSpec) -> PreTrainedModel:
    """The model before training, on the CPU, in the spec's dtype, with the adapter of `adapter.init_from` merged."""
    model = build_model(spec.model, spec.seed)
    if not isinstance(spec.adapter, Lora) or spec.adapter.init_from is None:
        return model
    adapted = add_adapter(model, spec.adapter, spec.seed)
    assert adapted is not None
    load_initial_adapter(model, spec.adapter, spec.model)
    return merge_adapter(adapted)
