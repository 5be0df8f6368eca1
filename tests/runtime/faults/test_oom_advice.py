"""Advice for a run that does not fit: with numbers, and such as the spec takes."""

import gc
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from strata_platform.estimate import shape_of
from strata_platform.spec import RunSpec
from tasks.runtime.faults.oom_advice import GIB, advice_for, advise
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training.session import _explain_errors
from tests.runtime.helpers.train_only import train_spec

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


def of_line(spec, line):
    """The spec with what a line of the advice says."""
    changed = spec.model_dump()
    for section, field, value in re.findall(r"(\w+)\.(\w+) \S+ -> ([^\s,:]+)", line):
        if field == "type":
            changed[section] = {}
        changed[section][field] = () if value == "[]" else value == "true" if value in ("true", "false") else value
    return RunSpec.model_validate(changed)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernels": {"enabled": False}},
        {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}},
        {"topology": {"nproc_per_node": 2}, "parallel": {"type": "fsdp"}, "resources": {"gpu": 2}},
        {"adapter": {"type": "lora"}},
        {"model": {"name": "tiny-llama", "dtype": "float32"}},
        {"adapter": {"type": "lora", "quantization": "nf4"}},
        {"topology": {"nproc_per_node": 2}, "parallel": {"type": "fsdp", "tensor_parallel": 2}},
        {"topology": {"nproc_per_node": 4}, "parallel": {"type": "fsdp", "tensor_parallel": 2, "context_parallel": 2}},
    ],
    ids=["one", "plain operators", "ddp", "fsdp", "lora", "preset", "four bits", "cut matrices", "cut rows"],
)
def test_whatever_is_advised_needs_less_and_is_a_spec(changes):
    spec = spec_of(**{"training": {"micro_batch_size": 4}} | changes)
    lines = advise(spec, LLAMA_8B, 20 * GIB).splitlines()[1:]
    assert lines
    for line in lines:
        assert of_line(spec, line).rows_per_step == spec.rows_per_step
        assert float(re.search(r"([\d.]+) less", line)[1]) > 0


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("passes", [1, 2, 3, 6])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 9])
def test_a_step_keeps_its_rows_and_may_have_them_one_by_one(rows, passes, processes):
    spec = spec_of(
        training={"micro_batch_size": rows, "gradient_accumulation_steps": passes},
        topology={"nproc_per_node": processes},
        parallel={"type": "fsdp" if processes > 1 else "single"},
    )
    said = advise(spec, LLAMA_8B, 20 * GIB)
    others = [of_line(spec, line) for line in said.splitlines()[1:]]
    assert [other.rows_per_step for other in others] == [spec.rows_per_step] * len(others)
    one_by_one = rf"training\.micro_batch_size {rows} -> 1, training\.gradient_accumulation_steps {passes} -> "
    # Gradients that are added up take more than what the second of two rows keeps.
    helps = rows > 1 and (rows, passes, processes) != (2, 1, 1)
    assert bool(re.search(one_by_one + str(rows * passes), said)) == helps


@pytest.mark.parametrize("type", ["adamw", "adamw_8bit", "muon"])
def test_moments_may_give_way(type):
    """44.9 GiB with the low bits of master weights; not beside Muon, and not where it is on already."""
    fields = {"optimizer": {"type": type}, "training": {"gradient_checkpointing": "full"}}
    said = advise(spec_of(**fields), LLAMA_8B, 70 * GIB)
    found = re.search(r"optimizer\.paged false -> true: about [\d.]+ GiB, ([\d.]+) less, (.*)", said)
    assert bool(found) == (type != "muon")
    if type == "adamw":
        assert (found[1], found[2].partition(";")[0]) == ("44.9", "fits") and "another name" not in found[2]
    if found:
        fields["optimizer"]["paged"] = True
        again = advise(spec_of(**fields), LLAMA_8B, 70 * GIB)
        assert "optimizer.paged false" not in again


def test_tokens_of_a_step_stay_as_many():
    spec = spec_of(training={"micro_batch_size": 3, "tokens_per_step": 6 * 4096})
    assert "training.micro_batch_size 3 -> 1, training.gradient_accumulation_steps 2 -> 6" in advise(
        spec, LLAMA_8B, 20 * GIB
    )


