"""Advice for a run that does not fit: with numbers, and such as the spec takes."""

import re

import pytest

from strata_platform.estimate import shape_of
from strata_platform.spec import RunSpec
from tasks.runtime.advice import GIB, advice_for, advise

LLAMA_8B = shape_of("meta-llama/Llama-3.1-8B")


def spec_of(**changes):
    base = {"model": {"name": "meta-llama/Llama-3.1-8B"}, "data": {"sequence_length": 4096}}
    return RunSpec.model_validate(base | changes)


def test_the_advice_has_numbers_and_names_fields():
    spec = spec_of(training={"micro_batch_size": 8}, kernels={"enabled": False})
    said = advise(spec, LLAMA_8B, 139.8 * GIB)
    assert "The GPU has 139.8 GiB" in said
    halved = r"training\.micro_batch_size 8 -> 4, training\.gradient_accumulation_steps 1 -> 2"
    assert re.search(halved + r": about [\d.]+ GiB, [\d.]+ less", said)
    assert re.search(r"training\.gradient_checkpointing none -> full: about [\d.]+ GiB, [\d.]+ less, fits; ", said)
    assert re.search(r"adapter\.type none -> lora: .*does not fit alone", said)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernels": {"enabled": False}},
        {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}},
        {"topology": {"nproc_per_node": 2}, "parallel": {"type": "fsdp"}, "resources": {"gpu": 2}},
        {"adapter": {"type": "lora"}},
        {"model": {"name": "tiny-llama", "dtype": "float32"}},
    ],
    ids=["one", "plain operators", "ddp", "fsdp", "lora", "preset"],
)
def test_whatever_is_advised_needs_less_and_is_a_spec(changes):
    spec = spec_of(**{"training": {"micro_batch_size": 4}} | changes)
    lines = advise(spec, LLAMA_8B, 20 * GIB).splitlines()[1:]
    assert lines
    for line in lines:
        changed = spec.model_dump()
        for section, field, value in re.findall(r"(\w+)\.(\w+) \S+ -> ([^\s,:]+)", line):
            if field == "type":
                changed[section] = {}
            changed[section][field] = () if value == "[]" else value == "true" if value in ("true", "false") else value
        other = RunSpec.model_validate(changed)
        assert other.data.sequence_length < 4096 or other.rows_per_step == spec.rows_per_step
        assert float(re.search(r"([\d.]+) less", line)[1]) > 0


def test_a_model_too_large_for_anything_gets_a_way_out():
    spec = spec_of(
        training={"micro_batch_size": 1, "gradient_checkpointing": "full"},
        data={"sequence_length": 8},
        model={"name": "x/y", "dtype": "bfloat16"},
        adapter={"type": "lora"},
        topology={"nproc_per_node": 8, "nnodes": 64},
        parallel={"type": "fsdp", "cpu_offload": True},
    )
    assert "more processes" in advise(spec, LLAMA_8B, GIB)


def test_a_model_that_the_estimate_does_not_know_still_ends_with_its_own_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    spec = spec_of(model={"name": str(tmp_path)})
    assert "no advice for this model: model_type 'gpt2' is not one" in advice_for(spec, GIB)
