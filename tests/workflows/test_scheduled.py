"""A run at set times: its name, and what a webhook is sent when it ends. The webhook is a real one, on this machine."""

import json
import re
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error import FlyteError
from flytekit.types.file import FlyteFile

from strata_platform.spec import RunSpec
from tasks import scheduled as tasks
from tasks.runtime.run_folder.record import CompletionRecord
from workflows.scheduled import scheduled

SECRET = "/services/T0/very-secret"
NIGHT = datetime(2026, 3, 1, 2, 0, tzinfo=UTC)


class Webhook(BaseHTTPRequestHandler):
    """Gives the answers of its server, one after the other, and keeps what it was sent."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path, self.headers["Content-Type"], body))
        status = self.server.answers.pop(0) if self.server.answers else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self):
        self.server.received.append(("GET", self.path, {}))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def webhook(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Webhook)
    server.received, server.answers = [], []
    server.url = f"http://127.0.0.1:{server.server_port}{SECRET}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("ANNOUNCEMENTS_URL", server.url)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def texts(webhook):
    assert {(path, kind) for path, kind, _ in webhook.received} == {(SECRET, "application/json")}
    assert all(set(body) == {"text"} for *_, body in webhook.received)
    return [body["text"] for *_, body in webhook.received]


@pytest.fixture
def finished(tmp_path):
    record = CompletionRecord(
        status="complete", name="n", spec_hash="", steps=1200, steps_asked=1200, tokens=3_000_000, target_tokens=1,
        train_loss=1.0, eval_loss_before=2.0, eval_loss_after=1.25, checkpoint="", restarts=0, seconds=4000.0,
        tokens_per_second=1.0, peak_memory_bytes=0, parameters=1, trainable_parameters=1, device="H200", world_size=8,
        data={}, kernels={}, warmup={}, versions={},
    )  # fmt: skip
    (tmp_path / "record.json").write_text(record.model_dump_json())
    (tmp_path / "model").mkdir()
    return {"record": FlyteFile(str(tmp_path / "record.json")), "model": FlyteDirectory(str(tmp_path / "model"))}


def test_each_run_has_its_time_in_its_name():
    spec = RunSpec(name="night")
    names = {tasks.dated_spec(spec=spec, kickoff_time=NIGHT.replace(day=day)).name for day in (1, 2)}
    assert names == {"night-20260301-0200", "night-20260302-0200"}


def test_long_names_have_room_for_the_time_and_stay_apart():
    longest = ["a" * 53, "a" * 52 + "b", "b" * 40, "c" * 31 + "-" * 5 + "d" * 17]
    names = [tasks.dated_spec(spec=RunSpec(name=name), kickoff_time=NIGHT).name for name in longest]
    assert len(set(names)) == 4
    assert all(name.endswith("-20260301-0200") and len(name) <= 53 for name in names)
    assert tasks.dated_spec(spec=RunSpec(name="b" * 39), kickoff_time=NIGHT).name == "b" * 39 + "-20260301-0200"


def test_a_run_that_fails_is_told_with_its_error_and_fails_all_the_same(webhook, tmp_path, capsys):
    spec = RunSpec.model_validate({"name": "night", "output": str(tmp_path), "data": {"source": "/nowhere.jsonl"}})
    with pytest.raises(ValueError, match="nowhere"):
        scheduled(kickoff_time=NIGHT, spec=spec)
    (text,) = texts(webhook)
    assert text.startswith("night-20260301-0200 failed. Execution local in local-local\n")
    assert "data.source '/nowhere.jsonl' was not found" in text
    told = "".join(capsys.readouterr())
    assert "night-20260301-0200 failed" in told and "very-secret" not in told


def test_a_long_error_is_told_by_its_end(webhook):
    error = FlyteError(failed_node_id="n1", message="x" * 5000 + "the end")
    tasks.announce_failure(spec=RunSpec(name="night"), kickoff_time=NIGHT, err=error)
    (text,) = texts(webhook)
    assert text.endswith("the end") and "\n... x" in text and len(text) < 1400


def test_a_run_that_is_done_is_told_with_its_losses_and_its_model(webhook, finished):
    tasks.announce(spec=RunSpec(name="night"), **finished)
    (text,) = texts(webhook)
    assert text.replace("\N{NO-BREAK SPACE}", " ") == (
        "night is done: validation loss 1.2500, 2.0000 before; "
        "1,200 steps, 3,000,000 tokens in 1 h 06 min on 8 x H200. Execution local in local-local\n"
        f"{finished['model'].path}"
    )


def test_without_an_address_nothing_is_sent_and_that_is_said(monkeypatch, finished, capsys):
    monkeypatch.delenv("ANNOUNCEMENTS_URL", raising=False)
    tasks.announce(spec=RunSpec(name="night"), **finished)
    assert "no message is sent: the secret 'announcements' with the key 'url' does not exist" in capsys.readouterr().out


def test_a_webhook_that_refuses_does_not_fail_the_run(webhook, finished, capsys):
    webhook.answers = [404]
    tasks.announce(spec=RunSpec(name="night"), **finished)
    told = capsys.readouterr().out
    assert "the message was not sent: the webhook answered 404" in told and "very-secret" not in told


@pytest.mark.parametrize(
    ("answers", "problem", "asked"),
    [
        ([503, 429], None, 3),
        ([500, 500, 500], "the webhook answered 500", 3),
        ([403], "the webhook answered 403", 1),
        ([302], "the webhook answered 302", 1),
    ],
)
def test_what_may_pass_is_tried_again_and_a_redirection_is_not_followed(webhook, answers, problem, asked):
    webhook.answers = answers
    assert tasks._post(webhook.url, {"text": "t"}, (0, 0)) == problem
    assert texts(webhook) == ["t"] * asked


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("very-secret", "begins with https://"),
        ("file:///very-secret", "begins with https://"),
        ("http://127.0.0.1:1/very-secret", "cannot be reached: .*refused"),
        ("http://127.0.0.1:port/very-secret", "cannot be reached: InvalidURL"),
        ("http://[127.0.0.1/very-secret", "cannot be reached: ValueError"),
        ("http://127.0.0.1/very\tsecret very-secret", "cannot be reached: "),
    ],
)
def test_what_is_wrong_with_an_address_is_told_without_it(url, said):
    problem = tasks._post(url, {"text": "t"}, ())
    assert re.search(said, problem)
    assert "very-secret" not in problem
