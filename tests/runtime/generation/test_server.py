"""A server of generation over its real wire, HTTP and Gloo, with the embedded engine behind it: no vLLM is needed."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch

from strata_platform.outcomes import BAD_INPUT, PREEMPTED
from strata_platform.spec.sections.model import Lora
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.generation import Sampling, require_engine, served_engines
from tasks.runtime.generation import server as server_module
from tasks.runtime.generation.checkpoint_weights import checkpoint_weights
from tasks.runtime.generation.remote_engine import RemoteGenerator
from tasks.runtime.generation.served_engines import (
    LoadingFailed,
    ServedEmbedded,
    ServedVllm,
    WeightReceiver,
    load_received,
)
from tasks.runtime.generation.server import GenerationServer, main
from tasks.runtime.generation.serving import (
    TOKEN,
    ServedModel,
    is_open,
    requests_from_json,
    sampling_to_json,
    shared_token,
)
from tasks.runtime.generation.vllm_engine import save_configuration
from tasks.runtime.generation.weight_stream import (
    GroupAddress,
    TransferBroken,
    WeightGroup,
    _send_part,
    receive_weights,
    send_weights,
)
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.objectives.grpo import Grpo
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points
from tests.runtime.generation.test_embedded import DRAWN, GREEDY, PROMPTS, build, ids, requests
from tests.runtime.generation.test_vllm_engine import (
    FAMILIES,
    GPUS,
    embedded,
    little_memory,  # noqa: F401
    needs_vllm,
    require_greedy,
    require_log_probs_of_training,
    words,
)
from tests.runtime.helpers.comparable_runs import file_of
from tests.runtime.helpers.free_port import free_port
from tests.runtime.helpers.train_forked import launch
from tests.runtime.test_policy_optimization import answers, losses, output, prepared, spec_of, train_spec  # noqa: F401

EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@contextmanager
def serving(make=ServedEmbedded, *, port=0, engine="embedded", token=""):
    """A server in a thread; its address."""
    server = GenerationServer("127.0.0.1", port, make, engine=engine, token=token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.close()


def client(model, server, **options):
    address = server if isinstance(server, str) else f"127.0.0.1:{server.server_port}"
    given = {
        "address": address, "run": "a", "engine": "embedded", "dtype": torch.float32, "seed": 1, "temperature": 1.3,
        "length": 64, "batch_size": 8, "pad_token_id": 0, "patience": 60.0, **options,
    }  # fmt: skip
    return RemoteGenerator(model, words(model.config.vocab_size), Processes(), **given)


def learn(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter)


def require_same(found, expected):
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.log_probs, other.log_probs) and one.finished == other.finished


def meeting(size=2):
    """The address of a group of this machine, and the store that its members meet at."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return GroupAddress("127.0.0.1", store.port, "a", size, "gloo", loopback=True), store


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


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, EXPERTS], ids=["plain", "tied", "experts"])
def test_answers_are_those_of_the_weights_now(changes):
    model = build(**changes).eval()
    with serving() as server:
        made = client(model, server)
        for _ in range(2):
            made.update_weights()
            for sampling in (DRAWN, GREEDY):
                require_same(made.generate(requests(), sampling), embedded(model).generate(requests(), sampling))
            learn(model)


def test_an_adapter_is_on():
    model = build()
    without = ids(embedded(model).generate(requests(), GREEDY))
    add_adapter(model, Lora(type="lora", r=4), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += torch.randn_like(parameter) * ("lora_" in name)
    with serving() as server:
        made = client(model, server)
        made.update_weights()
        found = ids(made.generate(requests(), GREEDY))
    assert found == ids(embedded(model).generate(requests(), GREEDY)) and found != without


def test_other_weights_are_noticed():
    model = build()
    with serving() as server:
        made = client(model, server)
        made.update_weights()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1)
        with pytest.raises(ValueError, match="away from those of training on average"):
            made.generate(requests(), DRAWN)


class Recording(ServedEmbedded):
    """Notes how many answers are asked for at once; the first time, when `go` is set."""

    go, asked = threading.Event(), []

    def generate(self, wanted, sampling):
        self.asked.append(len(wanted))
        assert self.go.wait(60)
        return super().generate(wanted, sampling)


