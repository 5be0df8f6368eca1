"""CUDA graphs of a micro-batch: what runs with them, and, on a GPU, the same bits as without."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime.data import collate
from tasks.runtime.models import float8
from tasks.runtime.models.attention.varlen_attention import add_cu_seqlens
from tasks.runtime.models.build import build_model
from tasks.runtime.objectives.objective import MicroBatchLoss
from tasks.runtime.objectives.training_step import build_training_step
from tasks.runtime.training import cuda_graphs
from tasks.runtime.training.cuda_graphs import CudaGraphs, pad_sequences, unsupported_reason, with_cuda_graphs
from tests.runtime.helpers import vision_models
from tests.runtime.helpers.comparable_runs import curve
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

# The compiler looks at it, and hides the warning by means that do not hide errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

STEPS = 24
PRETRAINED = {"name": "organization/model", "dtype": "bfloat16"}


def make_spec(output, name, *, framework="torch", training=None, **sections):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"dtype": "bfloat16"},
            "data": {"sequence_length": 256, "max_samples": 800},
            "training": {"steps": STEPS, "micro_batch_size": 2, "cuda_graphs": True, **(training or {})},
            "checkpoint": {"every": STEPS // 2, "keep_last": 2},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": framework},
            **sections,
        }
    )


def packed(*rows):
    """A batch of rows with sequences of these lengths."""
    return add_cu_seqlens(
        collate(
            [
                {
                    "input_ids": torch.arange(sum(lengths)),
                    "labels": torch.arange(sum(lengths)),
                    "position_ids": torch.cat([torch.arange(length) for length in lengths]),
                }
                for lengths in rows
            ]
        )
    )


@pytest.mark.parametrize(
    ("rows", "sequences"),
    [
        pytest.param([[3] * 4, [12]], 16, id="few"),
        pytest.param([[1] * 12, [1] * 4 + [8]], 32, id="a power of two and one"),
        pytest.param([[12], [12]], 2, id="one in each row"),
    ],
)
def test_batches_of_about_as_many_sequences_have_one_shape(rows, sequences):
    batch = packed(*rows)
    ends, padded = batch["cu_seqlens"], pad_sequences(batch)["cu_seqlens"]
    assert padded.shape == (2, sequences + 1)
    assert padded.dtype == ends.dtype
    assert torch.equal(padded[:, : ends.shape[1]], ends)
    assert padded[:, ends.shape[1] :].diff(prepend=ends[:, -1:]).count_nonzero() == 0


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"objective": {"type": "distill", "teacher": "organization/teacher"}}, "objective.type"),
        ({"parallel": {"type": "ddp"}}, "parallel.type"),
        ({"training": {"gradient_checkpointing": "full", "compile": True}}, "training.gradient_checkpointing"),
        (
            {"training": {"gradient_checkpointing": "full", "activation_offloading": True}},
            "training.activation_offloading",
        ),
        (
            {
                "model": PRETRAINED,
                "adapter": {"type": "lora", "lora_dropout": 0.1},
                "training": {"gradient_checkpointing": "full"},
            },
            "adapter.lora_dropout",
        ),
        (
            {"model": PRETRAINED, "adapter": {"type": "lora", "lora_dropout": 0.1}, "training": {"compile": True}},
            "training.compile",
        ),
        ({"training": {"float8": "tensorwise", "compile": True}}, "training.compile"),
        ({"model": PRETRAINED, "adapter": {"type": "lora", "quantization": "nf4"}}, "adapter.quantization"),
        ({"optimizer": {"in_backward": True, "max_grad_norm": 0}}, "optimizer.in_backward"),
    ],
)
def test_what_no_graph_repeats_is_refused_with_the_way_out(tmp_path, sections, field):
    with pytest.raises(
        ValueError, match=rf"training.cuda_graphs[\s\S]* {field} [\s\S]*set training.cuda_graphs to auto"
    ):
        make_spec(tmp_path, "refused", **sections)
    training = {**sections.get("training", {}), "cuda_graphs": "auto"}
    make_spec(tmp_path, "trained", **{**sections, "training": training})


def training_step(spec, device):
    with torch.device("meta"):
        model = build_model(spec.model, spec.seed)
    return build_training_step(model, spec, device)


def change(step, **changes):
    vars(step.model.config).update(changes)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ("cuda", {}, None),
        ("cpu", {}, "no NVIDIA GPU"),
        ("cuda", {"attention_dropout": 0.1}, "attention_dropout"),
        ("cuda", {"hidden_dropout_prob": 0.1, "layerdrop": 0.1}, "hidden_dropout_prob, layerdrop"),
    ],
)
def test_the_model_and_the_machine_have_to_support_them(tmp_path, device, changes, reason):
    spec = make_spec(tmp_path, "machine", training={"cuda_graphs": "auto"})
    step = training_step(spec, torch.device(device))
    change(step, **changes)
    processes = SimpleNamespace(device=torch.device(device), is_main=True)
    found = unsupported_reason(step, spec, processes)
    assert (found is None) if reason is None else (reason in found), found
    if reason is None:
        assert isinstance(with_cuda_graphs(step, spec, processes), CudaGraphs)
        return
    assert with_cuda_graphs(step, spec, processes) is step.objective
    with pytest.raises(ValueError, match=rf"{reason}[\s\S]*set training.cuda_graphs to auto"):
        with_cuda_graphs(step, make_spec(tmp_path, "machine"), processes)


def test_dropout_that_the_config_does_not_name_has_none(tmp_path):
    """As in MPT, whose config has the rate in a section of its own; that of adapters has graphs."""
    spec = make_spec(tmp_path, "nested", training={"cuda_graphs": "auto"})
    step = training_step(spec, torch.device("cuda"))
    processes = SimpleNamespace(device=torch.device("cuda"), is_main=True)
    attention = step.model.get_submodule("model.layers.0.self_attn")
    attention.lora_dropout = torch.nn.Dropout(0.1)
    assert unsupported_reason(step, spec, processes) is None
    attention.dropout_of_weights = torch.nn.Dropout(0.1)
    assert "self_attn.dropout_of_weights of the model" in unsupported_reason(step, spec, processes)


def test_a_vision_language_model_has_none(tmp_path):
    vision_models.llava(tmp_path / "model")
    sections = {"model": {"name": str(tmp_path / "model"), "dtype": "bfloat16"}, "training": {"cuda_graphs": "auto"}}
    spec = make_spec(tmp_path, "images", **sections)
    step = build_training_step(build_model(spec.model, spec.seed), spec, torch.device("cuda"))
    assert "other input than text" in unsupported_reason(step, spec, SimpleNamespace(device=torch.device("cuda")))


class FakeEvent:
    """Of a GPU that is where `at` says, in milliseconds."""

    def __init__(self, at):
        self.at = at

    def elapsed_time(self, other):
        return other.at - self.at

    def synchronize(self):
        pass


def test_a_kernel_compiled_in_a_timed_pass_does_not_make_the_host_slow():
    """The GPU waits for the compiler, so such a pass looks as if the host took all of its time."""
    passes = cuda_graphs._TimedPasses()
    passes._passes = [(host, FakeEvent(0), FakeEvent(gpu)) for host, gpu in ((9, 9000), (2, 2010), (0.1, 300))]
    assert passes.host_share() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("free", "taken", "captured"),
    [
        pytest.param(29, [15], 0, id="none fits"),
        # The second shape needs no more memory.
        pytest.param(31, [15, 0], 2, id="both fit"),
        # Of the first shape, which is smaller than the largest pass; the second may need the rest.
        pytest.param(31, [10, 5], 2, id="the second is larger"),
        pytest.param(31, [17], 1, id="one fits"),
    ],
)
def test_graphs_leave_memory_for_batches_without(tmp_path, monkeypatch, caplog, free, taken, captured):
    """The largest pass takes 15 GiB; the graphs of both shapes share memory."""
    graphs = SimpleNamespace(is_valid=lambda: True, loss=lambda *batch, accumulates: torch.tensor(2.0))
    made, left = [], list(taken)

    def capture(*arguments):
        made.append(arguments)
        nonlocal free
        free -= left.pop(0)
        return graphs

    monkeypatch.setattr(cuda_graphs._Graphs, "capture", capture)
    monkeypatch.setattr(cuda_graphs, "_free_memory", lambda: free * 2**30)
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, object)
    spec = make_spec(tmp_path, "memory", training={"cuda_graphs": "auto", "gradient_accumulation_steps": 5})
    eager = SimpleNamespace(unit="token", micro_batch_loss=lambda *batch: MicroBatchLoss(torch.tensor(1.0), {}))
    objective = CudaGraphs(eager, spec.training, None)
    objective._passes = nullcontext()
    objective._passes.memory, objective._passes.host_share = lambda: 15 * 2**30, lambda: 1.0
    batches = [packed([12], [12]), packed([3] * 4, [12])]
    with caplog.at_level("INFO"):
        # The first step, whose end is when the optimizer takes its memory, and one micro-batch run without.
        warmup = [objective.micro_batch_loss(None, batches[0], torch.tensor(1)).loss.item() for _ in range(6)]
        losses = [
            objective.micro_batch_loss(None, batch, torch.tensor(1)).loss.item() for _ in range(3) for batch in batches
        ]
    assert warmup == [1] * 6 and len(made) == captured
    # One stream and one pool, or the shapes would not share memory.
    assert len({(id(pool), id(stream)) for *_, pool, stream, _ in made}) <= 1
    assert losses == {0: [1] * 6, 1: [1, 1, 2, 1, 2, 1], 2: [1, 1, 2, 2, 2, 2]}[captured]
    told = {0: "off, because 29.0 GiB", 1: "no more than 1, because 14.0 GiB", 2: "on,"}[captured]
    assert told in caplog.text


RUNS = {
    "sft": {},
    "pretrain": {"objective": {"type": "pretrain"}},
    "accumulated": {"training": {"gradient_accumulation_steps": 3}},
    "added in fp32": {"training": {"gradient_accumulation_steps": 3, "gradient_accumulation_dtype": "float32"}},
    "lora": {"adapter": {"type": "lora"}},
    "recomputed": {"training": {"gradient_checkpointing": "full"}},
    "lora, recomputed": {"adapter": {"type": "lora"}, "training": {"gradient_checkpointing": "full"}},
    "all but attention": {"training": {"gradient_checkpointing": "attention"}},
    "per operator": {"training": {"gradient_checkpointing": "per_op", "gradient_accumulation_steps": 2}},
    "every second layer": {"training": {"gradient_checkpointing": "selective"}},
    "compiled": {"training": {"compile": True}},
    "hf": {"framework": "hf"},
    "lightning": {"framework": "lightning"},
    "muon": {"optimizer": {"type": "muon"}},
    "dropout": {"adapter": {"type": "lora", "lora_dropout": 0.1}},
    "noise": {"training": {"neftune_noise_alpha": 5, "gradient_checkpointing": "full"}},
    "fp8": {"training": {"float8": "tensorwise"}},
    "fp8 by row": {"training": {"float8": "rowwise"}},
    "frozen fp8": {"adapter": {"type": "lora"}, "training": {"float8": "tensorwise"}},
}


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "sections"), RUNS.items(), ids=RUNS)
def test_on_a_gpu_losses_have_the_bits_of_a_run_without(output, kind, sections, caplog, monkeypatch):
    # FP8 is slower than bf16 at these sizes, and layers that are would be exact.
    float8_layers = []

    def none_is_slow(layers, *arguments):
        float8_layers.append(layers.keys())
        return []

    monkeypatch.setattr(float8, "_slow_layers", none_is_slow)
    if "adapter" in sections:
        sections = {**sections, "model": {"name": str(save_pretrained(output / "pretrained")), "dtype": "bfloat16"}}
    training = {"deterministic": "compile" not in sections.get("training", {}), **sections.get("training", {})}
    without, with_graphs = (
        make_spec(
            output,
            f"{kind}-graphs-{on}".lower().replace(" ", "-").replace(",", ""),
            **{**sections, "training": {**training, "cuda_graphs": on}},
        )
        for on in (False, True)
    )
    train_spec(without)
    replay, replays = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replays.append(self) or replay(self))
    with caplog.at_level("INFO"):
        train_spec(with_graphs)
    assert "CUDA graphs: on" in caplog.text
    # Not the first ones, nor the first of a shape.
    assert len(replays) > STEPS
    assert curve(with_graphs) == curve(without)
    # Both runs are asked about the same layers, if they train in FP8.
    assert len(float8_layers) == (2 if "float8" in training else 0) and all(float8_layers)


@pytest.mark.gpu
@pytest.mark.parametrize("draws", [False, True], ids=["", "with dropout and noise"])
def test_on_a_gpu_a_resumed_run_has_the_same_bits(output, draws):
    sections, noise = {}, {}
    if draws:
        model = {"name": str(save_pretrained(output / "drawing")), "dtype": "bfloat16"}
        sections, noise = {"adapter": {"type": "lora", "lora_dropout": 0.1}, "model": model}, {"neftune_noise_alpha": 5}
    spec = make_spec(output, f"resumed-{draws}".lower(), training={"deterministic": True, **noise}, **sections)
    train_spec(spec)
    whole = curve(spec)
    train_spec(spec, STEPS // 2)
    assert curve(spec, 1) == whole[STEPS // 2 :]


@pytest.mark.gpu
def test_on_a_gpu_the_weights_memory_may_be_replaced(output, monkeypatch):
    """Graphs read addresses: new memory needs new graphs."""
    spec = make_spec(output, "moved", training={"deterministic": True})
    train_spec(spec)
    whole, replay = curve(spec), cuda_graphs._Graphs.loss
    moved = []

    def move(graphs, batch, items, *, accumulates):
        result = replay(graphs, batch, items, accumulates=accumulates)
        if len(moved) < 2:
            moved.append([p.data for p in graphs.gradients])
            for parameter in graphs.gradients:
                parameter.data = parameter.data.clone()
        return result

    monkeypatch.setattr(cuda_graphs._Graphs, "loss", move)
    other = spec.model_copy(update={"name": "moved-often"})
    train_spec(other)
    assert len(moved) == 2
    assert curve(other) == whole


@pytest.mark.gpu
def test_on_a_gpu_a_failed_capture_trains_without(output, monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs._Graphs, "capture", fail)
    monkeypatch.setattr(cuda_graphs, "_HOST_BOUND", 0.0)
    spec = make_spec(output, "failed", training={"cuda_graphs": "auto"})
    assert train_spec(spec).status == "complete"
    assert "off, because a micro-batch was not captured: operation not permitted" in caplog.text
