"""Graphs of `training.compile` travel: what one start compiled the next one finds, whole and signed or not at all."""

import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest
import torch

from strata_kernels.files import source_hash
from strata_kernels.warmup import graph_cache
from strata_kernels.warmup.blob_storage import FolderStorage
from strata_kernels.warmup.store import RejectedArchive, Store, pack, unpack
from strata_kernels.warmup.time_budget import CircuitBreaker
from strata_platform.spec import RunSpec
from tasks.runtime.models.attention import flash_attention_4
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.warmup import inductor_cache, pod
from tests.helpers import fork_server
from tests.kernels.helpers.cache_entries import elf

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs for the CPU")

SECRET = "thirty-two bytes that nobody has"
FILES = {"fxgraph/ab/fabc/xyz": b"a pickled graph", "ab/cabc.main.so": elf(b"text"), "ab/cabc.py": b"code"}


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    variables = (inductor_cache.FOLDER, pod.DONE, pod.BAKED_KERNELS, flash_attention_4.KEEP, flash_attention_4.FOLDER)
    for name in variables:
        # Set first, so that what the test sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("KEY", SECRET)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "pod" / "triton"))


def make_spec(tmp_path: Path, **changes) -> RunSpec:
    store = {"url": str(tmp_path / "store"), "signing_key": "env:KEY"}
    return RunSpec.model_validate(
        {"output": str(tmp_path / "out"), "training": {"compile": True}, "kernels": {"store": store}, **changes}
    )


def take(spec: RunSpec, directory: Path, images: list[Path] = ()) -> tuple[dict, list[str]]:
    """What a start in a pod with this directory reports, and its problems."""
    os.environ.pop(inductor_cache.FOLDER, None)
    inductor_cache.use_new_folder(directory, "run")
    breaker = CircuitBreaker(5.0)
    report = inductor_cache.fetch_graphs(spec, images, breaker)
    return report.to_dict(), breaker.problems


def here() -> Path:
    return Path(os.environ[inductor_cache.FOLDER])


def shared(tmp_path: Path, key: bytes | None = SECRET.encode()) -> Store:
    return Store(
        FolderStorage(tmp_path / "store"),
        graph_cache.environment(),
        key,
        allow_unsigned=key is None,
        kind=graph_cache.GRAPHS,
    )


def test_a_start_takes_what_is_nearest(tmp_path):
    spec = make_spec(tmp_path)
    key = inductor_cache.graphs_key(spec)
    # A copy of the store's archive, whose signature says nothing in an image.
    image = Store(
        FolderStorage(tmp_path / "image" / "graphs"),
        graph_cache.environment(),
        b"of another team",
        kind=graph_cache.GRAPHS,
    )
    assert take(spec, tmp_path / "pod")[0]["graphs_from"] is None
    shared(tmp_path).replace(key, FILES)
    report, problems = take(spec, tmp_path / "pod")
    assert (report["graphs_from"], report["graph_files"], problems) == ("store", 3, [])
    assert graph_cache.read(here()) == FILES
    image.replace(key, FILES)
    assert take(spec, tmp_path / "pod", [tmp_path / "nothing", tmp_path / "image"])[0]["graphs_from"] == "image"
    inductor_cache._of_pod(graph_cache.environment()).replace(key, FILES)
    assert take(spec, tmp_path / "pod", [tmp_path / "image"])[0]["graphs_from"] == "cache"


def test_what_an_earlier_start_left_is_not_read(tmp_path):
    take(make_spec(tmp_path), tmp_path / "pod")
    (here() / "ab").mkdir()
    (here() / "ab" / "torn.so").write_bytes(b"half of a")
    first = here()
    inductor_cache.use_new_folder(tmp_path / "pod", "run")
    assert here() == first and not list(first.iterdir())


