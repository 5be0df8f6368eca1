"""The warm-up compiles what a step launches, and never stands in a run's way."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from strata_kernels.warmup import Plan
from strata_kernels.warmup.kernel_description import KernelDescription, on_cache_miss
from strata_kernels.warmup.store import KERNELS
from strata_platform.spec import KernelStore, RunSpec
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.warmup import pod as warm_pod
from tasks.runtime.warmup.compile_process import warm_kernels
from tasks.runtime.warmup.plan import plan_kernels
from tasks.runtime.warmup.store import open_store
from tasks.runtime.warmup.warmup_metadata import LateCompile, WarmupFiles, WarmupMetadata
from tests.kernels.helpers.store_races import Driver, Pointer, copy_kernel

SMALL = {"data": {"sequence_length": 64}, "training": {"micro_batch_size": 2}}


def kernels(**changes):
    return {item.name for item in plan_kernels(RunSpec.model_validate({**SMALL, **changes})).specializations}


def test_the_plan_has_forward_backward_and_loss():
    assert kernels() >= {
        "norm_fwd_kernel",
        "norm_bwd_kernel",
        "rope_kernel",
        "activation_bwd_kernel",
        "cross_entropy_kernel",
    }


def test_what_is_excluded_is_not_compiled():
    assert not {name for name in kernels(kernels={"exclude": ["swiglu"]}) if name.startswith("activation")}


@pytest.mark.parametrize("kind", ["full", "per_op"])
def test_recomputation_adds_no_other_kernels(kind):
    assert kernels(training={"micro_batch_size": 2, "gradient_checkpointing": kind}) == kernels()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, "no GPU here"), ({"kernels": {"enabled": False}}, "kernels.enabled is false")],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is something to compile")
def test_nothing_to_warm_is_said(tmp_path, changes, reason):
    spec = RunSpec.model_validate({"output": str(tmp_path), **changes})
    assert reason in warm_up_pod(spec)["skipped"]


def test_on_a_machine_without_a_gpu_it_takes_no_time(tmp_path):
    spec = RunSpec(output=str(tmp_path))
    start = time.perf_counter()
    warm_pod.warm_up_pod(spec, RunFolder.of(spec))
    assert time.perf_counter() - start < 0.05


@pytest.fixture
def pod(tmp_path, monkeypatch) -> RunSpec:
    """A pod that has a GPU: the process that would compile is real; that it should is what has to be pretended here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warm_pod, "_TEMPORARY", (tmp_path / "memory",))
    monkeypatch.setattr(warm_pod, "_REQUIRED_BYTES", 4 << 20)
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(warm_pod.DONE, "")
    monkeypatch.delenv(warm_pod.DONE)
    monkeypatch.setenv(warm_pod.BAKED_KERNELS, "/baked")
    return RunSpec.model_validate({"output": str(tmp_path), "kernels": {"warmup_timeout": 20}})