def test_what_binds_the_folder_takes_another_name(tmp_path):
    spec = spec_of(
        output=str(tmp_path),
        model={"name": "meta-llama/Llama-3.1-8B", "dtype": "float32"},
        kernels={"enabled": False},
        topology={"nproc_per_node": 2},
        parallel={"type": "ddp"},
    )
    RunFolder.of(spec).claim(spec)
    told = {}
    for line in advise(spec, LLAMA_8B, 20 * GIB).splitlines()[1:]:
        other = of_line(spec, line)
        told[line.split()[0]] = line.endswith("; choose another name")
        if told[line.split()[0]]:
            with pytest.raises(ValueError, match="Choose another name"):
                RunFolder.of(spec).claim(other)
        else:
            RunFolder.of(spec).claim(other)
    assert {field for field, another in told.items() if another} == {
        "model.dtype", "adapter.type", "data.sequence_length", "optimizer.type",
    }  # fmt: skip
    assert {
        "kernels.enabled",
        "training.micro_batch_size",
        "training.gradient_checkpointing",
        "parallel.type",
    } <= told.keys()


def test_before_the_first_step_no_other_name_is_needed(tmp_path):
    LlamaConfig(vocab_size=512).save_pretrained(tmp_path / "model")
    spec = spec_of(output=str(tmp_path), model={"name": str(tmp_path / "model")}, kernels={"enabled": False})
    folder = RunFolder.of(spec)
    folder.claim(spec)
    assert "kernels.enabled false -> true" in advice_for(spec, folder, GIB)
    assert "another name" not in advice_for(spec, folder, GIB)
    (folder.checkpoints / "checkpoint-2").mkdir(parents=True)
    assert "other rows; choose another name" in advice_for(spec, folder, GIB)


def test_a_model_too_large_for_anything_gets_a_way_out():
    spec = spec_of(
        training={"micro_batch_size": 1, "gradient_checkpointing": "full"},
        data={"sequence_length": 8},
        model={"name": "x/y", "dtype": "bfloat16"},
        adapter={"type": "lora", "use_dora": True},
        topology={"nproc_per_node": 8, "nnodes": 64},
        parallel={"type": "fsdp", "cpu_offload": True},
    )
    assert "more processes" in advise(spec, LLAMA_8B, GIB)


def test_a_model_that_the_estimate_does_not_know_still_ends_with_its_own_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    spec = spec_of(model={"name": str(tmp_path)})
    assert "no advice for this model: model_type 'gpt2' is not supported" in advice_for(spec, RunFolder(tmp_path), GIB)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: unhandled cuda error, NCCL 2.27\nLast error:\nCuda failure 2 'out of memory'"),
    ],
    ids=["PyTorch", "CUDA", "cuBLAS", "NCCL"],
)
def test_whoever_finds_no_memory_there_is_advice(error, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * GIB))
    with pytest.raises(torch.OutOfMemoryError) as told, _explain_errors(RunSpec(), RunFolder(tmp_path), Processes()):
        raise error
    assert str(told.value).startswith(f"{error}\nThe GPU has 4.0 GiB, and by the model's shapes a process needs about ")


@pytest.mark.gpu
def test_on_a_gpu_the_first_advice_that_fits_does(output):
    """Of a share of the GPU's memory, so that a small model is too large."""
    share = 3 * GIB / torch.cuda.get_device_properties(0).total_memory
    spec = RunSpec.model_validate(
        {
            "name": "large",
            "output": str(output),
            "model": {"dtype": "bfloat16"},
            "data": {"sequence_length": 2048},
            "training": {"steps": 2, "micro_batch_size": 64},
            "tracking": {"report_to": []},
            "runtime": {"framework": "torch"},
            # Which tries more than a share of the memory.
            "faults": {"health_check": False},
        }
    )
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"The GPU has 3\.0 GiB, and by the model's shapes") as refused:
            train_spec(spec)
        fitting = next(line for line in str(refused.value).splitlines() if " fits; " in line)
        # What the frames of the error hold.
        del refused
        gc.collect()
        torch.cuda.empty_cache()
        assert train_spec(of_line(spec, fitting)).status == "complete"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
