"""Runs on bitsandbytes: frozen weights of four bits under an adapter, and moments of eight bits.

Both learn and come back exactly. An adapter is merged into the exact model; moments are split like their weights.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from torch.torch_version import TorchVersion

from strata_kernels import patch_model
from strata_platform.errors import SpecError
from strata_platform.estimate import shape_of
from strata_platform.estimate.memory import memory_of
from strata_platform.estimate.workload import Workload
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.parallel import Deepspeed, Fsdp
from strata_platform.spec.sections.training import Training
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.adapters.quantization import (
    _linear_4bit,
    _storage,
    quantize_linear_layers,
    quantize_weight,
    set_packed_shapes,
)
from tasks.runtime.models.build import build_model, move_to_device
from tasks.runtime.models.trained_weights import build_trained_model, collect_weights
from tasks.runtime.parallel import require_packages
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.kernels.helpers.tiny_models import build_tiny
from tests.runtime.helpers.comparable_runs import SAVED, approx, curve, file_of, make_spec, rounded
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import ROOT, launch
from tests.runtime.helpers.train_only import train_spec
from tests.runtime.models.activations.test_activation_checkpointing import Count

# Frozen weights of four bits: framework, strategy, processes, adapter, settings of `training`, options of the strategy.
FOUR_BITS = {
    "replicas": ("hf", "ddp", 2, "lora", {}, {}),
    "fsdp": ("torch", "fsdp", 2, "lora", {"gradient_checkpointing": "full"}, {}),
    "fsdp-compiled": ("lightning", "fsdp", 2, "lora", {"compile": True}, {"reshard_after_forward": False}),
    "zero-3": ("torch", "deepspeed", 2, "lora", {}, {"stage": 3}),
}

needed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def eight_bits(spec, **fields):
    return RunSpec.model_validate({**spec.model_dump(), "optimizer": {"type": "adamw_8bit", **fields}})


def nf4(spec, **changes):
    adapter = {**spec.adapter.model_dump(), "quantization": "nf4"}
    return RunSpec.model_validate({**spec.model_dump(), "adapter": adapter, **changes})


@pytest.fixture(scope="module")
def output(output):
    save_pretrained(output / "pretrained")
    return output


@pytest.fixture(scope="module")
def alone(output):
    spec = nf4(make_spec(output, "alone", "torch", "single", 1, "lora"))
    assert train_spec(spec).status == "complete"
    return spec


@needed
def test_it_learns_and_comes_back_exactly(alone):
    first = curve(alone)
    assert first[-1][1] < first[0][1] - 0.1
    assert train_spec(alone, SAVED).status == "complete"
    assert curve(alone, attempt=1) == first[SAVED:]


@needed
def test_a_checkpoint_has_the_adapter_alone(alone):
    index = Index(checkpoint.latest(RunFolder.of(alone).checkpoints))
    assert {name.split(".")[-3] for name in index if name.startswith("model.")} == {"lora_A", "lora_B"}


@needed
def test_the_adapter_is_merged_into_the_exact_model(alone):
    record = CompletionRecord.load(RunFolder.of(alone).record)
    weights = collect_weights(RunFolder.of(alone), alone.adapter, record)
    merged = build_trained_model(alone, weights)
    plain = build_trained_model(nf4(alone, adapter={**alone.adapter.model_dump(), "quantization": "none"}), weights)
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), plain.parameters(), strict=True))


@pytest.fixture(scope="module")
def trained(output):
    """Runs by two processes, each trained from its first checkpoint once more."""
    specs = {
        name: nf4(make_spec(output, name, *cell, training=layers, **options))
        for name, (*cell, layers, options) in FOUR_BITS.items()
    }
    specs["split"] = eight_bits(make_spec(output, "split", "hf", "fsdp", 2))
    specs["paged"] = eight_bits(make_spec(output, "paged", "hf", "fsdp", 2), paged=True)
    files = [f"{file_of(output, spec)}{at}" for spec in specs.values() for at in ("", f"@{SAVED}")]
    launch(2, *files)
    return specs


@needed
@pytest.mark.parametrize("name", FOUR_BITS)
def test_two_processes_have_the_losses_of_one_and_come_back_exactly(name, trained, alone):
    first = curve(trained[name], attempt=0)
    assert first == approx(curve(alone, attempt=0))
    assert curve(trained[name], attempt=1) == first[SAVED:]
    assert json.loads(RunFolder.of(trained[name]).record.read_text())["status"] == "complete"


@needed
def test_weights_take_what_the_estimate_says(output):
    """But for 1092 bytes beside each packed weight, whatever its size: tables of numbers, and a mean."""
    spec = rounded(nf4(make_spec(output, "sized", "torch", "single", 1, "lora")))
    model = build_model(spec.model, spec.seed)
    with quantize_linear_layers(model, spec):
        add_adapter(model, spec.adapter, spec.seed)
    model.to("cpu")
    states = [p.quant_state for p in model.parameters() if getattr(p, "quant_state", None) is not None]
    assert len(states) == 2 * 7
    scales = sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert memory_of(Workload.of(spec, shape_of(spec.model.name))).weights == held + scales
    assert {s.code.nbytes + s.state2.code.nbytes + s.offset.nbytes for s in states} == {1092}


@needed
def test_products_with_packed_weights_are_kept_per_op(output):
    spec = nf4(make_spec(output, "per-op", "torch", "single", 1, "lora"))
    calls = []
    for kind in ("none", "per_op", "full"):
        model = build_model(spec.model, spec.seed)
        with quantize_linear_layers(model, spec):
            add_adapter(model, spec.adapter, spec.seed)
        checkpoint_activations(model, Training(gradient_checkpointing=kind))
        tokens = torch.arange(8)[None]
        loss = model.to("cpu").train()(input_ids=tokens, labels=tokens).loss
        with Count() as counted:
            loss.backward()
        calls.append(counted.calls.get("bitsandbytes::gemm_4bit", 0))
    assert calls == [0, 0, 2 * 7]


@needed
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_that_is_packed_when_it_comes_gives_what_bitsandbytes_does(bias):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 48, bias=bias), torch.randn(3, 64)
    theirs = _linear_4bit(layer, torch.float32).to("cpu")
    ours = torch.nn.Sequential(_linear_4bit(layer, torch.float32))
    ((name, (inner, exact)),) = set_packed_shapes(ours).items()
    assert (name, exact.shape) == ("0.weight", (48, 64))
    assert (inner.weight.nbytes, inner.weight.dtype, inner.weight.device.type) == (48 * 32, torch.uint8, "meta")
    inner.weight = torch.nn.Parameter(quantize_weight(inner, layer.weight.detach()), requires_grad=False)
    assert torch.equal(ours(x), theirs(x))
    assert not torch.equal(ours(x), layer(x))


@pytest.fixture(scope="module")
def exact(output):
    """The losses of one process whose moments have all their bits."""
    spec = make_spec(output, "exact", "torch", "single", 1)
    assert train_spec(spec).status == "complete"
    return [loss for _, loss, *_ in curve(spec)]


@needed
def test_moments_of_eight_bits_learn_like_exact_ones(trained, exact):
    assert [loss for _, loss, *_ in curve(trained["split"], attempt=0)] == pytest.approx(exact, rel=1e-4)


@needed
def test_moments_are_split_like_their_weights_and_come_back_exactly(trained):
    split = trained["split"]
    assert curve(split, attempt=1) == curve(split, attempt=0)[SAVED:]
    index = json.loads((RunFolder.of(split).checkpoints / f"checkpoint-{SAVED}" / "index.json").read_text())
    parts = {
        "exp_avg": ("U8", {"0,0": [64, 256], "64,0": [64, 256]}),
        "exp_avg_sq_scale": ("F32", {"0,0": [64, 1], "64,0": [64, 1]}),
    }
    for slot, (dtype, shapes) in parts.items():
        found = index[f"optimizer.{slot}.model.layers.0.self_attn.k_proj.weight"]
        assert found["dtype"] == dtype
        assert {key: part["shape"] for key, part in found["parts"].items()} == shapes
    # Rows of 704, and embeddings.
    assert index["optimizer.exp_avg.model.layers.0.mlp.down_proj.weight"]["dtype"] == "F32"
    assert index["optimizer.exp_avg.model.embed_tokens.weight"]["dtype"] == "F32"


@needed
@pytest.mark.parametrize("attempt", [0, 1])
def test_moments_that_are_split_and_paged_are_the_same(attempt, trained):
    assert curve(trained["paged"], attempt) == curve(trained["split"], attempt)


@needed
def test_one_process_continues_with_the_moments_that_two_saved(trained, output):
    two = curve(trained["split"], attempt=0)
    spec = eight_bits(make_spec(output, "split", "torch", "single", 1))
    assert train_spec(spec, SAVED).status == "complete"
    assert curve(spec) == approx(two)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, output):
    monkeypatch.setattr("tasks.runtime.parallel.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"adapter\.quantization 'nf4' needs the package bitsandbytes.*strata\[bits"):
        require_packages(nf4(make_spec(output, "missing", "torch", "single", 1, "lora")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"type": "lora", "quantization": "nf4", "use_dora": True}}, r"'nf4' stores no norms"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    spec = make_spec("out", "refused", "torch", "ddp", 2, "lora")
    with pytest.raises(SpecError, match=message):
        nf4(spec, **changes)


@needed
def test_the_console_of_a_run_has_no_line_of_its_import():
    code = "from tasks.runtime.process.log import configure_logging; configure_logging(); import bitsandbytes"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert ended.returncode == 0
    assert "kernels-community" not in ended.stdout + ended.stderr


@needed
def test_a_version_that_would_convert_packed_weights_is_refused(output, monkeypatch):
    spec = nf4(make_spec(output, "converted", "torch", "fsdp", 2, "lora"))
    # `auto` is bfloat16 on a GPU, where nothing would be converted.
    weights = spec.model.model_copy(update={"dtype": "float32"})
    parallel = Fsdp(type="fsdp", compute_dtype="bfloat16")
    converted = spec.model_copy(update={"model": weights, "parallel": parallel})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.15.0+cu130"))
    require_packages(converted)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    require_packages(spec)
    # That takes no bytes; in a type of 16 bits some would be NaN, which copies on a GPU do not keep apart. DeepSpeed
    # would convert what poses as float32.
    zero = spec.model_copy(update={"parallel": Deepspeed(type="deepspeed")})
    assert (_storage(spec.parallel), _storage(zero.parallel)) == (torch.float32, torch.uint8)
    with pytest.raises(
        ValueError, match=r"parallel\.compute_dtype 'bfloat16'.*needs PyTorch 2\.15, because FSDP of 2\.11"
    ):
        require_packages(converted)


@needed
def test_a_layer_of_no_whole_blocks_stays_as_it_is_and_that_is_said(output, caplog):
    spec = nf4(make_spec(output, "uneven", "torch", "single", 1, "lora"))
    model = build_model(spec.model, spec.seed)
    model.model.layers[0].mlp.down_proj = uneven = torch.nn.Linear(3, 3)
    with quantize_linear_layers(model, spec):
        pass
    assert model.model.layers[0].mlp.down_proj is uneven
    assert model.model.layers[1].mlp.down_proj.quant_storage == torch.uint8
    assert caplog.messages == [
        "adapter.quantization: model.layers.0.mlp.down_proj is not quantized, because its size is not a multiple of 64"
    ]


@needed
@pytest.mark.parametrize(("family", "kept"), [("jamba", {"dt_proj"}), ("falcon_h1", {"out_proj"}), ("llama", set())])
def test_layers_whose_weight_other_code_reads_stay_exact(family, kept, caplog):
    """Mamba's scan takes the weights themselves, which four bits are not."""
    model = build_tiny(family)
    spec = RunSpec.model_validate({
        "model": {"name": "any", "dtype": "float32"},
        "adapter": {"type": "lora", "quantization": "nf4", "target_modules": ["q_proj"]},
    })  # fmt: skip
    with caplog.at_level("INFO"), quantize_linear_layers(model, spec):
        add_adapter(model, spec.adapter, 0)
    exact = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "lora" not in name}
    assert {name.rpartition(".")[2] for name in exact} - {"lm_head"} == kept
    assert all(f"{name} of " in caplog.text for name in kept)
    # Before experts are packed, which is when they move.
    patch_model(model)
    move_to_device(model, torch.device("cpu"))
    tokens = torch.arange(12)[None] + 3
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