def test_a_folder_that_takes_nothing_is_left_for_another(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(inductor_cache.FOLDER, str(tmp_path / "file" / "graphs"))
    inductor_cache.use_new_folder(tmp_path / "pod", "run")
    assert here().parent == tmp_path / "pod" and here().is_dir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path, store: path.write_bytes(path.read_bytes()[:-9]), "SHA-256 differs from the one in its name"),
        (lambda path, store: path.rename(path.with_name(f"{path.name[:64]}-unsigned.tar.gz")), "not signed"),
        (
            lambda path, store: path.rename(path.with_name(f"{path.name[:64]}-{'0' * 64}.tar.gz")),
            "a key that this process lacks",
        ),
    ],
    ids=["torn", "unsigned", "forged"],
)
def test_what_is_torn_or_not_signed_is_refused_and_replaced(tmp_path, spoil, said):
    """Pickles are in it: whoever reads one runs what its author likes."""
    spec = make_spec(tmp_path)
    shared(tmp_path).replace(inductor_cache.graphs_key(spec), FILES)
    [path] = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    spoil(path, None)
    report, problems = take(spec, tmp_path / "pod")
    assert report["graphs_from"] is None and len(problems) == 1 and said in problems[0]
    assert not list(here().iterdir())
    shared(tmp_path).replace(inductor_cache.graphs_key(spec), FILES)
    assert take(spec, tmp_path / "pod")[0]["graphs_from"] == "store"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "a/.hidden", "a//b", ".hidden/a"])
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(RejectedArchive, match="not a regular file of this entry"):
        unpack("key", pack("key", {name: b""}), graph_cache.GRAPHS)


def test_a_truncated_library_is_rejected():
    with pytest.raises(RejectedArchive, match="is truncated"):
        unpack("key", pack("key", {"a/b.so": elf(b"text")[:-1]}), graph_cache.GRAPHS)


