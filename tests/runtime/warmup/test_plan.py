"""The plan of a spec, and the same from the kernel layer alone."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from strata_kernels.patch import patch_model
from strata_kernels.row_buckets import row_bucket, row_buckets
from strata_kernels.warmup import Plan, record
from strata_kernels.warmup.plan_model import load_config, plan_model, plan_optimizer
from strata_platform.spec import RunSpec
from tasks.runtime.objectives.training_step import build_training_step
from tasks.runtime.optim.rounding import ROUNDINGS
from tasks.runtime.warmup.plan import plan_kernels
from tests.runtime.helpers.comparable_runs import make_spec
from tests.runtime.helpers.train_only import train_spec

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def spec(folder, **changes):
    training = {"micro_batch_size": 2, **changes.pop("training", {})}
    model = {"name": str(folder), "tokenizer": str(folder), "dtype": "bfloat16", **changes.pop("model", {})}
    return RunSpec.model_validate({"data": {"sequence_length": 64}, "training": training, "model": model, **changes})


def kernels(plan: Plan):
    return set(plan.specializations)


def from_config(folder, **changes):
    return kernels(plan_model(load_config(str(folder)), batch=2, length=64, **changes))


RUNS = {
    "single": {},
    "recomputing": {"training": {"gradient_checkpointing": "full"}},
    "accumulating": {"training": {"gradient_accumulation_steps": 4}},
    "hf": {"runtime": {"framework": "hf"}},
    "ddp": {"parallel": {"type": "ddp"}, "topology": {"nproc_per_node": 2}},
    "fsdp": {"parallel": {"type": "fsdp"}, "topology": {"nproc_per_node": 8}},
    "fsdp-fp32-weights": {
        "parallel": {"type": "fsdp", "compute_dtype": "bfloat16"},
        "topology": {"nproc_per_node": 2},
        "model": {"dtype": "float32"},
    },
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_a_configuration_has_the_plan_of_its_runs(folder, changes):
    """Whatever the strategy, the framework and what is recomputed: what was baked for a model serves them all."""
    # PyTorch's own optimizer steps weights in fp32.
    fp32 = changes.get("model", {}).get("dtype") == "float32"
    steps = kernels(plan_optimizer()) if fp32 else set()
    assert kernels(plan_kernels(spec(folder, **changes))) | steps == from_config(folder)


@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize("type", ["adamw", "adamw_8bit", "muon"])
def test_the_plan_has_the_steps_of_the_optimizer(folder, type, precision):
    found = plan_kernels(spec(folder, optimizer={"type": type, "precision": precision}))
    options = [dict(s.options) | dict(s.arguments) for s in found.specializations if s.name == "step_kernel"]
    moments = ["none", "bf16"] if type == "muon" else ["bf16"]
    assert sorted(o["M"] for o in options) == sorted(moments)
    eight_bits = [s for s in found.specializations if s.name == "eight_bits_kernel"]
    assert len(eight_bits) == (type == "adamw_8bit")
    assert {o["ROUNDING"] for o in options} == {ROUNDINGS[precision]}


def test_the_plan_has_steps_of_columns_under_tensor_parallelism():
    cut = [dict(s.options) | dict(s.arguments) for s in plan_optimizer(columns=True).specializations]
    assert {o["CUT"] for o in cut if "CUT" in o} == {False, True}


def test_the_plan_has_what_an_evaluation_launches(folder):
    """The loss without its gradient is another variant of a kernel, which would compile in the middle of training."""
    training, both = (kernels(plan_kernels(spec(folder, **more))) for more in ({}, {"evaluation": {"every": 5}}))
    assert training < both
    assert {dict(kernel.arguments)["GRADIENT"] for kernel in both - training} == {False}


def test_an_adapters_plan_is_that_of_trained_linear_layers_and_of_its_own_kernels(folder):
    plan, trained = kernels(plan_kernels(spec(folder, adapter={"type": "lora"}))), from_config(folder, adapter=True)
    # The norms' backward pass adds the residual's gradient.
    own = {"add_low_rank_kernel", "adapted_gate_fwd_kernel", "adapted_gate_bwd_kernel", "norm_bwd_kernel"}
    assert {item.name for item in plan - trained} == own
    # The activation is fused with the adapters.
    assert {item.name for item in trained - plan} == {"activation_fwd_kernel", "activation_bwd_kernel"}
    assert trained != from_config(folder)


def test_the_dtype_is_that_of_the_run(folder):
    plan = kernels(plan_kernels(spec(folder, model={"dtype": "float32"})))
    assert plan == from_config(folder, dtype=torch.float32) != from_config(folder)


def test_processes_that_share_rows_compile_for_their_parts():
    """Of four heads for queries and two for keys, and of 4,096 words: what they see of them in kernels' arguments."""
    cut = {"parallel": {"type": "fsdp", "tensor_parallel": 2}, "topology": {"nproc_per_node": 2}}
    plan = plan_kernels(RunSpec.model_validate({"model": {"dtype": "float32"}, "data": {"sequence_length": 64}, **cut}))
    seen = {(item.name, *value) for item in plan.specializations for value in item.arguments if value[0] in "HKV"}
    assert seen == {("rope_kernel", "H", 2), ("rope_kernel", "K", 1), ("cross_entropy_kernel", "V", 2048)}


