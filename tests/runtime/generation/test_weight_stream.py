"""Weights that a run sends to a server of generation: what arrives, and what a failed transfer leaves behind."""

import http.client
import io
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tasks.runtime.generation import served_engines
from tasks.runtime.generation.served_engines import (
    LoadingFailed,
    ServedEmbedded,
    ServedVllm,
    WeightReceiver,
    load_received,
)
from tasks.runtime.generation.server import GenerationServer
from tasks.runtime.generation.serving import ServedModel, is_open
from tasks.runtime.generation.vllm_engine import save_configuration
from tasks.runtime.generation.weight_stream import (
    GroupAddress,
    TransferBroken,
    WeightGroup,
    _send_part,
    receive_weights,
    send_weights,
)
from tasks.runtime.process.errors import Unreachable
from tests.helpers import fork_server
from tests.runtime.generation.test_embedded import DRAWN, build, requests
from tests.runtime.generation.test_vllm_engine import embedded, words
from tests.runtime.helpers.generation_server import MODEL, client, learn, meeting, require_same, serving, transfer


def test_weights_arrive_bit_for_bit(monkeypatch):
    """Of every dtype and form, in parts that hold several and one, to each receiver."""
    monkeypatch.setattr("tasks.runtime.generation.weight_stream._PART_BYTES", 256)
    sent = {
        "matrix": torch.randn(7, 5), "transposed": torch.randn(4, 6).t(), "large": torch.randn(40, 9),
        "bf16": torch.randn(3, 3, dtype=torch.bfloat16), "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4), "int": torch.arange(5), "bool": torch.tensor([True, False, True]),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn), "last": torch.randn(1),
    }  # fmt: skip
    address, store = meeting(3)
    found = {1: {}, 2: {}}

    def receive(rank):
        found[rank] |= receive_weights(WeightGroup(address, rank, torch.device("cpu")))

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in found]
    for thread in threads:
        thread.start()
    send_weights(sent.items(), WeightGroup(address, 0, torch.device("cpu")))
    for thread in threads:
        thread.join()
    for got in found.values():
        assert list(got) == list(sent)
        for name, weight in sent.items():
            assert got[name].dtype == weight.dtype and got[name].shape == weight.shape
            assert torch.equal(got[name].float(), weight.float()), name
    del store


class Loading(ServedEmbedded):
    """Gets the weights, then fails with the first of `errors`, if one is left."""

    errors: ClassVar = []

    def receive(self, address):
        super().receive(address)
        if self.errors:
            raise self.errors.pop(0)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (KeyError("layers.0.up"), ValueError, "cannot load the weights: KeyError: 'layers.0.up'"),
        (RuntimeError("size mismatch"), ValueError, "cannot load the weights: RuntimeError: size mismatch"),
        (AssertionError("[2] is not [3]"), ValueError, r"cannot load the weights: AssertionError: \[2\] is not \[3\]"),
        (OSError("No space left"), Unreachable, "its engine failed: OSError: No space left"),
        (torch.OutOfMemoryError("of the GPU"), Unreachable, "its engine failed: OutOfMemoryError: of the GPU"),
    ],
    ids=["name", "shape", "assertion", "disk", "memory"],
)
def test_a_run_is_told_why_its_weights_were_not_loaded(error, kind, said, monkeypatch):
    """And the server ends if another transfer would not help."""
    monkeypatch.setattr(Loading, "errors", [error])
    with serving(Loading) as server:
        made = client(build(), server)
        with pytest.raises(kind, match=said):
            made.update_weights()
        assert bool(server.failed) == (kind is Unreachable)


def test_a_transfer_that_breaks_off_at_the_server_alone_is_repeated(monkeypatch):
    monkeypatch.setattr(Loading, "errors", [TransferBroken("connection reset")])
    model = build()
    with serving(Loading) as server:
        made = client(model, server)
        made.update_weights()
        require_same(made.generate(requests(), DRAWN), embedded(model).generate(requests(), DRAWN))
    assert not Loading.errors


def test_an_error_of_the_run_is_not_taken_for_one_of_the_transfer(monkeypatch):
    def merged(*_):
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setattr("tasks.runtime.generation.remote_engine.checkpoint_weights", merged)
    with serving() as server:
        made = client(build(), server, patience=0.0)
        with pytest.raises(RuntimeError, match=r"^out of memory"):
            made.update_weights()


class Worker(WeightReceiver):
    """A worker of vLLM's, which has loaded the weights `loaded` or fails at the first one."""

    device = torch.device("cpu")

    def __init__(self, rank, fails):
        self.rank, self.fails, self.loaded, self.ended = rank, fails, [], False

    def reload_weights(self, weights_iterator):
        for name, _ in weights_iterator:
            if self.fails:
                raise KeyError(name)
            self.loaded.append(name)