def test_a_disk_that_fills_up_leaves_nothing_torn(tmp_path):
    """A limit on the size of files stands for it."""
    spec = make_spec(tmp_path)
    shared(tmp_path).replace(inductor_cache.graphs_key(spec), FILES | {"z/large": bytes(200_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        report, problems = take(spec, tmp_path / "pod")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert report["graphs_from"] is None and "takes no graphs: [Errno 27] File too large" in problems[0]
    assert not list(here().iterdir())


def test_what_pytorch_keeps_by_itself_is_not_given_on(tmp_path, monkeypatch):
    """As where no folder could be made for this start."""
    spec = make_spec(tmp_path)
    monkeypatch.setenv(inductor_cache.FOLDER, str(tmp_path / "torchinductor_user"))
    graph_cache.write(here(), FILES)
    counts = iter([graph_cache.GraphCounts(0, 0, 0)] + [graph_cache.GraphCounts(0, 2, 0)] * 3)
    monkeypatch.setattr(graph_cache, "graph_counts", lambda: next(counts))
    archiver = inductor_cache.GraphArchiver(spec, Processes())
    archiver.close()
    assert archiver.metadata().to_dict()["graphs_compiled"] == 2 and not list(tmp_path.rglob("*.tar.gz"))
    shared(tmp_path).replace(inductor_cache.graphs_key(spec), {"new": b""})
    assert inductor_cache.fetch_graphs(spec, [], CircuitBreaker()).to_dict() == {} and graph_cache.read(here()) == FILES


def test_a_store_that_is_not_there_costs_its_graphs_alone(tmp_path):
    (tmp_path / "store").write_text("no folder")
    report, problems = take(make_spec(tmp_path), tmp_path / "pod")
    assert report["graphs_from"] is None
    (tmp_path / "readonly").write_text("no folder")
    spec = make_spec(tmp_path, kernels={"store": {"url": "ftps3://bucket", "allow_unsigned": True}})
    report, problems = take(spec, tmp_path / "pod")
    assert report["graphs_from"] is None and "ftps3" in problems[0]


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"name": "other", "training": {"compile": True, "steps": 7}, "optimizer": {"lr": 1e-4}}, True),
        ({"training": {"compile": True, "micro_batch_size": 2}}, False),
        ({"training": {"compile": True, "gradient_checkpointing": "per_op"}}, False),
        ({"data": {"sequence_length": 128}}, False),
        ({"model": {"dtype": "float32"}}, False),
        ({"adapter": {"type": "lora"}, "model": {"name": "org/model"}}, False),
        ({"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_names_the_graphs_of_a_run(tmp_path, changes, same):
    assert (
        inductor_cache.graphs_key(make_spec(tmp_path, **changes)) == inductor_cache.graphs_key(make_spec(tmp_path))
    ) == same


def test_the_sources_of_operators_are_part_of_the_environment(tmp_path, monkeypatch):
    """Their backward formulas are in the graphs, and in no key of PyTorch's."""
    before = graph_cache.environment()
    (tmp_path / "op.py").write_text("y = 1")
    first = source_hash(tmp_path)
    source_hash.cache_clear()
    (tmp_path / "op.py").write_text("y = 2")
    assert source_hash(tmp_path) != first
    monkeypatch.setattr(graph_cache, "_SOURCES", tmp_path)
    assert graph_cache.environment() != before


def test_without_a_store_a_machine_without_a_gpu_takes_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(pod, "_TEMPORARY", (tmp_path,))
    spec = RunSpec.model_validate({"output": str(tmp_path / "out"), "training": {"compile": True}})
    # Of this process: others may have the machine meanwhile.
    start = time.process_time()
    report = pod.warm_up_pod(spec, RunFolder.of(spec)).to_dict()
    assert time.process_time() - start < 0.05
    assert report["skipped"].startswith("no GPU here") and report["graphs_from"] is None


def test_kernels_of_flash_attention_4_are_kept_without_graphs(tmp_path, monkeypatch):
    """The test writes what the package writes on a GPU, into the folder that the package's variable names."""
    monkeypatch.setattr(flash_attention_4, "tested_version", lambda: "4.0")
    spec = make_spec(tmp_path, training={"compile": False})
    assert pod.caches_graphs(spec.kernels, spec.training)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first" / "triton"))
    take(spec, tmp_path / "first")
    archiver = inductor_cache.GraphArchiver(spec, Processes())
    written = {"f1/fwd/ab.o": elf(b"text"), "f1/fwd/ab.lock": b"", "f1/bwd/.cd.7.tmp.o": b"half"}
    graph_cache.write(Path(os.environ[flash_attention_4.FOLDER]), written)
    archiver.step_ended()
    archiver.step_ended()
    archiver.close()
    assert archiver.metadata().to_dict()["graphs_pushed"] == 1

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second" / "triton"))
    report, problems = take(spec, tmp_path / "second")

    assert (report["graphs_from"], report["graph_files"], problems) == ("store", 1, [])
    found = Path(os.environ[flash_attention_4.FOLDER])
    assert found.is_relative_to(tmp_path / "second") and os.environ[flash_attention_4.KEEP] == "1"
    assert graph_cache.read(found) == {"f1/fwd/ab.o": elf(b"text")}
    # What was found is not archived again.
    again = inductor_cache.GraphArchiver(spec, Processes())
    again.close()
    assert again.metadata().to_dict()["graphs_pushed"] == 0


def test_a_folder_of_yours_for_flash_attention_4_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(flash_attention_4, "tested_version", lambda: "4.0")
    monkeypatch.setenv(flash_attention_4.FOLDER, "/mnt/kernels")
    monkeypatch.setenv(flash_attention_4.KEEP, "0")
    take(make_spec(tmp_path), tmp_path / "pod")
    assert (os.environ[flash_attention_4.FOLDER], os.environ[flash_attention_4.KEEP]) == ("/mnt/kernels", "0")
    monkeypatch.delenv(flash_attention_4.FOLDER)
    monkeypatch.setattr(flash_attention_4, "tested_version", lambda: None)
    take(make_spec(tmp_path), tmp_path / "pod")
    assert flash_attention_4.FOLDER not in os.environ


def test_other_versions_of_flash_attention_4_have_other_archives(tmp_path, monkeypatch):
    keys = set()
    for version in (None, "4.0", "4.1"):
        monkeypatch.setattr(flash_attention_4, "tested_version", lambda version=version: version)
        keys.add(inductor_cache.graphs_key(make_spec(tmp_path)))
    assert len(keys) == 3


STEPS = """
import json, os, sys, tempfile
os.environ.update(json.loads(sys.argv[2]))
tempfile.tempdir = None
import torch
from strata_platform.spec import RunSpec
from tasks.runtime.warmup import inductor_cache
from tasks.runtime.models.activations import activation_checkpointing
from tasks.runtime.warmup import pod
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.process.ranks import Processes
from transformers.modeling_layers import GradientCheckpointingLayer

class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
    def forward(self, x):
        return torch.nn.functional.silu(x @ self.weight)

spec = RunSpec.model_validate_json(sys.argv[1])
report = pod.warm_up_pod(spec, RunFolder.of(spec)).to_dict()
torch.manual_seed(0)
model = torch.nn.Sequential(Layer())
activation_checkpointing.checkpoint_activations(model, spec.training)
activation_checkpointing.compile_layers(model, spec.training)
giver = inductor_cache.GraphArchiver(spec, Processes())
for _ in range(3):
    loss = model(torch.arange(32.0).view(4, 8)).sum()
    loss.backward()
    giver.step_ended()
giver.close()
from torch._dynamo.utils import counters
print(json.dumps({**report, **giver.metadata().to_dict(), "loss": loss.item(), **counters["aot_autograd"]}))
"""


def test_what_one_process_compiled_the_next_one_finds(tmp_path):
    """Each in a pod of its own, with nothing but the store and a C++ compiler that writes down what it is asked."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec /usr/bin/g++ "$@"\n')
    compiler.chmod(0o755)
    # What is recomputed by operator has a policy, which PyTorch keeps no graph of unless it is named.
    training = {"compile": True, "gradient_checkpointing": "per_op"}
    spec = make_spec(tmp_path, training=training, model={"dtype": "float32"})

    def start(pod: str) -> dict:
        (tmp_path / "calls").unlink(missing_ok=True)
        (tmp_path / pod).mkdir()
        environment = {
            "TMPDIR": str(tmp_path / pod),
            "PATH": f"{compiler.parent}:{os.environ['PATH']}",
            inductor_cache.FOLDER: str(tmp_path / pod / "graphs"),
            "TRITON_CACHE_DIR": str(tmp_path / pod / "triton"),
            "KEY": SECRET,
        }
        # A fork sets these when it has begun: they are read when a graph is compiled or looked for.
        done = fork_server.run(
            [sys.executable, "-c", STEPS, spec.model_dump_json(), json.dumps(environment)],
            env=fork_server.clean_environment(), capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def compilations() -> list[str]:
        calls = (tmp_path / "calls").read_text().splitlines()
        return [call for call in calls if " -o " in call and " -E " not in call]

    cold = start("first")
    assert cold["graphs_from"] is None and cold["graphs_compiled"] == 2 and cold["graphs_pushed"] == 1
    assert compilations()
    warm_ = start("second")
    assert warm_["graphs_from"] == "store" and warm_["graphs_found"] == 2 and warm_["graphs_compiled"] == 0
    assert warm_["autograd_cache_hit"] == 1
    assert compilations() == [] and warm_["graphs_pushed"] == 0 and warm_["loss"] == cold["loss"]
    assert len([path for path in (tmp_path / "store").rglob("*") if path.is_file()]) == 1


def test_only_the_first_process_of_a_job_gives_to_the_store(tmp_path, monkeypatch):
    spec = make_spec(tmp_path)
    counts = iter([graph_cache.GraphCounts(0, 0, 0)] + [graph_cache.GraphCounts(0, 2, 0)] * 20)
    monkeypatch.setattr(graph_cache, "graph_counts", lambda: next(counts))
    take(spec, tmp_path / "pod")
    graph_cache.write(here(), FILES)

    def given(processes: Processes) -> list[Path]:
        nonlocal counts
        counts = iter([graph_cache.GraphCounts(0, 0, 0)] + [graph_cache.GraphCounts(0, 2, 0)] * 20)
        archiver = inductor_cache.GraphArchiver(spec, processes)
        archiver.step_ended()
        archiver.step_ended()
        archiver.close()
        assert archiver.metadata().to_dict()["graph_problems"] == []
        return list(tmp_path.rglob("*.tar.gz"))

    assert given(Processes(9, 1, 16)) == []
    assert {path.parents[4].name for path in given(Processes(8, 0, 16))} == {"triton"}
    assert {path.parents[4].name for path in given(Processes(0, 0, 16))} == {"triton", tmp_path.name}