def test_a_teacher_is_planned_for_the_parts_of_the_vocabulary(tmp_path):
    config = {**CONFIG, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    cut = {"parallel": {"type": "fsdp", "tensor_parallel": 2}, "topology": {"nproc_per_node": 2}}
    plan = plan_kernels(spec(tmp_path, objective={"type": "distill", "teacher": str(tmp_path)}, **cut))
    assert not any("divergence" in item.name for item in plan.specializations)
    widths = {dict(item.arguments)["V"] for item in plan.specializations if item.name == "cross_entropy_kernel"}
    assert widths == {CONFIG["vocab_size"] // 2}


@pytest.mark.parametrize(("ways", "experts"), [(1, 8), (2, 4), (8, 1)])
def test_processes_that_share_experts_compile_for_their_parts(tmp_path, ways, experts):
    sizes = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32}
    config = {**CONFIG, **sizes, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    split = {"parallel": {"type": "fsdp", "expert_parallel": ways}, "topology": {"nproc_per_node": 8}}
    plan = plan_kernels(spec(tmp_path, **split))
    counted = {dict(item.arguments)["BE"] for item in plan.specializations if item.name == "tile_kernel"}
    assert counted == {experts} and "rows_kernel" in {item.name for item in plan.specializations}


@pytest.mark.parametrize("positions", [1, 15, 16, 250, 1024, 8192])
def test_a_number_of_targets_is_rounded_up_to_one_of_few(positions):
    counts = row_buckets(positions)
    assert len(counts) <= 8 and counts[0] is None
    for count in range(positions + 1):
        rounded = row_bucket(count, positions)
        assert rounded in counts and (rounded or positions) >= count
        # No smaller one would do.
        assert all(other < count for other in counts[1:] if other < (rounded or positions) and count)


def test_a_plan_holds_every_number_of_targets(folder):
    """Also those of which the loss goes another way: over all rows at once, or over some of them at a time."""
    config = load_config(str(folder))
    config.vocab_size, config.hidden_size = 128256, 4096
    plan = plan_model(config, batch=2, length=4096)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    patch_model(model)
    model.train()
    tokens, mask = (
        torch.zeros(shape, dtype=dtype, device="meta")
        for shape, dtype in (((2, 4096), torch.int64), ((2, 1, 4096, 4096), torch.bool))
    )
    step = {"input_ids": tokens, "position_ids": tokens, "labels": tokens, "attention_mask": mask}
    items = torch.zeros((), dtype=torch.int64, device="meta")
    whole, *fewer = (
        kernels(record(lambda: model(**step, num_items_in_batch=items, max_targets=count).loss.backward()))  # noqa: B023
        for count in row_buckets(8192)
    )
    assert any(not launched <= whole for launched in fewer), "the shape no longer tells counts apart"
    assert kernels(plan) == whole.union(*fewer) | kernels(plan_optimizer())


def test_training_and_the_plan_build_their_step_by_one_function(monkeypatch, tmp_path):
    built = []

    def build(model, spec, device, *data):
        built.append(device.type)
        return build_training_step(model, spec, device, *data)

    for module in ("warmup.plan", "training.train"):
        monkeypatch.setattr(f"tasks.runtime.{module}.build_training_step", build)
    spec = make_spec(tmp_path, "one-step", "torch", "single", 1, steps=1)
    plan_kernels(spec)
    train_spec(spec)
    # The plan is a GPU's on any machine.
    assert built == ["cuda", "cuda" if torch.cuda.is_available() else "cpu"]