def write_script(path: Path, script: str) -> Path:
    """A shell script in place of the warm-up's Python; $3 is the report, from $4 on are the images."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def stand_in(monkeypatch, path: Path, script: str) -> None:
    monkeypatch.setattr(sys, "executable", str(write_script(path, script)))


def warm_up_pod(spec: RunSpec) -> dict:
    return warm_pod.warm_up_pod(spec, RunFolder.of(spec)).to_dict()


def test_a_warm_up_that_fails_is_reported_and_not_tried_again(monkeypatch, pod, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    report = warm_up_pod(pod)
    assert report == {"skipped": "its process ended with code 1"}
    assert "training starts anyway" in caplog.text
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert warm_up_pod(pod) == report


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -KILL $$", "its process ended with code -9"),
        ("exit 0", "its process ended with code 0"),
        ("exec sleep 600", "given up after kernels.warmup_timeout 1 s"),
    ],
)
def test_a_process_that_ends_without_a_report_is_reported(tmp_path, monkeypatch, pod, script, said):
    stand_in(monkeypatch, tmp_path / "python", script)
    kernels = pod.kernels.model_copy(update={"warmup_timeout": 1})
    assert warm_up_pod(pod.model_copy(update={"kernels": kernels})) == {"skipped": said}


def test_a_warm_up_that_does_not_start_is_reported(monkeypatch, pod):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert "its process did not start" in warm_up_pod(pod)["skipped"]


def test_the_report_is_what_the_process_says(tmp_path, monkeypatch, pod):
    stand_in(
        monkeypatch, tmp_path / "python", r'echo "{\"device\": \"$4 $5\", \"directory\": \"$TRITON_CACHE_DIR\"}" > $3'
    )
    assert warm_up_pod(pod) == {"device": "/baked ", "directory": str(tmp_path / "cache")}


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("read_only", [False, True], ids=["full", "read-only"])
def test_a_disk_that_takes_nothing_is_only_read(tmp_path, monkeypatch, pod, small_disk, read_only):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(small_disk / "cache"))
    (small_disk / "cache").mkdir()
    if read_only:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    stand_in(monkeypatch, tmp_path / "python", r'echo "{\"device\": \"$4 $5\"}" > $3')
    report = warm_up_pod(pod)
    assert report["device"] == f"/baked {small_disk / 'cache'}"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "memory" / f"strata-{os.getuid()}" / "triton")
    reason = "Read-only file system" if read_only else "No space left on device"
    assert f"{small_disk / 'cache'} cannot be used" in report["problems"][0] and reason in report["problems"][0]


def test_a_disk_that_fills_up_meanwhile_is_left(tmp_path, monkeypatch, pod):
    script = r'case $TRITON_CACHE_DIR in */memory/*) echo "{}";; *) echo "{\"unwritable\": \"full\"}";; esac > $3'
    stand_in(monkeypatch, tmp_path / "python", script)
    assert warm_up_pod(pod) == {"problems": [f"{tmp_path / 'cache'} cannot be used: full"]}


def test_with_no_place_at_all_training_starts(tmp_path, monkeypatch, pod):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(warm_pod, "_TEMPORARY", ())
    report = warm_up_pod(pod)
    assert report["skipped"] == "no directory can hold Triton's cache" and "Not a directory" in report["problems"][0]
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "file" / "cache")


def test_a_temporary_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch, pod):
    folder = tmp_path / "memory" / f"strata-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert warm_pod._private_folders() == []


LOCAL_RANKS = """
import json, os, sys, torch
from pathlib import Path
from strata_platform.spec import RunSpec
from tasks.runtime.warmup import pod as warm_pod
from tasks.runtime.run_folder.folder import RunFolder

torch.cuda.is_available = lambda: True
root, sys.executable = Path(sys.argv[1]), sys.argv[2]
warm_pod._TEMPORARY = (root,)
spec = RunSpec(output=str(root), training={"compile": True})
children = []
for rank in range(8):
    if (child := os.fork()) == 0:
        os.environ["LOCAL_RANK"] = str(rank)
        report = warm_pod.warm_up_pod(spec, RunFolder.of(spec)).to_dict()
        assert report == ({"skipped": "its process ended with code -9"} if rank == 0 else {}), report
        assert os.environ["TRITON_CACHE_DIR"] == str(root / "cache")
        # Made once, for what all of them compile.
        [folder] = (root / f"strata-{os.getuid()}" / "graphs").iterdir()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
        os._exit(0 if (root / "came").read_text() == "came\\n" else 1)
    children.append(child)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""