def test_processes_that_wait_are_answered_together():
    """And each gets its own answers."""
    model = build()
    with serving(Recording) as server:
        made = client(model, server)
        made.update_weights()
        found = {}
        first = threading.Thread(target=lambda: found.update({0: made.generate(requests()[:1], GREEDY)}))
        first.start()
        others = [
            threading.Thread(target=lambda n=n: found.update({n: made.generate(requests()[n : n + 1], GREEDY)}))
            for n in (1, 2, 3)
        ]
        for thread in others:
            thread.start()
        while len(server._waiting) < 4:
            time.sleep(0.001)
        Recording.go.set()
        for thread in (first, *others):
            thread.join()
    assert sorted(Recording.asked) == [1, 3]
    expected = embedded(model).generate(requests(), GREEDY)
    assert [ids(found[n]) for n in range(4)] == [ids(expected)[n : n + 1] for n in range(4)]


class Stuck(ServedEmbedded):
    """Tells a pipe that answers were asked for, and gives none."""

    pipe = None

    def generate(self, wanted, sampling):
        os.write(self.pipe, b"!")
        time.sleep(600)


def test_a_server_that_is_killed_while_it_generates_loses_nothing():
    """The process is killed by SIGKILL; the run waits for another at its address, and gives it the weights."""
    model = build()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told, Stuck.pipe = os.pipe()
    child = os.fork()
    if child == 0:
        with serving(Stuck, port=port):
            signal.pause()
        os._exit(0)
    made = client(model, f"127.0.0.1:{port}")
    made.update_weights()
    found = []
    thread = threading.Thread(target=lambda: found.extend(made.generate(requests(), DRAWN)))
    thread.start()
    os.read(told, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with serving(port=port):
        thread.join()
    require_same(found, embedded(model).generate(requests(), DRAWN))


def test_a_server_that_stays_away_ends_the_attempt_as_one_that_may_be_repeated():
    model = build()
    with serving() as server:
        made = client(model, server, patience=0.0)
    with pytest.raises(Unreachable, match=r"server 127\.0\.0\.1:\d+ was gone for 0 s: .*the run continues"):
        made.update_weights()
    assert Unreachable.outcome.retryable


def test_what_answers_for_a_server_that_is_not_there_is_no_answer():
    """Such as a proxy, with JSON of its own."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"error": "no upstream"}')

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with pytest.raises(Unreachable, match="was gone for 0 s: status 503"):
            client(build(), f"127.0.0.1:{proxy.server_port}", patience=0.0)
        proxy.shutdown()
        thread.join()


class Failing(ServedEmbedded):
    def generate(self, wanted, sampling):
        raise MemoryError("no keys and values left")


class FailingOnce(ServedEmbedded):
    """Notes how often it was asked; fails when `go` is set."""

    go, asked = threading.Event(), []

    def generate(self, wanted, sampling):
        self.asked.append(len(wanted))
        assert self.go.wait(60)
        raise MemoryError("no keys and values left")


def test_an_engine_that_failed_is_not_asked_again():
    """By requests of other terms, which wait."""
    model = build()
    with serving(FailingOnce) as server:
        made = client(model, server)
        made.update_weights()
        said = []

        def ask(sampling):
            with pytest.raises(Unreachable) as error:
                made.generate(requests(), sampling)
            said.append(str(error.value))

        threads = [threading.Thread(target=ask, args=(sampling,)) for sampling in (DRAWN, GREEDY)]
        for thread in threads:
            thread.start()
        while len(server._waiting) < 2:
            time.sleep(0.001)
        FailingOnce.go.set()
        for thread in threads:
            thread.join()
    assert len(said) == 2 and all("no keys and values left" in one for one in said)
    assert len(FailingOnce.asked) == 1


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


def test_an_engine_that_fails_ends_the_server_and_the_attempt():
    model = build()
    server = GenerationServer("127.0.0.1", 0, Failing, engine="embedded")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made = client(model, server)
    made.update_weights()
    with pytest.raises(Unreachable, match="its engine failed: MemoryError: no keys and values left"):
        made.generate(requests(), DRAWN)
    # It shuts down by itself, for what has started it to start it again.
    thread.join(60)
    assert not thread.is_alive() and server.failed
    server.close()


@contextmanager
def transfer(made, version):
    """A group to send the weights `version` in. It breaks off at the end of the block, and the server has noticed."""
    made._version = version
    connection = made._connection()
    response = made._request(connection, "/weights", {"version": version, "device": "cpu"})
    address = json.loads(response.readline())["group"]
    yield (group := WeightGroup(GroupAddress(host="127.0.0.1", loopback=True, **address), 0, torch.device("cpu")))
    # Its connections end with it.
    group._group = None
    assert json.loads(response.readline())["code"] == "broken"
    connection.close()


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


def test_one_server_serves_the_newest_process_of_one_run():
    model = build()
    with serving() as server:
        old = client(model, server)
        old.update_weights()
        with pytest.raises(ValueError, match="already serves run 'a', and one server serves one run"):
            client(model, server, run="b")
        with pytest.raises(ValueError, match="the run with other settings"):
            client(model, server, length=32)
        with pytest.raises(ValueError, match=r"runs the engine 'embedded', and objective.generation.engine is 'vllm'"):
            client(model, server, engine="vllm")
        new = client(model, server)
        new.update_weights()
        with pytest.raises(ValueError, match="another process of this run has taken the server over"):
            old.generate(requests(), DRAWN)
        with pytest.raises(ValueError, match="another process of this run"):
            old.update_weights()
        require_same(new.generate(requests(), DRAWN), embedded(model).generate(requests(), DRAWN))


def test_the_newest_process_has_the_server_also_after_it_was_started_again():
    """Whichever of two asks first. The old one is an attempt that was lost and still runs."""
    model = build()
    port = free_port()
    with serving(port=port):
        old, new = (client(model, f"127.0.0.1:{port}") for _ in range(2))
    with serving(port=port) as server:
        old.update_weights()
        new.update_weights()
        require_same(new.generate(requests(), DRAWN), embedded(model).generate(requests(), DRAWN))
        for ask in (old.update_weights, old._open):
            with pytest.raises(ValueError, match="another process of this run has taken the server over"):
                ask()
        assert server._session == new._key


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


@pytest.mark.parametrize("secret", ["rig\nht", "r\u00efght"])
def test_a_secret_that_cannot_be_sent_is_not_shown(secret, monkeypatch):
    monkeypatch.setenv(TOKEN, secret)
    with pytest.raises(ValueError, match=f"{TOKEN} has characters") as error:
        shared_token("127.0.0.1")
    assert "ght" not in str(error.value)


def test_a_line_break_behind_the_secret_is_none_of_it(monkeypatch):
    monkeypatch.setenv(TOKEN, "right\n")
    with serving(token="right") as server:
        client(build(), server)


def test_a_request_without_the_secret_is_refused(monkeypatch, tmp_path):
    model = build()
    with serving(token="right") as server:
        with pytest.raises(ValueError, match=f"the server has another secret in {TOKEN}"):
            client(model, server)
        monkeypatch.setenv(TOKEN, "right")
        client(model, server)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/health") as answer:
            assert json.load(answer) == {"status": "ok"}
    monkeypatch.delenv(TOKEN)
    # Whoever is no neighbor on this machine needs one, and it is missed before training.
    with pytest.raises(ValueError, match=rf"{TOKEN} is not set, and anyone who can reach pod\.svc"):
        require_engine(
            spec_of(tmp_path, "a", {"generation": {"server": "pod.svc:8471", "max_new_tokens": 12}}).objective
        )


@pytest.mark.parametrize("path", ["/generate", "/health"])
def test_whoever_has_no_secret_does_not_hold_a_connection(path, monkeypatch):
    monkeypatch.setattr(server_module, "_UNKNOWN_SECONDS", 0.2)
    method = "GET" if path == "/health" else "POST"
    with serving(token="right") as server:
        for sent in (b"", b"Authorization: Bearer wrong\r\nContent-Length: 9\r\n\r\n12", b"Authorization: Bearer "):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as held:
                held.sendall(f"{method} {path} HTTP/1.1\r\n".encode() + sent)
                while held.recv(1 << 16):
                    pass


def test_whoever_has_the_secret_may_take_its_time(monkeypatch):
    monkeypatch.setattr(server_module, "_UNKNOWN_SECONDS", 0.2)
    monkeypatch.setenv(TOKEN, "right")

    def make(model, folder):
        # By then the connection has been closed, or never is.
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
        return ServedEmbedded(model, folder)

    with serving(make, token="right") as server:
        client(build(), server, patience=0.0)


MODEL = {
    "run": "a", "engine": "embedded", "files": {}, "dtype": "float32", "seed": 1, "temperature": 1.0, "length": 64,
    "batch_size": 8, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {"../config.json": ""}}, "none of a configuration"),
        ({"files": {"model.py": ""}}, "none of a configuration"),
        ({"files": {"model.safetensors": ""}}, "none of a configuration"),
        ({"dtype": "Tensor"}, "dtype 'Tensor' is unknown"),
        ({"more": 1}, "other fields"),
    ],
)
def test_a_model_that_is_none_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        ServedModel.from_json(MODEL | change)


@pytest.mark.parametrize("request_", [[1, []], [1, [5] * 64], [-1, [5]], [1, ["a"]]])
def test_a_prompt_that_an_engine_would_fail_at_is_refused(request_):
    """An engine that fails ends the server."""
    with pytest.raises(ValueError, match=r"tokens, and rows have 64|integers from 0 on"):
        requests_from_json([request_], 64)


def test_what_is_no_request_is_refused_and_the_server_goes_on():
    model = build()
    with serving() as server:
        made = client(model, server)
        made.update_weights()
        asked = {"version": 1, "sampling": sampling_to_json(DRAWN), "requests": [[0, [5]]]}
        for path, change in (
            ("/generate", {"sampling": {}}), ("/generate", {"requests": [[0, []]]}), ("/generate", {"version": "x"}),
            ("/none", {}),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"objective\.generation\.server"):
                made._post(path, asked | change)
        assert len(made.generate(requests(), replace(DRAWN, stop_strings=("w5",)))) == len(PROMPTS)


@contextmanager
def started(*options):
    """The server as a user starts it: its address, and the process."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "tasks.runtime.generation.server", "--port", str(ports[0])]
    process = subprocess.Popen([*command, "--weights-port", str(ports[1]), *options])
    try:
        yield f"127.0.0.1:{ports[0]}", process
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken_is_named(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["server", "--engine", "embedded", "--port", port])
        assert main() == BAD_INPUT.exit_code
    assert f"cannot listen on --host 127.0.0.1 with --port {port}" in capsys.readouterr().err


def test_sigterm_ends_it_and_leaves_no_files(monkeypatch, tmp_path):
    """In a container it is the first process, which ignores the signal unless it has a handler."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("--engine", "embedded") as (address, process):
        client(build(), address)
        assert any(tmp_path.iterdir())
        process.terminate()
        assert process.wait(60) == PREEMPTED.exit_code
    assert not any(tmp_path.iterdir())


class TestVllm:
    pytestmark = needs_vllm

    @pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.skipif(GPUS == 1, reason="one GPU"))])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_answers_are_those_of_the_weights_now(self, family, workers, monkeypatch):
        """In its process, from where the weights go to one worker, or to two that have a part of each; and after a
        transfer that broke off inside a layer. Weights that are not the model's end the run.
        """
        changes = dict(FAMILIES[family])
        model = build(changes.pop("family", family), **changes).eval()
        # Gloo, also between GPUs: NCCL takes each one once.
        with started("--tensor-parallel", str(workers), "--gpu-memory-utilization", "0.2") as (address, _):
            made = client(model, address, engine="vllm", temperature=1.0, patience=600.0)
            for last in (False, True):
                made.update_weights()
                require_greedy(model, made.generate(requests(), GREEDY))
                require_log_probs_of_training(model, made.generate(requests(), Sampling(12, stop_token_ids=(2, 17))))
                if last:
                    break
                weights = list(checkpoint_weights(model, torch.float32))
                some = next(n for n, (name, _) in enumerate(weights) if name.endswith("q_proj.weight"))
                with transfer(made, 2) as group:
                    _send_part(weights[: some + 1], group)
                learn(model)
            bad = [("model.layers.0.none.weight", torch.ones(2))]
            monkeypatch.setattr("tasks.runtime.generation.remote_engine.checkpoint_weights", lambda *_: iter(bad))
            with pytest.raises(ValueError, match=r"cannot load the weights: .*none"):
                made.update_weights()


class Overlapping(ServedEmbedded):
    """Answers the requests of the second step only when the first one learns."""

    asked, learns = 0, threading.Event()

    def generate(self, wanted, sampling):
        Overlapping.asked += 1
        assert Overlapping.asked != 2 or self.learns.wait(60)
        return super().generate(wanted, sampling)


class TestRuns:
    def test_the_answers_of_the_next_step_are_generated_while_the_model_learns(self, output):  # noqa: F811
        """Those of the weights before the step, as without a server; and again when the run was killed."""
        changes = {
            "training": {"steps": 4, "micro_batch_size": 12},
            "evaluation": {"every": 3, "samples": 0},
            "data": {"validation_fraction": 0.3},
        }
        alone = spec_of(output, "ahead-alone", {"generate_ahead": True}, **changes)
        train_spec(alone)
        learn = Grpo.micro_batch_loss

        def learning(*arguments):
            Overlapping.learns.set()
            return learn(*arguments)

        with serving(Overlapping) as server, mock.patch.object(Grpo, "micro_batch_loss", learning):
            generation = {"max_new_tokens": 12, "temperature": 0.9, "server": f"127.0.0.1:{server.server_port}"}
            spec = spec_of(output, "ahead-served", {"generate_ahead": True, "generation": generation}, **changes)
            train_spec(spec)
            train_spec(spec, step=2)
        for found, expected in zip(losses(spec, 0)[:3], losses(alone)[:3], strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert losses(spec, 1) == losses(spec, 0)[2:]
        # Step 3 follows a checkpoint, and step 4 an evaluation, which gives the server other weights.
        points = [point.metrics["staleness"] for point in read_points(RunFolder.of(spec).metrics)]
        assert points[:4] == [0, 1, 0, 0]

    def test_two_processes_take_their_answers_from_one_server_ahead(self, output):  # noqa: F811
        """No rank may send weights while another one's answers of those before are generated."""
        found = {}
        for processes, parallel in ((1, "single"), (2, "ddp")):
            with serving() as server:
                generation = {"max_new_tokens": 12, "temperature": 0.9, "server": f"127.0.0.1:{server.server_port}"}
                spec = spec_of(
                    output, f"ahead-{parallel}", {"generate_ahead": True, "generation": generation},
                    training={"steps": 4, "micro_batch_size": 12 // processes}, checkpoint={"every": 5},
                    topology={"nproc_per_node": processes}, parallel={"type": parallel},
                )  # fmt: skip
                if processes == 1:
                    train_spec(spec)
                else:
                    launch("2", file_of(output, spec))
            found[processes] = losses(spec)
            points = read_points(RunFolder.of(spec).metrics)
            assert [point.metrics["staleness"] for point in points] == [0, 1, 1, 1]
        for one, two in zip(found[1], found[2], strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-6)

    def test_a_server_that_is_gone_while_the_model_learns_costs_no_step(self, output, caplog):  # noqa: F811
        model = build()
        with serving() as server:
            made = client(model, server)
            made.update_weights()
        assert made.generate_while_training(requests(), DRAWN) is None
        assert "the next step generates its answers itself" in caplog.text
        training = {"training": {"steps": 2, "micro_batch_size": 12}}
        with serving() as server:
            generation = {"max_new_tokens": 12, "temperature": 0.9, "server": f"127.0.0.1:{server.server_port}"}
            at_once = spec_of(output, "at-once-served", {"generation": generation}, **training)
            train_spec(at_once)
        with (
            serving() as server,
            mock.patch.object(RemoteGenerator, "generate_while_training", lambda *_: None),
        ):
            generation["server"] = f"127.0.0.1:{server.server_port}"
            spec = spec_of(output, "gone-again", {"generate_ahead": True, "generation": generation}, **training)
            train_spec(spec)
        assert losses(spec) == losses(at_once)
        assert [point.metrics["staleness"] for point in read_points(RunFolder.of(spec).metrics)] == [0, 0]

    def test_a_run_learns_what_it_learns_without_a_server(self, output):  # noqa: F811
        """In training, in measurements of it, and when it was killed and continues."""
        common = {"importance_cap": 2.0}
        measured = {"data": {"validation_fraction": 0.3}, "evaluation": {"every": 2, "samples": 0}}
        generation = {"max_new_tokens": 12, "temperature": 0.9}
        alone = spec_of(output, "without-server", common, **measured)
        train_spec(alone)
        with serving() as server:
            served = {"generation": {**generation, "server": f"127.0.0.1:{server.server_port}"}}
            spec = spec_of(output, "with-server", common | served, **measured)
            record = train_spec(spec)
            train_spec(spec, step=2)
            weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
            after = evaluate(spec, record, prepared(spec), weights)
        assert answers(spec)[1] == answers(alone)[1]
        for found, expected in zip(losses(spec, 0), losses(alone), strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert losses(spec, 1) == losses(spec, 0)[2:]
        points = read_points(RunFolder.of(spec).metrics)
        assert all(point.metrics["generation_difference"] < 1e-5 for point in points)
        found, expected = (read_evaluations(RunFolder.of(one).metrics) for one in (spec, alone))
        assert [one.loss for one in found[:2]] == pytest.approx([one.loss for one in expected])
        assert after.eval_metrics["reward"] == pytest.approx(-found[1].loss)
