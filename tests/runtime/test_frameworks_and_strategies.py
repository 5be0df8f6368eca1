"""Every framework under every strategy trains the same, comes back exactly, and continues what another one began.

Runs are evaluated after every second step, which no reference is, and no run that comes back.
"""

import json
from itertools import product
from typing import get_args

import pytest
import torch

from strata_platform.errors import SpecError
from strata_platform.spec.run_spec import Adapter, Parallel, Runtime
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.comparable_runs import (
    SAVED,
    STEPS,
    approx,
    curve,
    evaluations,
    file_of,
    make_spec,
    rounded,
    unevaluated,
)
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("narrowed")
FRAMEWORKS = get_args(Runtime.model_fields["framework"].annotation)


def types(union):
    """What may be said for the `type` of a section."""
    return [section.model_fields["type"].default for section in get_args(get_args(union)[0])]


STRATEGIES, ADAPTERS = types(Parallel), types(Adapter)


def accepted(*cell):
    try:
        return make_spec("out", "x", *cell)
    except SpecError:
        return None


# All that the spec allows on two processes.
CELLS = [cell for cell in product(FRAMEWORKS, STRATEGIES, (2,), ADAPTERS) if accepted(*cell)]

OPTIONS = {"cpu_offload": True, "reshard_after_forward": False, "compute_dtype": "bfloat16"}

# What layers recompute, and compiling them: framework, strategy, adapter, settings of `training`.
LAYERS = {
    "recomputed": ("torch", "fsdp", "none", {"gradient_checkpointing": "full"}),
    "compiled": ("torch", "ddp", "lora", {"compile": True}),
    "compiled-per-op": ("hf", "fsdp", "none", {"compile": True, "gradient_checkpointing": "per_op"}),
}

