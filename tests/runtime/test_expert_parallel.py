"""Experts spread over processes: the numbers, checkpoints and export of one process; what cannot be is refused."""

import signal
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strata_platform.errors import SpecError
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import read_model_tensors
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.export.export_model import export
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.parallel.expert import require_expert_parallel_support
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.comparable_runs import SAVED, STEPS, approx, curve, file_of, make_spec
from tests.runtime.helpers.mixture_folder import save_mixture
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec
from tests.runtime.test_exact_resume import kill_tree, start

pytestmark = pytest.mark.usefixtures("narrowed")
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
SPLIT = {"expert_parallel": 2}
ROUNDED = {"model": {"dtype": "bfloat16"}}
LORA = {"type": "lora", "r": 4, "target_parameters": ["gate_up_proj", "down_proj"]}

# What is trained: a balanced mixture, weights in bfloat16 with exact updates, adapters of experts.
KINDS = {"balanced": {}, "rounded": ROUNDED, "adapted": {"adapter": LORA}}
# Kind, framework, other settings.
CELLS = {
    "hf": ("balanced", "hf", {"training": {"gradient_checkpointing": "full"}}),
    "lightning": ("balanced", "lightning", {}),
    "torch": ("balanced", "torch", {"training": {"gradient_checkpointing": "per_op"}}),
    "context": ("balanced", "torch", {"context_parallel": 2, "training": {"gradient_accumulation_steps": 4}}),
    "rounded": ("rounded", "torch", {}),
    "adapted": ("adapted", "hf", {"training": {"gradient_checkpointing": "full"}}),
}
if find_spec("bitsandbytes") is not None:
    KINDS["packed"] = {"adapter": {**LORA, "quantization": "nf4"}}
    CELLS["packed"] = ("packed", "torch", {})


def spec_of(output, name, kind, framework="torch", processes=1, training=None, **parallel):
    strategy = "fsdp" if processes > 1 else "single"
    values = make_spec(output, name, framework, strategy, processes, training=training).model_dump()
    values["parallel"] |= parallel
    values["model"] |= {"name": f"{output}/mixture", "dtype": "float32"}
    values["optimizer"] |= {"lr": 5e-3}
    values["evaluation"] |= {"samples": 0, "max_batches": 2}
    for section, changes in KINDS[kind].items():
        values[section] |= changes
    return RunSpec.model_validate(values)


@pytest.fixture(scope="module")
def output(output):
    save_mixture(output / "mixture", **BALANCED)
    return output


@pytest.fixture(scope="module")
def alone(output):
    """One process: the spec, the record and the curve of each kind."""
    specs = {kind: spec_of(output, f"alone-{kind}", kind) for kind in KINDS}
    return {kind: (spec, train_spec(spec), curve(spec)) for kind, spec in specs.items()}


@pytest.fixture(scope="module")
def split(output):
    """Two processes: each cell is trained, and again from its checkpoint; then without expert parallelism."""
    specs, files = {}, []
    for name, (kind, framework, settings) in CELLS.items():
        specs[name] = spec_of(output, f"split-{name}", kind, framework, 2, **settings, **SPLIT)
        files += [f"{file_of(output, specs[name])}{at}" for at in ("", f"@{SAVED}")]
    joined = spec_of(output, "split-torch", "balanced", processes=2)
    files.append(f"{file_of(output, joined, 'joined')}@{SAVED}")
    whole = spec_of(output, "joined-first", "balanced", processes=2)
    later = spec_of(output, "joined-first", "balanced", processes=2, **SPLIT)
    files += [file_of(output, whole), f"{file_of(output, later, 'split-later')}@{SAVED}"]
    # Of more steps, most of which are left when it is killed.
    long = {"training": {"steps": 3 * STEPS}}
    killed, undisturbed = (spec_of(output, name, "balanced", "torch", 2, **long, **SPLIT) for name in ("killed", "not"))
    kill_after(SAVED + 1, file_of(output, killed))
    launch(2, *files, file_of(output, killed), file_of(output, undisturbed))
    return specs | {"split-later": later, "killed": killed, "undisturbed": undisturbed}


def kill_after(step, file):
    """Train, and kill all processes as when a machine is lost."""
    launched = start(file, 2)
    for line in launched.stdout:
        if f"step {step:>2}/" in line:
            break
    kill_tree(launched.pid, signal.SIGKILL)
    launched.communicate(timeout=600)


@pytest.mark.parametrize("processes", [2, 4])
def test_every_kind_of_experts_has_the_gradients_of_one_process(processes):
    launch(processes, module="tests.runtime.helpers.split_experts")