def test_workers_return_what_they_fail_at(monkeypatch):
    """As values: of an exception in another process vLLM passes on the text alone."""
    monkeypatch.setattr(served_engines, "pack_for_cpu", lambda worker: None)
    monkeypatch.setattr(served_engines, "end_reload", lambda worker: setattr(worker, "ended", True))
    address, store = meeting(3)
    workers, told = [Worker(0, False), Worker(1, True)], {}

    def receive(worker):
        told[worker.rank] = worker.receive_from_training(asdict(address))

    threads = [threading.Thread(target=receive, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    send_weights([("a", torch.ones(2)), ("b", torch.ones(3))], WeightGroup(address, 0, torch.device("cpu")))
    for thread in threads:
        thread.join()
    assert told == {0: None, 1: ("weights", "KeyError: 'a'")}
    assert workers[0].loaded == ["a", "b"] and [worker.ended for worker in workers] == [False, True]
    del store


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        ([None, ("broken", "reset")], "broken", "reset"),
        ([("broken", "reset"), ("weights", "KeyError: 'a'")], "weights", "KeyError: 'a'"),
        ([("broken", "reset"), ("failed", "OSError: full")], "failed", "OSError: full"),
        (RuntimeError("cancelled"), "failed", "RuntimeError: cancelled"),
    ],
    ids=["broken", "weights", "failed", "gone"],
)
def test_what_workers_fail_at_says_whether_another_transfer_helps(told, code, said):
    """And a worker that is gone is no fault of the weights."""

    class Llm:
        def collective_rpc(self, *_, **__):
            if isinstance(told, Exception):
                raise told
            return told

    engine = object.__new__(ServedVllm)
    engine._engine = SimpleNamespace(llm=Llm())
    with pytest.raises(LoadingFailed) as error:
        engine.receive(GroupAddress("127.0.0.1", 1, "a", 3, "gloo"))
    assert (error.value.code, str(error.value)) == (code, said)


def test_a_sender_that_dies_hides_no_error_of_loading():
    address, store = meeting()

    def send():
        group = WeightGroup(address, 0, torch.device("cpu"))
        _send_part([("a", torch.ones(2))], group)

    def load(weights):
        next(weights)
        raise ValueError("the model has no weight 'a'")

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(ValueError, match="no weight 'a'"):
        load_received(WeightGroup(address, 1, torch.device("cpu")), load)
    thread.join()
    del store


def test_weights_that_cannot_be_loaded_leave_no_file_behind(tmp_path):
    model = build()
    save_configuration(model, words(model.config.vocab_size), tmp_path, torch.float32)
    engine = ServedEmbedded(ServedModel.from_json(MODEL), tmp_path)
    with pytest.raises(RuntimeError, match="size"):
        engine._load(iter([("model.embed_tokens.weight", torch.zeros(1, 1))]))
    assert not (tmp_path / "model.safetensors").exists()


def test_a_transfer_that_breaks_off_leaves_no_weights_behind():
    """A run is killed in the middle of one; the next process of the run starts from the beginning."""
    model = build()
    with serving() as server:
        made = client(model, server)
        made.update_weights()
        with transfer(made, 2) as group:
            group.broadcast(torch.tensor([10, 10]))
        learn(model)
        # It sends them again, as after a restart.
        require_same(made.generate(requests(), DRAWN), embedded(model).generate(requests(), DRAWN))


def test_a_response_is_open_until_its_end():
    """By which a sender notices that the server is gone, where its group of processes does not."""
    ours, theirs = socket.socketpair()
    response = http.client.HTTPResponse(ours)
    theirs.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    response.begin()
    assert is_open(response) and is_open(response)
    theirs.close()
    assert not is_open(response)
    ours.close()


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        ({"device": "cuda", "gpus": ["GPU 2"]}, "nccl"),
        ({"device": "cuda", "gpus": ["GPU 1"]}, "gloo"),
        ({"device": "cpu", "gpus": []}, "gloo"),
    ],
    ids=["own", "shared", "none"],
)
def test_a_gpu_that_both_ends_use_is_no_member_of_nccl_twice(asked, backend, monkeypatch):
    """Of a server with two workers, on GPU 0 and 1."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("tasks.runtime.generation.weight_stream.gpu_of", lambda device: f"GPU {device.index}")
    server, told = object.__new__(GenerationServer), []
    server._store = None
    server._lock, server._version, server._host, server._weights_port = threading.Lock(), None, "127.0.0.1", 1
    engine = SimpleNamespace(receivers=2, receive=lambda address: told.append(address.backend))
    server._require_session = lambda _: SimpleNamespace(engine=engine)
    assert server.receive({"version": 1, **asked}, lambda _: None) == {"weights": 1}
    assert told == [backend]


def test_weights_are_sent_from_where_the_model_is_by_then(monkeypatch):
    """A run moves its model to the GPU after it has found the server."""
    model = build()
    with serving() as server:
        made, asked = client(model, server), []
        monkeypatch.setattr(type(model), "device", torch.device("cuda", 3))
        monkeypatch.setattr("tasks.runtime.generation.remote_engine.gpu_of", lambda device: f"GPU {device.index}")
        monkeypatch.setattr(
            made, "_request", lambda *request: asked.append(request[-1]) or io.BytesIO(b'{"group":null}\n{}\n')
        )
        made.update_weights()
    assert asked == [{"version": 1, "device": "cuda", "gpus": ["GPU 3"]}]


KILLED = """
import sys, time
import torch
from tasks.runtime.generation.weight_stream import GroupAddress, WeightGroup

