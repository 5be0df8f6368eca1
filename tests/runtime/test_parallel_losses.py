"""On four processes: copies of a model, whole or split, and optimizers over it, have the losses of one process."""

import json

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.comparable_runs import approx, curve, file_of
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("narrowed")
STEPS, SAVED = 4, 2
IN_BACKWARD = {"max_grad_norm": 0, "in_backward": True}

# Framework, strategy, optimizer.
CELLS = {
    # Sums of four terms depend on their order, as sums of two do not.
    "ddp": ("torch", {"type": "ddp", "bucket_cap_mb": 1}, {}),
    "copies": ("hf", {"type": "fsdp", "replicas": 2}, {}),
    "in-backward": ("hf", {"type": "fsdp"}, IN_BACKWARD),
    "muon": ("hf", {"type": "fsdp"}, {"type": "muon"}),
    "in-backward-copies": ("lightning", {"type": "fsdp", "replicas": 2}, IN_BACKWARD),
    "tensor-parallel": ("torch", {"type": "fsdp", "tensor_parallel": 2, "cpu_offload": True}, {}),
    "paged": ("torch", {"type": "fsdp", "tensor_parallel": 2}, {"paged": True}),
    "tensor-and-context": ("torch", {"type": "fsdp", "tensor_parallel": 2, "context_parallel": 2}, {}),
}


def make_spec(output, name, framework, parallel, optimizer, processes=4):
    sharers = parallel.get("tensor_parallel", 1) * parallel.get("context_parallel", 1)
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "data": {"sequence_length": 64, "max_samples": 60},
            "training": {
                "steps": STEPS,
                "micro_batch_size": 4 * sharers // processes,
            },
            "optimizer": optimizer,
            "checkpoint": {"every": SAVED, "keep_last": STEPS},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": framework},
            "parallel": parallel,
            "topology": {"nproc_per_node": processes},
        }
    )


def points(spec, attempt=None):
    """As `curve`; the norm is 0 where steps are taken before it is known."""
    return [(step, loss, norm or 0.0, *counts) for step, loss, norm, *counts in curve(spec, attempt)]


@pytest.fixture(scope="module")
def alone(output):
    """The curve of one process, by the optimizer's settings."""
    curves = {}

    def curve_of(settings):
        optimizer = {name: value for name, value in settings.items() if name not in ("in_backward", "paged")}
        key = json.dumps(optimizer)
        if key not in curves:
            spec = make_spec(output, f"alone-{len(curves)}", "torch", {"type": "single"}, optimizer, 1)
            assert train_spec(spec).status == "complete"
            curves[key] = points(spec)
        if "in_backward" in settings:
            return [(step, loss, 0.0, *counts) for step, loss, _, *counts in curves[key]]
        return curves[key]

    return curve_of


@pytest.fixture(scope="module")
def trained(output, alone):
    """Each cell is trained from the start, and again from its first checkpoint."""
    alone({})
    specs = {name: make_spec(output, name, *cell) for name, cell in CELLS.items()}
    files = [file_of(output, spec) for spec in specs.values()]
    launch(4, "--narrow", *files, *(f"{file}@{SAVED}" for file in files))
    return specs


@pytest.mark.parametrize("name", [name for name in CELLS if name != "muon"])
def test_losses_are_those_of_one_process(trained, alone, name):
    assert points(trained[name], attempt=0) == approx(alone(CELLS[name][2]))


def test_muon_of_split_matrices_has_the_losses_of_one_process(trained, alone):
    """Its products are of bfloat16, and rounded in parts."""
    losses = [loss for _, loss, *_ in points(trained["muon"], attempt=0)]
    assert losses == pytest.approx([loss for _, loss, *_ in alone({"type": "muon"})], rel=1e-4)
    assert losses != pytest.approx([loss for _, loss, *_ in alone({})], rel=1e-3)


@pytest.mark.parametrize("name", CELLS)
def test_a_resumed_run_computes_the_same_bits(trained, name):
    assert points(trained[name], attempt=1) == points(trained[name], attempt=0)[SAVED:]


def test_a_checkpoint_has_one_of_the_copies(trained):
    folder = RunFolder.of(trained["copies"]).checkpoints / f"checkpoint-{SAVED}"
    index = json.loads((folder / "index.json").read_text())
    for name in ("model.model.embed_tokens.weight", "optimizer.exp_avg.model.embed_tokens.weight"):
        assert {key: part["shape"] for key, part in index[name]["parts"].items()} == {
            "0,0": [2048, 128],
            "2048,0": [2048, 128],
        }


def test_a_matrix_is_cut_in_four_parts(trained):
    """By rows and columns, or twice by rows: once over the processes that share rows, and then over the others."""
    folder = RunFolder.of(trained["tensor-parallel"]).checkpoints / f"checkpoint-{SAVED}"
    index = json.loads((folder / "index.json").read_text())
    by_rows, by_both = "0,0 32,0 64,0 96,0", "0,0 0,64 64,0 64,64"
    for name, parts in {"q_proj": by_rows, "o_proj": by_both}.items():
        assert " ".join(sorted(index[f"model.model.layers.0.self_attn.{name}.weight"]["parts"], key=numbers)) == parts


def numbers(key):
    return [int(number) for number in key.split(",")]


@pytest.mark.parametrize("name", ["copies", "tensor-parallel"])
def test_one_process_continues_what_four_began(trained, output, alone, name):
    spec = make_spec(output, name, "torch", {"type": "single"}, {}, 1)
    assert train_spec(spec, SAVED).status == "complete"
    assert points(spec) == approx(alone({}))
