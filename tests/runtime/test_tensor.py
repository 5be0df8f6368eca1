"""Matrices cut over processes: what cannot be is refused, and what is has the gradients of the whole."""

import os
import subprocess
import sys

import pytest
from transformers import AutoConfig

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from tasks.runtime.parallel.tensor import require_divisible
from tests.runtime.test_matrix import ROOT


def spec_of(processes=2, model="tiny-llama", **sections):
    parallel = {"type": "fsdp", "tensor_parallel": 2, **sections.pop("parallel", {})}
    topology = {"nproc_per_node": processes}
    return RunSpec.model_validate({"model": {"name": model}, "parallel": parallel, "topology": topology, **sections})


def test_a_cut_model_has_the_gradients_of_the_whole_one():
    ended = subprocess.run(
        [sys.executable, "-m", "tests.runtime.tensor_families"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_processes_of_a_group_read_the_same_rows():
    spec = spec_of(8, parallel={"replicas": 2}, training={"micro_batch_size": 3})
    assert (spec.sharers, spec.readers, spec.rows_per_step) == (2, 4, 12)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tensor_parallel": 3}}, r"tensor_parallel: 3 does not divide the 2 processes"),
        ({"parallel": {"replicas": 2}}, r"replicas: 2 does not divide the 1 groups of parallel\.tensor_parallel 2"),
        ({"adapter": {"type": "lora"}, "model": "m"}, r"tensor_parallel.*adapter\.type 'lora' puts others beside them"),
        ({"optimizer": {"type": "muon"}}, r"tensor_parallel.*'muon' needs them whole"),
        ({"training": {"compile": True}}, r"tensor_parallel.*training\.compile does not see"),
        ({"training": {"gradient_checkpointing": "per_op"}}, r"tensor_parallel.*'per_op' chooses among them"),
        ({"objective": {"type": "distill", "teacher": "t"}}, r"tensor_parallel.*objective\.type 'distill' reads it"),
    ],
)
def test_the_spec_refuses_what_cannot_be(sections, message):
    with pytest.raises(SpecError, match=message):
        spec_of(**sections)


@pytest.mark.parametrize(
    ("model_type", "sizes", "ways", "message"),
    [
        ("llama", {"num_attention_heads": 2}, 4, r"4 does not divide num_attention_heads 2 .*; set it to one of 1, 2"),
        ("qwen2", {"num_key_value_heads": 2}, 4, r"4 does not divide num_key_value_heads 2 .*; set it to one of 1, 2"),
        ("phi3", {"intermediate_size": 33}, 2, r"2 does not divide intermediate_size 33"),
        ("falcon_h1", {}, 2, r"for model type 'falcon_h1' it does not say how; set parallel\.tensor_parallel to 1"),
    ],
)
def test_the_model_refuses_before_its_weights_are_read(tmp_path, model_type, sizes, ways, message):
    base = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 32, "vocab_size": 65}
    AutoConfig.for_model(model_type, **{**base, **sizes}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        require_divisible(spec_of(4, str(tmp_path), parallel={"tensor_parallel": ways}))
