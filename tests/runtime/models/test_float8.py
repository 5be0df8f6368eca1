"""Runs with `training.float8`, emulated: the losses of torchao on plain transformers, exact returns, plain weights."""

import copy
import dataclasses
import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from strata_kernels import patch_model
from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.training import Training
from tasks.runtime.checkpoint import latest, metadata_of
from tasks.runtime.models import float8
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.build import build_model
from tasks.runtime.models.float8 import (
    Float8FrozenLinear,
    Float8Linear,
    keep_slow_layers,
    quantize_frozen_weights,
    require_float8,
    require_float8_layers,
    use_float8,
)
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.comparable_runs import SAVED, STEPS, approx, curve, file_of, make_spec
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = [
    pytest.mark.usefixtures("narrowed"),
    # On a GPU, of a thread of autograd's that multiplies before PyTorch has made a context for it.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

SCALINGS = ["tensorwise", "rowwise"]
emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU measures: layers this small stay exact")
# Framework, strategy, adapter, `training`.
CELLS = {
    "ddp": ("torch", "ddp", "none", {"float8": "tensorwise"}),
    "fsdp": ("hf", "fsdp", "none", {"float8": "rowwise", "gradient_checkpointing": "full"}),
    "fsdp-compiled": ("lightning", "fsdp", "none", {"float8": "tensorwise", "compile": True}),
    "ddp-lora": ("torch", "ddp", "lora", {"float8": "tensorwise"}),
    "fsdp-lora": ("torch", "fsdp", "lora", {"float8": "tensorwise", "gradient_checkpointing": "per_op"}),
}


def training(scaling):
    return Training(float8=scaling)


def spec_of(**sections):
    return RunSpec.model_validate({"name": "float8", **sections})


def small_llama(dtype=torch.float32, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **fields})).to(dtype)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_losses_are_those_of_torchao_on_plain_transformers(scaling, dtype):
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    ours = small_llama(dtype)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=True)
    theirs = convert_to_float8_training(
        copy.deepcopy(ours), config=config, module_filter_fn=lambda module, path: path != "lm_head"
    )
    exact = copy.deepcopy(ours)
    patch_model(ours)
    use_float8(ours, training(scaling))
    curves = []
    for model in (ours, theirs, exact):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(5):
            tokens = torch.randint(96, (2, 24))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    bound = 5e-5 if dtype == torch.float32 else 2e-3
    assert curves[0] == pytest.approx(curves[1], rel=bound)
    assert curves[0] != pytest.approx(curves[2], rel=bound / 5)


@pytest.fixture(scope="module")
def output(output):
    save_pretrained(output / "pretrained")
    return output


@pytest.fixture(scope="module")
def alone(output):
    """A run of one process for each adapter and scaling, trained from its first checkpoint once more."""
    specs = {
        (adapter, scaling): make_spec(
            output, f"alone-{adapter}-{scaling}", "torch", "single", 1, adapter, {"float8": scaling}
        )
        for adapter, scaling in [("none", "tensorwise"), ("none", "rowwise"), ("lora", "tensorwise")]
    }
    for spec in specs.values():
        assert train_spec(spec).status == "complete"
        assert train_spec(spec, SAVED).status == "complete"
    return specs


def test_a_resumed_run_computes_the_same_bits(alone):
    for spec in alone.values():
        assert curve(spec, attempt=1) == curve(spec, attempt=0)[SAVED:]


@emulated
def test_it_is_not_exact_and_learns_as_exact_weights_do(output, alone):
    spec = make_spec(output, "exact", "torch", "single", 1)
    train_spec(spec)
    exact = [loss for _, loss, *_ in curve(spec)]
    for scaling in SCALINGS:
        found = [loss for _, loss, *_ in curve(alone["none", scaling], attempt=0)]
        assert found == pytest.approx(exact, rel=2e-2)
        assert found != pytest.approx(exact, rel=1e-5)


@emulated
def test_a_checkpoint_has_plain_weights_and_names_the_layers_that_stay_exact(alone):
    folder = latest(RunFolder.of(alone["none", "tensorwise"]).checkpoints)
    assert metadata_of(folder)["float8"] == {"scaling": "tensorwise", "exact": []}
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    names = [name for name in tensors if "q_proj.weight" in name]
    assert names and all(tensors[name].dtype in (torch.float32, torch.int16) for name in names)
    assert not any("inverse" in name for name in tensors)


@pytest.fixture(scope="module")
def trained(output):
    specs = {
        name: make_spec(output, name, framework, strategy, 2, adapter, settings)
        for name, (framework, strategy, adapter, settings) in CELLS.items()
    }
    launch(2, "--narrow", *(f"{file_of(output, spec)}{at}" for spec in specs.values() for at in ("", f"@{SAVED}")))
    return specs


@pytest.mark.parametrize("name", CELLS)
def test_two_processes_come_back_exactly_and_learn_as_one_does(name, trained, alone):
    """A scale for a tensor of half as many rows is another one, so losses are close and not equal."""
    first = curve(trained[name], attempt=0)
    _, _, adapter, settings = CELLS[name]
    expected = curve(alone[adapter, settings["float8"]], attempt=0)
    assert [loss for _, loss, *_ in first] == pytest.approx([loss for _, loss, *_ in expected], rel=5e-3)
    assert len(first) == STEPS and curve(trained[name], attempt=1) == first[SAVED:]


