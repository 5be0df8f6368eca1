"""Codes, signals and errors become sentences that say what to do."""

import pytest

from tasks.runtime.process.exit_codes import MemoryKills, describe_exit, explain


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "out of memory"),
        (137, "out of memory"),
        (-15, "wants the machine back"),
        (143, "wants the machine back"),
        (-7, "resources.shared_memory"),
        (-6, "NCCL after a collective timed out"),
        (-4, "built for another one"),
        (-14, "hung in native code"),
        (-11, "native code"),
        (-10, "SIGUSR1"),
        (75, "hung, and left the stacks"),
        (3, "exit code 3"),
        (1, "exit code 1"),
        (200, "exit code 200"),
    ],
)
def test_exit_codes_become_sentences(code, words):
    assert words in describe_exit(code)


# As PyTorch, NCCL and the driver say them.
ERRORS = [
    (
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported late",
        "token id",
        False,
    ),
    ("CUDA error: no kernel image is available for execution on the device", "another image", False),
    ("CUDA error: uncorrectable ECC error encountered", "GPU is broken", True),
    ("CUDA error: an illegal memory access was encountered", "kernels.enabled false", True),
    (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
        "Timeout(ms)=1800000) ran for 1800045 milliseconds before timing out.",
        "waited for the others in vain",
        True,
    ),
    ("[enforce fail at ../gloo/transport/tcp/pair.cc] Timed out waiting 1800000ms for recv operation", "in vain", True),
    ("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3210", "lost its connection", True),
    ("NCCL error: remote process exited or there was a network error, NCCL version 2.27.5", "lost its conn", True),
    ("[Errno 28] No space left on device: '/out/checkpoints'", "make room", True),
]


@pytest.mark.parametrize(("text", "words", "retry"), ERRORS, ids=[words for _, words, _ in ERRORS])
def test_errors_are_explained(text, words, retry):
    known = explain(RuntimeError(text))
    assert words in known.sentence
    assert known.retry is retry


def test_what_is_not_known_is_not_explained():
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


@pytest.mark.parametrize(
    ("membership", "folder", "events", "limit"),
    [
        ("0::/", "", "memory.events", "memory.max"),
        ("0::/kubepods/pod1", "kubepods/pod1", "memory.events", "memory.max"),
        ("0::/../outside-of-the-namespace", "", "memory.events", "memory.max"),
        ("12:cpu:/x\n5:memory:/docker/1\n0::/", "memory/docker/1", "memory.oom_control", "memory.limit_in_bytes"),
    ],
    ids=["version 2, in a container", "version 2, on a host", "no such group", "version 1"],
)
def test_the_kernels_own_count_tells_of_memory(tmp_path, membership, folder, events, limit):
    (tmp_path / "membership").write_text(f"{membership}\n")
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    (group / events).write_text("low 0\noom_kill 1\n")
    (group / limit).write_text(f"{64 << 30}\n")
    kills = MemoryKills(tmp_path / "cgroup", tmp_path / "membership")
    assert kills.sentence("64Gi") is None
    (group / events).write_text("low 0\noom_kill 2\n")
    expected = "the container's memory of 64.0 GiB was used up; raise resources.memory, now 64Gi"
    assert kills.sentence("64Gi") == expected


def test_where_nobody_counts_nothing_is_said(tmp_path):
    assert MemoryKills(tmp_path / "none", tmp_path / "none").sentence("8Gi") is None
