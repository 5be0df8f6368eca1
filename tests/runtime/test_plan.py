"""The plan of a spec, and the same from the kernel layer alone."""

import json

import pytest
import torch

from strata_kernels.warmup import Plan
from strata_kernels.warmup.model import load_config, plan_model
from strata_platform.spec import RunSpec
from tasks.runtime.plan import plan_of

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
    assert kernels(plan_of(spec(folder, **changes))) == from_config(folder)


def test_an_adapters_plan_is_that_of_trained_linear_layers(folder):
    plan = kernels(plan_of(spec(folder, adapter={"type": "lora"})))
    assert plan == from_config(folder, adapter=True) != from_config(folder)


def test_the_dtype_is_that_of_the_run(folder):
    plan = kernels(plan_of(spec(folder, model={"dtype": "float32"})))
    assert plan == from_config(folder, dtype=torch.float32) != from_config(folder)


def test_processes_that_share_rows_compile_for_their_parts():
    """Of four heads for queries and two for keys, and of 4,096 words: what they see of them in kernels' arguments."""
    cut = {"parallel": {"type": "fsdp", "tensor_parallel": 2}, "topology": {"nproc_per_node": 2}}
    plan = plan_of(RunSpec.model_validate({"data": {"sequence_length": 64}, **cut}))
    seen = {(item.name, *value) for item in plan.specializations for value in item.arguments if value[0] in "HKV"}
    assert seen == {("rope_kernel", "H", 2), ("rope_kernel", "K", 1), ("cross_entropy_kernel", "V", 2048)}
