"""A server of generation over its real wire, HTTP and Gloo, with the embedded engine behind it: no vLLM is needed."""

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from strata_platform.outcomes import BAD_INPUT, PREEMPTED
from strata_platform.spec.sections.model import Lora
from tasks.runtime.generation import Sampling, require_engine
from tasks.runtime.generation import server as server_module
from tasks.runtime.generation.checkpoint_weights import checkpoint_weights
from tasks.runtime.generation.served_engines import ServedEmbedded
from tasks.runtime.generation.server import GenerationServer, main
from tasks.runtime.generation.serving import TOKEN, ServedModel, requests_from_json, sampling_to_json, shared_token
from tasks.runtime.generation.weight_stream import _send_part
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.process.errors import Unreachable
from tests.runtime.generation.test_embedded import DRAWN, GREEDY, PROMPTS, build, ids, requests
from tests.runtime.generation.test_vllm_engine import (
    FAMILIES,
    GPUS,
    embedded,
    little_memory,  # noqa: F401
    needs_vllm,
    require_greedy,
    require_log_probs_of_training,
)
from tests.runtime.helpers.free_port import free_port
from tests.runtime.helpers.generation_server import MODEL, client, learn, require_same, serving, started, transfer
from tests.runtime.test_policy_optimization import spec_of

EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


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