port, rank, size = map(int, sys.argv[1:])
address = GroupAddress("127.0.0.1", port, "a", 2, "gloo", loopback=True)
group = WeightGroup(address, rank, torch.device("cpu"))
part = torch.empty(size, dtype=torch.uint8)
part[0] = int(rank == 0)
work = group._group.broadcast(part, 0)
while rank == 1 and not part[0]:
    pass
print("began", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("rank", [0, 1], ids=["run", "server"])
def test_a_member_that_is_killed_inside_a_tensor_is_missed_at_once(rank):
    """Of a tensor that it has got in part, Gloo itself would wait for the rest until its time is over."""
    address, store = meeting()
    # So much that it is killed long before the end; what is not sent takes no memory.
    part = torch.empty(1 << 30, dtype=torch.uint8)
    part[0] = rank
    command = [sys.executable, "-c", KILLED, str(store.port), str(rank), str(part.numel())]
    other = fork_server.Popen(command, env=fork_server.clean_environment(), stdout=subprocess.PIPE)

    def kill():
        other.stdout.readline()
        while not part[0]:
            pass
        other.kill()
        other.wait()

    killer = threading.Thread(target=kill)
    killer.start()
    began = time.monotonic()
    with (
        pytest.raises(TransferBroken),
        WeightGroup(address, 1 - rank, torch.device("cpu"), is_whole=killer.is_alive) as group,
    ):
        group.broadcast(part)
    assert time.monotonic() - began < address.seconds / 2
    killer.join()
    other.stdout.close()
    del store


class Work:
    """Of NCCL: it waits for whoever is gone."""

    def is_completed(self):
        return False


@pytest.fixture
def nccl(monkeypatch):
    """What is asked of NCCL's groups, whose members are all gone."""
    asked = []
    group = SimpleNamespace(broadcast=lambda *_: Work(), abort=lambda: asked.append("abort"))

    def make(*_):
        asked.append(os.environ["TORCH_NCCL_BLOCKING_WAIT"])
        return group

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", make, raising=False)
    make.Options = SimpleNamespace
    monkeypatch.setattr("tasks.runtime.generation.weight_stream._LOOK_SECONDS", 0.0)
    return asked


def test_a_transfer_by_nccl_ends_when_the_server_is_gone(nccl):
    """NCCL waits, and the thread that watches it would end the process."""
    address, store = meeting()
    there = iter([True, True, False])
    with (
        pytest.raises(TransferBroken, match="is gone"),
        WeightGroup(replace(address, backend="nccl"), 0, torch.device("cpu"), is_whole=lambda: next(there)) as members,
    ):
        members.broadcast(torch.ones(2))
    assert nccl == ["1", "abort"] and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    del store


class ByNccl(ServedEmbedded):
    """Gets weights by NCCL, and notes that it has begun."""

    began = threading.Event()

    def receive(self, address):
        self.began.set()
        super().receive(replace(address, backend="nccl"))


def test_a_transfer_by_nccl_ends_when_the_run_is_gone(nccl):
    """Its next attempt does not wait until the time of the transfer is over."""
    model = build()
    with serving(ByNccl) as server:
        made = client(model, server)
        response = made._request(made._connection(), "/weights", {"version": 1, "device": "cpu"})
        response.readline()
        assert ByNccl.began.wait(60)
        time.sleep(0.1)
        assert nccl == ["1"]
        response.close()
        assert server._lock.acquire(timeout=60)
        server._lock.release()
        assert nccl == ["1", "abort"] and server._version is None
        client(model, server)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_weights_arrive_by_nccl_and_leave_no_memory_behind():
    """Two threads are the members, as two processes are."""
    sent = {"a": torch.randn(1000, 300, device="cuda:0"), "b": torch.randn(7, device="cuda:0").bfloat16()}
    free = []
    for _ in range(6):
        address, store = meeting()
        address, found = replace(address, backend="nccl"), {}

        def receive(address=address, found=found):
            with WeightGroup(address, 1, torch.device("cuda:1")) as group:
                found |= receive_weights(group)

        thread = threading.Thread(target=receive)
        thread.start()
        with WeightGroup(address, 0, torch.device("cuda:0")) as group:
            send_weights(sent.items(), group)
        thread.join()
        assert all(torch.equal(found[name].cpu(), weight.cpu()) for name, weight in sent.items())
        free.append(torch.cuda.mem_get_info(0)[0])
        del store
    assert free[1] - free[-1] < 64 << 20