def test_one_of_eight_processes_warms_up_and_the_others_wait(tmp_path):
    """Also when its warm-up is killed."""
    script = write_script(tmp_path / "python", f"sleep 0.5; echo came >> {tmp_path}/came; kill -KILL $$")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LOCAL_RANKS, tmp_path, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_process_of_the_warm_up_reports(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    metadata, plan, kernels = warm_kernels(RunSpec.model_validate(SMALL), [])
    assert metadata.planned == len(plan) > 5 and metadata.skipped.startswith("no GPU here") and kernels == []
    assert metadata.problems == () and metadata.store_hits == 0


def test_a_store_that_cannot_be_opened_is_a_problem_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNING_KEY", "short")
    missing = KernelStore(url=str(tmp_path), signing_key=f"file:{tmp_path}/none")
    short = KernelStore(url=str(tmp_path), signing_key="env:SIGNING_KEY")
    unknown = KernelStore(url="ftps3://bucket", allow_unsigned=True)
    problems = []
    assert all(open_store(store, "triton", KERNELS, problems) is None for store in (missing, short, unknown))
    assert "signing_key 'file:" in problems[0] and problems[0].endswith("is not there")
    assert "has 5 bytes; give it 32 or more" in problems[1] and "ftps3" in problems[2]
    monkeypatch.setenv("SIGNING_KEY", "s" * 32)
    assert open_store(short, "triton", KERNELS, problems).signing_key == b"s" * 32


def test_a_run_that_names_no_store_has_the_clusters(tmp_path, monkeypatch):
    problems = []
    monkeypatch.delenv("STRATA_KERNEL_STORE", raising=False)
    assert open_store(KernelStore(), "triton", KERNELS, problems) is None and not problems
    monkeypatch.setenv("STRATA_KERNEL_STORE", str(tmp_path / "clusters"))
    monkeypatch.delenv("KERNEL_STORE_KEY", raising=False)
    assert open_store(KernelStore(), "triton", KERNELS, problems) is None
    assert "signing_key 'env:KERNEL_STORE_KEY' is not there" in problems.pop()
    monkeypatch.setenv("KERNEL_STORE_KEY", "s" * 32)
    store = open_store(KernelStore(size_limit_mb=2), "triton", KERNELS, problems)
    assert (store.signing_key, store.allow_unsigned, store.size_limit) == (b"s" * 32, False, 2 << 20)
    store.storage.write("a", b"kernel")
    assert list((tmp_path / "clusters").rglob("a"))
    own = open_store(KernelStore(url=str(tmp_path / "own"), allow_unsigned=True), "triton", KERNELS, problems)
    own.storage.write("a", b"kernel")
    assert own.signing_key is None and list((tmp_path / "own").rglob("a")) and problems == []


def test_what_is_compiled_during_training_is_told_with_its_difference(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    copy_kernel.device_caches.clear()
    planned = []
    with on_cache_miss(planned.append):
        copy_kernel.warmup(Pointer, Pointer, D=16, enable_fp_fusion=True, grid=(1,))
    kernels = tmp_path / f"warmup-{socket.gethostname()}.kernels.json"
    kernels.write_text(json.dumps([kernel.to_dict() for kernel in planned]))
    copy_kernel.device_caches.clear()
    with warm_pod.late_compiles(RunFolder(tmp_path)) as misses:
        copy_kernel.warmup(Pointer, Pointer, D=16, enable_fp_fusion=True, grid=(1,))
        copy_kernel.warmup(Pointer, Pointer, D=64, num_warps=8, enable_fp_fusion=True, grid=(1,))
    said = "D=64 (planned: 16), num_warps=8 (planned: 4)"
    assert misses == [LateCompile(kernel="copy_kernel", difference=said)]
    assert f"compiled during training: copy_kernel: {said}" in caplog.text


def test_facts_are_the_same_after_their_way_through_the_files(tmp_path):
    files = WarmupFiles(tmp_path / "warmup-pod.json")
    metadata = WarmupMetadata.model_validate(
        {
            "device": "GPU",
            "planned": 2,
            "compiled": [{"name": "a", "signature": "x", "seconds": 0.1, "hit": True}],
            "failed": [{"name": "b", "signature": "x", "error": "no room"}],
            "graphs_from": None,
        }
    )
    plan = Plan(())
    files.write(metadata, plan, [KernelDescription("a", {"D": "16"})])
    assert files.read_report() == metadata and files.read_kernels() == [KernelDescription("a", {"D": "16"})]
    assert Plan.from_json(files.plan.read_text()) == plan
    # A field that is not known is absent; one that is known to be nothing is null.
    assert set(json.loads(files.report.read_text())) == {"device", "planned", "compiled", "failed", "graphs_from"}
    files.remove()
    assert list(tmp_path.iterdir()) == [] and files.read_kernels() == []


@pytest.mark.parametrize("text", ["", "{", '{"planed": 3}'], ids=["empty", "torn", "unknown"])
def test_a_report_that_cannot_be_read_costs_no_start(tmp_path, monkeypatch, pod, text):
    stand_in(monkeypatch, tmp_path / "python", f"printf '%s' '{text}' > $3")
    assert "its report cannot be read" in warm_up_pod(pod)["skipped"]
