"""Errors of libraries are explained, and memory kills are counted."""

import pytest

from tasks.runtime.process.error_explanations import MemoryKills, explain, reason_to_retry
from tasks.runtime.process.errors import Unreachable

# As PyTorch, NCCL and the driver say them.
ERRORS = [
    (
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported late",
        "token id",
        False,
    ),
    ("CUDA error: no kernel image is available for execution on the device", "another image", False),
    ("CUDA error: uncorrectable ECC error encountered", "GPU is broken", True),
    ("CUDA error: an illegal memory access was encountered", "kernels.enabled to false", True),
    (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
        "Timeout(ms)=1800000) ran for 1800045 milliseconds before timing out.",
        "waited for the others until a timeout",
        True,
    ),
    (
        "[enforce fail at ../gloo/transport/tcp/pair.cc] Timed out waiting 1800000ms for recv operation",
        "until a timeout",
        True,
    ),
    ("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3210", "lost its connection", True),
    ("Timed out after 901 seconds waiting for clients. 1/2 clients joined.", "until a timeout", True),
    ("wait timeout after 300000ms, keys: /default_pg/0//cpu//0", "until a timeout", True),
    (
        "The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 23456).",
        "until a timeout",
        True,
    ),
    ("recvVector failed on SocketImpl(fd=3, addr=[a]:1, remote=[b]:2): failed to recv, got 0 bytes", "lost its", True),
    ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed", "lost its conn", True),
    ("NCCL error: remote process exited or there was a network error, NCCL version 2.27.5", "lost its conn", True),
    ("[Errno 28] No space left on device: '/out/checkpoints'", "free space", True),
]


@pytest.mark.parametrize(("text", "words", "retry"), ERRORS, ids=[text[:40] for text, _, _ in ERRORS])
def test_errors_are_explained(text, words, retry):
    known = explain(RuntimeError(text))
    assert words in known.sentence
    assert known.retry is retry


@pytest.mark.parametrize(
    "text",
    [
        "mat1 and mat2 shapes cannot be multiplied",
        "unexpected keyword argument 'timeout'",
        "'socket' object has no attribute 'fd'",
        "this is not fit to train on",
    ],
)
def test_what_is_not_known_is_not_explained(text):
    assert explain(RuntimeError(text)) is None


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


@pytest.mark.parametrize(
    ("error", "processes", "retried"),
    [
        # A collective that lost its peer, in words that are not known.
        (RuntimeError("some collective failed"), 2, True),
        (RuntimeError("some operation failed"), 1, False),
        (RuntimeError("CUDA error: device-side assert triggered"), 2, False),
        (OSError(28, "No space left on device"), 1, True),
        (OSError(13, "Permission denied"), 2, False),
        (TypeError("a mistake in somebody's code"), 2, False),
        (Unreachable("the Hub"), 1, True),
    ],
    ids=["lost a peer", "alone", "known and final", "disk full", "rights", "code", "store"],
)
def test_what_another_attempt_may_mend_is_retried(error, processes, retried):
    assert (reason_to_retry(error, processes) is not None) == retried