def test_recomputed_layers_have_the_same_losses(output, alone):
    for policy in ("full", "per_op"):
        settings = {"float8": "tensorwise", "gradient_checkpointing": policy}
        spec = make_spec(output, f"recomputed-{policy.replace('_', '-')}", "torch", "single", 1, training=settings)
        train_spec(spec)
        assert curve(spec) == approx(curve(alone["none", "tensorwise"], attempt=0))


def test_frozen_weights_are_bytes_and_their_adapters_exact(output):
    spec = make_spec(output, "bytes", "torch", "single", 1, "lora", {"float8": "tensorwise"})
    model = build_model(spec.model, 0)
    add_adapter(model, spec.adapter, 0)
    exact = next(model.parameters()).dtype
    before = sum(p.numel() * p.itemsize for p in model.parameters())
    use_float8(model, spec.training)
    layers = float8.float8_layers(model)
    quantize_frozen_weights(model, spec, torch.device("cpu"))
    after = sum(p.numel() * p.itemsize for p in model.parameters())
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    assert before - after == (exact.itemsize - 1) * weights
    kinds = {path.rpartition(".")[2]: type(module) for path, module in model.named_modules()}
    assert kinds["base_layer"] is Float8FrozenLinear and kinds["lm_head"] is nn.Linear
    assert all(p.dtype == exact for name, p in model.named_parameters() if "lora_" in name)


def test_layers_are_chosen_by_name_and_size(caplog):
    caplog.set_level(logging.INFO)
    model = small_llama(intermediate_size=104)
    model.model.layers[0].mlp.router = nn.Linear(64, 32)
    use_float8(model, training("rowwise"))
    chosen = {path.split(".", 2)[2] for path in float8.float8_layers(model)}
    assert chosen == {f"{n}.self_attn.{part}_proj" for n in (0, 1) for part in "qkvo"}
    assert "8 linear layers multiply in FP8" in caplog.text
    assert "model.layers.1.mlp.down_proj stays exact, because 16 does not divide its sizes" in caplog.text


def test_layers_that_are_slower_keep_their_class(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    spec = spec_of(training={"float8": "tensorwise"})

    host = 0.1

    def costs(tokens, outputs, inputs, *_):
        assert tokens == spec.training.micro_batch_size * spec.data.sequence_length
        return float8._Cost(1.0, 0.1), float8._Cost(0.6 if outputs >= inputs else 1.2, host)

    monkeypatch.setattr(float8, "_costs", costs)
    model = small_llama()
    use_float8(model, spec.training)
    monkeypatch.setattr(Processes, "device", torch.device("cuda"))
    gpu = Processes()
    found = keep_slow_layers(model, spec, gpu, torch.bfloat16, {})
    slow = sorted(f"model.layers.{n}.{part}" for n in (0, 1) for part in ("mlp.down_proj", "self_attn.k_proj",
                                                                       "self_attn.v_proj"))  # fmt: skip
    assert found == {"float8": {"scaling": "tensorwise", "exact": slow}}
    assert "FP8 is not faster in model.layers.0.self_attn.k_proj" in caplog.text
    assert {path for path, m in model.named_modules() if type(m) is nn.Linear} == {*slow, "lm_head"}
    # A resumed run does not measure.
    again = small_llama()
    use_float8(again, spec.training)
    monkeypatch.setattr(float8, "_costs", None)
    assert keep_slow_layers(again, spec, gpu, torch.bfloat16, found) == found
    assert isinstance(again.model.layers[0].mlp.up_proj, Float8Linear)
    assert type(again.model.layers[0].mlp.down_proj) is nn.Linear
    # If the host takes longer than the GPU, its time is that of the run.
    monkeypatch.setattr(float8, "_costs", costs)
    host, bound = 1.5, small_llama()
    use_float8(bound, spec.training)
    found = keep_slow_layers(bound, spec, gpu, torch.bfloat16, {})
    assert len(found["float8"]["exact"]) == 14 and not float8.float8_layers(bound)


def test_a_gpu_without_fp8_is_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"'rowwise' needs a GPU .* and NVIDIA A100 has 8\.0; set training.float8 to"):
        require_float8(training("rowwise"))
    require_float8(training("none"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    require_float8(training("rowwise"))


def test_a_model_without_a_layer_that_fits_is_rejected(tmp_path):
    small_llama(hidden_size=40, intermediate_size=72).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    model = Model(name=str(tmp_path))
    with pytest.raises(ValueError, match="has no linear layer with sizes divisible by 16 beside its head; set"):
        require_float8_layers(model, training("tensorwise"))


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"parallel": {"type": "deepspeed"}, "topology": {"nproc_per_node": 2}}, "parallel.type"),
        (
            {"parallel": {"type": "fsdp", "tensor_parallel": 2}, "topology": {"nproc_per_node": 2}},
            "parallel.tensor_parallel",
        ),
        ({"model": {"name": "a/b"}, "adapter": {"type": "lora", "quantization": "nf4"}}, "adapter.quantization"),
        ({"model": {"name": "a/b"}, "adapter": {"type": "lora", "use_dora": True}}, "adapter.use_dora"),
    ],
    ids=["deepspeed", "tensor-parallel", "nf4", "dora"],
)
def test_what_it_does_not_go_with(sections, field):
    with pytest.raises(SpecError, match=field):
        spec_of(training={"float8": "tensorwise"}, **sections)