# Stages and places of ZeRO beside the default, which is in the cells: framework, adapter, settings of the strategy.
ZERO = {
    "stage-1": ("hf", "none", {"stage": 1, "offload_optimizer": "cpu"}),
    "stage-3": ("torch", "none", {"stage": 3}),
    "stage-3-offload": ("hf", "lora", {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
}

# Both processes compute the same rows, and matrices or rows are cut.
SHARED = {f"tensor-{framework}": (framework, {"tensor_parallel": 2}) for framework in FRAMEWORKS}
SHARED |= {f"context-{framework}": (framework, {"context_parallel": 2}) for framework in FRAMEWORKS}


def name_of(cell):
    return "-".join(map(str, cell))


@pytest.fixture(scope="module")
def output(output):
    save_pretrained(output / "pretrained")
    return output


@pytest.fixture(scope="module")
def references(output):
    """The curve of the plain loop in one process, by adapter."""
    specs = {adapter: make_spec(output, f"reference-{adapter}", "torch", "single", 1, adapter) for adapter in ADAPTERS}
    assert all(train_spec(spec).status == "complete" for spec in specs.values())
    return {adapter: curve(spec) for adapter, spec in specs.items()}


@pytest.fixture(scope="module")
def reference(references):
    return references["none"]


@pytest.fixture(scope="module")
def expected_evaluations(output):
    """Validation losses of the plain loop in one process, by adapter."""
    specs = {
        adapter: make_spec(output, f"evaluated-{adapter}", "torch", "single", 1, adapter, evaluated=True)
        for adapter in ADAPTERS
    }
    assert all(train_spec(spec).status == "complete" for spec in specs.values())
    return {adapter: evaluations(spec) for adapter, spec in specs.items()}


@pytest.fixture(scope="module")
def trained(output, reference):
    """Specs of runs by two processes. Each cell is trained from the start, and again from its first checkpoint."""
    specs = {cell: make_spec(output, name_of(cell), *cell, evaluated=True) for cell in CELLS}
    specs |= {
        option: make_spec(output, option.replace("_", "-"), "torch", "fsdp", 2, evaluated=True, **{option: value})
        for option, value in OPTIONS.items()
    }
    specs |= {
        key: make_spec(output, key, framework, strategy, 2, adapter, training, evaluated=True)
        for key, (framework, strategy, adapter, training) in LAYERS.items()
    }
    specs |= {
        key: make_spec(output, key, framework, "deepspeed", 2, adapter, evaluated=True, **settings)
        for key, (framework, adapter, settings) in ZERO.items()
    }
    rows = {"gradient_accumulation_steps": 4}
    specs |= {
        key: make_spec(output, key, framework, "fsdp", 2, training=rows, evaluated=True, **settings)
        for key, (framework, settings) in SHARED.items()
    }
    specs["rounded"] = rounded(make_spec(output, "rounded", "torch", "deepspeed", 2, stage=3, evaluated=True))
    specs["dora"] = make_spec(output, "dora", "hf", "fsdp", 2, "lora", dora=True, evaluated=True)
    # The run that one process began, and two go on with.
    specs["widened"] = make_spec(output, "reference-none", "hf", "fsdp", 2)
    files = {key: file_of(output, spec) for key, spec in specs.items()}
    again = [
        f"{file_of(output, unevaluated(specs[key]), f'{specs[key].name}-again')}@{SAVED}"
        for key in (*CELLS, *ZERO, *SHARED, "rounded", "widened")
    ]
    launch(2, "--narrow", *(file for key, file in files.items() if key != "widened"), *again)
    return specs


def test_the_matrix_has_every_choice_of_the_spec():
    assert set(CELLS) == set(product(FRAMEWORKS, set(STRATEGIES) - {"single"}, (2,), ADAPTERS))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_alone_every_framework_computes_the_same_bits(output, references, expected_evaluations, framework, adapter):
    spec = make_spec(output, f"alone-{framework}-{adapter}", framework, "single", 1, adapter, evaluated=True)
    assert train_spec(spec).status == "complete"
    assert curve(spec) == references[adapter]
    assert evaluations(spec) == expected_evaluations[adapter]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_run_learns(references, adapter):
    losses = [loss for _, loss, *_ in references[adapter]]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_losses_are_those_of_one_process(trained, references, cell):
    assert curve(trained[cell], attempt=0) == approx(references[cell[-1]])


EVALUATED = {
    **{name_of(cell): (cell, cell[-1]) for cell in CELLS},
    **{key: (key, adapter) for key, (_, adapter, _) in ZERO.items()},
    **{key: (key, "none") for key in (*SHARED, "cpu_offload", "reshard_after_forward")},
    **{key: (key, adapter) for key, (_, _, adapter, _) in LAYERS.items()},
}


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_measures_the_same_as_one_process(trained, expected_evaluations, name):
    key, adapter = EVALUATED[name]
    expected = [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected_evaluations[adapter]]
    assert len(expected) == STEPS // 2 and evaluations(trained[key]) == expected


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_resumed_run_computes_the_same_bits(trained, cell):
    assert curve(trained[cell], attempt=1) == curve(trained[cell], attempt=0)[SAVED:]


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_one_process_of_another_framework_continues_what_two_began(trained, output, references, cell):
    other, adapter = FRAMEWORKS[FRAMEWORKS.index(cell[0]) - 1], cell[-1]
    spec = make_spec(output, trained[cell].name, other, "single", 1, adapter)
    assert train_spec(spec, SAVED).status == "complete"
    assert curve(spec) == approx(references[adapter])


def test_two_processes_continue_what_one_began(trained, reference):
    assert curve(trained["widened"]) == approx(reference)
    assert [step for step, *_ in curve(trained["widened"], attempt=1)] == list(range(SAVED + 1, STEPS + 1))


def test_each_process_writes_its_part(trained):
    folder = RunFolder.of(trained["torch", "fsdp", 2, "none"]).checkpoints / f"checkpoint-{SAVED}"
    parts = json.loads((folder / "index.json").read_text())["model.model.embed_tokens.weight"]["parts"]
    assert {key: part["shape"] for key, part in parts.items()} == {"0,0": [2048, 128], "2048,0": [2048, 128]}
    assert len({part["file"] for part in parts.values()}) == 2


@pytest.mark.parametrize("key", LAYERS)
def test_neither_recomputation_nor_compiling_changes_a_loss(trained, references, key):
    assert curve(trained[key]) == approx(references[LAYERS[key][2]])


@pytest.mark.parametrize("option", ["cpu_offload", "reshard_after_forward"])
def test_what_fsdp_keeps_and_where_changes_no_loss(trained, reference, option):
    assert curve(trained[option]) == approx(reference)


def test_fsdp_splits_what_dora_takes_lengths_of(trained, output, references):
    """DoRA learns the lengths of weight vectors, which are measured while their layer is whole."""
    spec = make_spec(output, "reference-dora", "torch", "single", 1, "lora", dora=True)
    assert train_spec(spec).status == "complete"
    assert curve(trained["dora"]) == approx(curve(spec))
    assert curve(spec) != references["lora"]


def test_fsdp_computes_in_bfloat16_on_exact_weights(trained, reference):
    losses = [loss for _, loss, *_ in curve(trained["compute_dtype"])]
    expected = [loss for _, loss, *_ in reference]
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses != pytest.approx(expected, rel=1e-5)
    index = Index(checkpoint.latest(RunFolder.of(trained["compute_dtype"]).checkpoints))
    assert index.dtype("model.model.embed_tokens.weight") == torch.float32


@pytest.mark.parametrize("key", SHARED)
def test_processes_that_share_rows_have_the_losses_of_one(trained, output, references, key):
    framework, _ = SHARED[key]
    assert curve(trained[key], attempt=0) == approx(references["none"])
    assert curve(trained[key], attempt=1) == curve(trained[key], attempt=0)[SAVED:]
    other = FRAMEWORKS[FRAMEWORKS.index(framework) - 1]
    assert train_spec(make_spec(output, key, other, "single", 1), SAVED).status == "complete"
    assert curve(trained[key]) == approx(references["none"])


@pytest.mark.parametrize("key", ZERO)
def test_what_zero_splits_and_where_changes_no_loss(trained, output, references, key):
    framework, adapter, _ = ZERO[key]
    assert curve(trained[key], attempt=0) == approx(references[adapter])
    assert curve(trained[key], attempt=1) == curve(trained[key], attempt=0)[SAVED:]
    other = FRAMEWORKS[FRAMEWORKS.index(framework) - 1]
    assert train_spec(make_spec(output, key, other, "single", 1, adapter), SAVED).status == "complete"
    assert curve(trained[key]) == approx(references[adapter])


def test_zero_keeps_exact_weights_beside_rounded_ones(trained, output, reference):
    """They are saved beside the rounded ones, which are all that another strategy goes on with."""
    spec, name = trained["rounded"], "model.embed_tokens.weight"
    index = Index(checkpoint.latest(RunFolder.of(spec).checkpoints))
    weights, exact = index.empty(f"model.{name}"), index.empty(f"optimizer.master.{name}")
    index.read({f"model.{name}": weights, f"optimizer.master.{name}": exact})
    assert (weights.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(exact.bfloat16(), weights) and not torch.equal(exact, weights.float())
    assert curve(spec, attempt=1) == curve(spec, attempt=0)[SAVED:]

    alone = rounded(make_spec(output, spec.name, "torch", "single", 1))
    assert train_spec(alone, SAVED).status == "complete"
    assert [loss for _, loss, *_ in curve(alone)] == pytest.approx([loss for _, loss, *_ in reference], rel=1e-2)
    index = Index(checkpoint.latest(RunFolder.of(alone).checkpoints))
    assert f"optimizer.master.{name}" not in index
    assert index.dtype(f"optimizer.remainder.{name}") == torch.int16
    # Moments in host memory.
    assert index.dtype(f"optimizer.exp_avg.{name}") == torch.float32
