"""What contradicts `objective.type: grpo`, and how the spec of one is completed."""

from fractions import Fraction

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import DataRecipe, RunSpec

REWARD = {"function": "numeric"}
TWO = {"topology": {"nproc_per_node": 2}}
SHARDED = {"parallel": {"type": "fsdp"}, **TWO}
QUANTIZED = {"adapter": {"type": "lora", "quantization": "nf4"}}
AHEAD = {"generate_ahead": True}
REPLACED = {"filter_groups": True, "replacement_rounds": 2}
LORA = {"model": {"name": "organization/model"}, "adapter": {"type": "lora"}}


def make(objective=None, **sections):
    values = {
        "data": {"source": "a.jsonl", "sequence_length": 512},
        "objective": {"type": "grpo", "rewards": [REWARD], **(objective or {})},
        "training": {"micro_batch_size": 8},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunSpec.model_validate(values)


SERVED = {"generation": {"server": "generation:8471"}}
VLLM = {"generation": {"engine": "vllm"}}


CONTRADICTIONS = [
    ({"group_size": 1}, {}, "objective.group_size", "a whole number from 2"),
    ({"group_size": 3}, {}, "objective.group_size", "does not divide the 8 answers"),
    ({"rewards": []}, {}, "objective.rewards", "a list of sections"),
    ({"rewards": [{}]}, {}, "objective.rewards[0].function", "a function or a model"),
    ({"rewards": [{**REWARD, "model": "m"}]}, {}, "objective.rewards[0].function", "a function or a model"),
    ({"rewards": [{"model": "m", "arguments": {"a": 1}}]}, {}, "objective.rewards[0].arguments", "reward model takes"),
    ({"rewards": [{"function": "numerical"}]}, {}, "objective.rewards[0].function", "exact_match"),
    ({"rewards": [{**REWARD, "weight": 0}]}, {}, "objective.rewards[0].weight", "nothing is learned"),
    ({"rewards": [REWARD, REWARD]}, {}, "objective.rewards", "two are called 'numeric'"),
    ({"generation": {"max_new_tokens": 510}}, {}, "data.sequence_length", "have no room"),
    ({"generation": {"temperature": 0}}, {}, "objective.generation.temperature", "above 0"),
    ({"loss": "sapo", "epsilon": 0.3}, {}, "objective.epsilon", "has none"),
    ({"loss": "cispo", "delta": 4}, {}, "objective.delta", "has none"),
    ({"delta": 1.1}, {}, "objective.delta", "is below 1 \\+ epsilon_high"),
    ({}, {"data": {"packing": True}}, "data.packing", "are not packed"),
    ({}, {"data": {"overlong": "truncate"}}, "data.overlong", "the end of a prompt"),
    ({}, {"data": {"source": "python-docs"}}, "data.source", "has no prompts"),
    ({}, {"data": {"format": "chat"}}, "data.format", "does not fit objective.type 'grpo'"),
    ({}, {"data": {"train_on": "all"}}, "data.train_on", "generated answers"),
    ({}, {"data": {"template": "alpaca"}}, "data.template", "generates answers"),
    ({}, LORA | SHARDED | QUANTIZED, "parallel.type", "a copy for generation would lack"),
    ({}, LORA | {"parallel": {"type": "fsdp", "expert_parallel": 2}, **TWO}, "parallel.expert_parallel", "all experts"),
    ({"beta": 0.1}, LORA | {"adapter": {"type": "lora", "init_from": "old"}}, "objective.beta", "another model"),
    ({"beta": 0.1}, LORA | {"adapter": {"type": "lora", "modules_to_save": ["lm_head"]}}, "objective.beta", "another"),
    ({"num_iterations": 4}, {}, "checkpoint.every", "not a multiple of objective.num_iterations 4"),
    ({"num_iterations": 2}, {"checkpoint": {"per_epoch": 1}}, "checkpoint.per_epoch", "to a multiple of 2 instead"),
    ({"num_iterations": 2}, {"checkpoint": {"on_sigterm": "save"}}, "checkpoint.on_sigterm", "would generate others"),
    (AHEAD | {"num_iterations": 2}, {}, "objective.generate_ahead", "older than one step anyway"),
    (AHEAD, {"resources": {"time_limit": 60}}, "resources.time_limit", "leave it out, or set objective.generate_ahead"),
    (AHEAD, {"checkpoint": {"on_sigterm": "save"}}, "checkpoint.on_sigterm", "set objective.generate_ahead to false"),
    (AHEAD, {"faults": {"spike": "rollback"}}, "faults.spike", "skips data whose answers are there"),
    ({"replacement_rounds": 2}, {}, "objective.replacement_rounds", "filter_groups leaves out, but it is false"),
    (REPLACED | AHEAD, {}, "objective.replacement_rounds", "generates the next step's answers before"),
    (REPLACED, {"data": {"shuffle": "window"}}, "objective.replacement_rounds", "draws prompts from all rows"),
    ({}, {"training": {"neftune_noise_alpha": 5}}, "training.neftune_noise_alpha", "puts noise"),
    ({"generation": {"engine": "sglang"}}, {}, "objective.generation.engine", "'embedded' or 'vllm'"),
    (
        {"generation": {"gpu_memory_utilization": 0.4}},
        {},
        "objective.generation.gpu_memory_utilization",
        "set objective.generation.engine to 'vllm'",
    ),
    (
        {"generation": {"engine": "vllm", "top_p": 0.9, "temperature": 0.6}},
        {},
        "objective.generation.temperature",
        "tokens that top_k and top_p",
    ),
    (VLLM, LORA | QUANTIZED, "adapter.quantization", "cannot be handed over"),
    (VLLM, LORA | {"adapter": {"type": "lora", "use_dora": True}}, "adapter.use_dora", "not added to the weights"),
    (VLLM, LORA | {"training": {"float8": "tensorwise"}}, "training.float8", "scales of its own"),
    ({"generation": {"server": "http://a:1"}}, {}, "objective.generation.server", "host:port, such as generation:8471"),
    (SERVED, LORA | QUANTIZED, "adapter.quantization", "to the server; .* leave objective.generation.server"),
    (
        {"generation": {"engine": "vllm", "gpu_memory_utilization": 0.4, "server": "generation:8471"}},
        {},
        "objective.generation.gpu_memory_utilization",
        "start the server with --gpu-memory-utilization",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "sections", "path", "said"), CONTRADICTIONS)
def test_a_contradiction_names_the_field_and_the_way_out(objective, sections, path, said):
    with pytest.raises(SpecError, match=said) as found:
        make(objective, **sections)
    assert path in [problem.path for problem in found.value.problems]


def test_other_objectives_do_not_read_prompts():
    with pytest.raises(SpecError, match="only 'grpo' reads prompts"):
        RunSpec.model_validate({"data": {"source": "a.jsonl", "format": "prompt"}})


def test_a_spec_is_completed():
    spec = make({"num_iterations": 2}, training={"gradient_accumulation_steps": 3})
    assert not spec.data.packing
    assert spec.steps_per_row == Fraction(8 * 2, 24)
    assert spec.peak_lr == 0.05 * RunSpec().peak_lr
    assert RunSpec.model_validate(
        {"data": spec.data, "objective": {"type": "grpo", "rewards": [REWARD], "group_size": 6}}
    ).training.micro_batch_size == 6  # fmt: skip
    # Prompts leave room for answers.
    assert DataRecipe.from_spec(spec).data.sequence_length == 512 - 256
    weighed = ({}, AHEAD, SERVED, AHEAD | {"importance_cap": 3})
    assert [make(options).objective.largest_weight for options in weighed] == [None, 2.0, 2.0, 3.0]
    highest = {"dapo": 0.2, "cispo": 5.0}
    assert {loss: make({"loss": loss}).objective.highest_ratio for loss in highest} == highest


@pytest.mark.parametrize(
    ("objective", "weight"),
    [({}, None), (AHEAD, 2.0), (VLLM, 2.0), (VLLM | {"importance_cap": 5}, 5.0)],
    ids=["embedded", "ahead", "vllm", "given"],
)
def test_tokens_are_weighed_where_generation_differs(objective, weight):
    assert make(objective).objective.largest_weight == weight
