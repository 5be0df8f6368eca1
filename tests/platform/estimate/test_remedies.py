"""What people do when a run does not fit."""

import pytest

from strata_platform.estimate import GPUS, estimate, shape_of
from strata_platform.estimate.config_shapes import from_config
from strata_platform.estimate.remedies import changed_fields, combined, proposals
from strata_platform.spec import RunSpec

LLAMA = {"model": {"name": "meta-llama/Llama-3.1-8B", "dtype": "bfloat16"}, "data": {"sequence_length": 4096}}
L40S = GPUS["l40s"]


def take(gpu=L40S, shape=None, **sections):
    spec = RunSpec.model_validate(LLAMA | sections)
    return estimate(spec, shape or shape_of(spec.model.name), gpu)


def test_each_proposal_is_a_run_that_takes_less():
    found = take(training={"micro_batch_size": 4, "gradient_accumulation_steps": 8}, kernels={"enabled": False})
    offers = proposals(found, 4)
    assert not found.fits
    changes = [set(changed_fields(found.spec, offer.estimate.spec)) for offer in offers]
    for expected in (
        {"kernels.enabled"},
        {"training.micro_batch_size", "training.gradient_accumulation_steps"},
        {"training.gradient_checkpointing"},
        {"optimizer.type"},
        {"optimizer.paged"},
        {"adapter.type"},
        {"adapter.type", "adapter.quantization"},
        {"parallel.type", "topology.nproc_per_node", "training.gradient_accumulation_steps"},
    ):
        assert any(expected <= fields for fields in changes), expected
    for offer in offers:
        assert offer.estimate.memory.peak < found.memory.peak
        assert offer.estimate == estimate(offer.estimate.spec, found.shape, L40S)
        assert offer.estimate.spec.topology.world_size <= 4
        assert offer.slower_by_unknown == offer.estimate.spec.optimizer.paged


def test_sums_of_gradients_in_bfloat16_are_proposed_where_they_are_in_float32():
    found = take(training={"micro_batch_size": 1, "gradient_accumulation_steps": 32})
    offered = [changed_fields(found.spec, offer.estimate.spec) for offer in proposals(found, 1)]
    assert {"training.gradient_accumulation_dtype": "bfloat16"} in offered
    found = take(training={"micro_batch_size": 2, "gradient_accumulation_steps": 16})
    offered = [changed_fields(found.spec, offer.estimate.spec) for offer in proposals(found, 1)]
    assert not any("training.gradient_accumulation_dtype" in fields for fields in offered)


def test_several_together_fit_where_none_does():
    found = take(GPUS["a100-40gb"], training={"micro_batch_size": 8})
    both = combined(found, 1)
    assert both.fits and both.spec.rows_per_step == found.spec.rows_per_step
    assert both.spec.topology.world_size == 1
    fields = changed_fields(found.spec, both.spec)
    values = found.spec.model_dump(mode="json")
    for path, value in fields.items():
        section, field = path.split(".")
        values[section] = {field: value} if field == "type" else {**values[section], field: value}
    assert RunSpec.model_validate(values) == both.spec
    # The others of a fraction of a layer do not fit one GPU, whatever is changed.
    assert combined(take(GPUS["a100-40gb"], shape_of("llama-3.1-70b")), 1) is None


def test_state_in_host_memory_is_not_on_the_gpu():
    processes = {"topology": {"nproc_per_node": 2}}
    split = take(**processes, parallel={"type": "fsdp"})
    moved = take(**processes, parallel={"type": "fsdp", "cpu_offload": True})
    assert (moved.memory.weights, moved.memory.gradients, moved.memory.optimizer) == (0, 0, 0)
    assert moved.memory.gathered == split.memory.gathered > 0
    [said] = [text for text in moved.uncounted if "cpu_offload" in text]
    per_process = (split.memory.weights + split.memory.optimizer + split.memory.weights) / 2**30
    assert f"{per_process:.1f} GiB of weights, gradients and optimizer state" in said


@pytest.mark.parametrize(
    ("adapter", "kernels", "packed"),
    [
        ({"type": "lora"}, "auto", 0),
        ({"type": "lora", "quantization": "nf4"}, "auto", 2 * 3 * 2048 * 768 * 128),
        ({"type": "lora", "quantization": "nf4"}, False, 0),
    ],
)
def test_experts_get_no_adapters_and_are_packed_for_the_fused_operator(adapter, kernels, packed):
    """transformers has them in tensors of three dimensions, which are no linear layers."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2, "num_attention_heads": 32,
             "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 1000}  # fmt: skip
    mixture = from_config({"model_type": "qwen3_moe", **sizes, "moe_intermediate_size": 768, "num_experts": 128,
                           "num_experts_per_tok": 8})  # fmt: skip
    attention = 2 * (2048 * 4096 * 2 + 2048 * 512 * 2)
    memory = take(shape=mixture, adapter=adapter, kernels={"enabled": kernels}).memory
    quantized = attention + packed if "quantization" in adapter else 0
    saved = quantized * 1.5 - quantized / 64 - 4 * quantized / 64 / 256
    trained = mixture.lora_parameters(16)
    assert memory.weights == pytest.approx(2 * (mixture.parameters + trained) - saved, rel=1e-6)
    assert trained == 2 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