@pytest.mark.parametrize("name", CELLS)
def test_losses_are_those_of_one_process(alone, split, name):
    expected = alone[CELLS[name][0]][2]
    if name == "rounded":
        # Products of bfloat16 are rounded in parts.
        losses, exact = ([loss for _, loss, *_ in points] for points in (curve(split[name], attempt=0), expected))
        assert losses == pytest.approx(exact, rel=2e-3)
    else:
        assert curve(split[name], attempt=0) == approx(expected)


@pytest.mark.parametrize("name", CELLS)
def test_a_resumed_run_computes_the_same_bits(split, name):
    assert curve(split[name], attempt=1) == curve(split[name], attempt=0)[SAVED:]


def test_whole_experts_go_on_from_split_ones_and_split_ones_from_whole(alone, split):
    expected = approx(alone["balanced"][2][SAVED:])
    assert curve(split["torch"], attempt=2) == expected
    assert curve(split["split-later"], attempt=1) == expected


def test_one_process_goes_on_from_what_two_began(alone, split, output):
    assert train_spec(spec_of(output, "split-hf", "balanced"), SAVED).status == "complete"
    assert curve(split["hf"]) == approx(alone["balanced"][2])


def logits(model):
    with torch.inference_mode():
        return model.eval()(torch.arange(5, 37)[None]).logits


def trained(spec):
    """The weights of the last checkpoint, in a model of transformers."""
    model = AutoModelForCausalLM.from_pretrained(spec.model.name)
    model.load_state_dict(read_model_tensors(Index(checkpoint.latest(RunFolder.of(spec).checkpoints))))
    return model


def test_transformers_reads_the_export(alone, split):
    spec = split["lightning"]
    record, recipe = CompletionRecord.load(RunFolder.of(spec).record), DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    folder = export(spec, evaluate(spec, record, data, weights), data, weights).model
    found = logits(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(found, logits(trained(spec)))
    torch.testing.assert_close(found, logits(trained(alone["balanced"][0])), rtol=1e-3, atol=1e-3)


def test_killed_and_started_again_it_computes_the_same_bits(split):
    assert CompletionRecord.load(RunFolder.of(split["killed"]).record).restarts == 1
    assert curve(split["killed"]) == curve(split["undisturbed"])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": {"expert_parallel": 3}}, "3 does not divide the 4 processes"),
        ({"parallel": {"replicas": 2, "expert_parallel": 4}}, "4 does not divide the 2 .* each of parallel.replicas 2"),
        ({"parallel": {"tensor_parallel": 2}}, "tensor_parallel 2 gives several the same; set one of them to 1"),
        ({"model": {"name": "tiny-llama"}}, "'tiny-llama' is a preset and has none; set parallel"),
        ({"kernels": {"enabled": False}}, "needs the fused operator 'experts'"),
        ({"kernels": {"exclude": ["experts"]}}, "needs the fused operator 'experts'"),
        ({"training": {"compile": True}}, "breaks the graph of a layer; set training.compile to false"),
        ({"parallel": {"type": "ddp"}}, "a field of type 'fsdp' alone"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_the_spec_refuses_what_cannot_be(sections, said):
    values = {"model": {"name": "a-mixture"}, "topology": {"nproc_per_node": 4}, **sections}
    values["parallel"] = {"type": "fsdp", **SPLIT, **sections.get("parallel", {})}
    with pytest.raises(SpecError, match=rf"parallel.expert_parallel: .*{said}"):
        RunSpec.model_validate(values)


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "sections", "said"),
    [
        ("llama", {}, {}, "has no experts that the operator computes; set parallel.expert_parallel to 1"),
        ("qwen3_moe", {"num_experts": 6}, {"parallel": {"expert_parallel": 4}}, "4 does not divide the 6 experts"),
        (
            "qwen3_moe",
            {"num_experts": 6, "moe_intermediate_size": 17, "hidden_size": 34},
            {"topology": {"nproc_per_node": 8}},
            "leaves 3 experts with 34 features to 4 processes, which divide neither",
        ),
        (
            "qwen3_moe",
            {"num_experts": 6},
            {"topology": {"nproc_per_node": 8}, "optimizer": {"type": "adamw_8bit"}},
            "'adamw_8bit' scales moments by blocks of whole rows; raise parallel.expert_parallel",
        ),
    ],
    ids=["dense", "experts", "shards", "8 bits"],
)
def test_the_model_refuses_before_the_data_are_prepared(tmp_path, family, changes, sections, said):
    AutoConfig.for_model(family, **{**SIZES, **changes}).save_pretrained(tmp_path)
    values = {"model": {"name": str(tmp_path)}, "topology": {"nproc_per_node": 4}, **sections}
    values["parallel"] = {"type": "fsdp", **SPLIT, **sections.get("parallel", {})}
    with pytest.raises(ValueError, match=said):
        require_expert_parallel_support(RunSpec.model_validate(values))
