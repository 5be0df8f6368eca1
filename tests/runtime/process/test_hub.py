"""A Hub that does not answer ends an attempt; one that has not got what is asked for ends the run."""

import json
import socket
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import huggingface_hub
import pytest
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from strata_platform.outcomes import UNREACHABLE
from strata_platform.spec import DataRecipe, RunSpec
from tasks import finish, prepare, topology
from tasks.runtime import __main__ as entry
from tasks.runtime.data.preparation.tokenizer import read_tokenizer
from tasks.runtime.data.reading.sources import HubDataset
from tasks.runtime.models import config
from tasks.runtime.models.build import build_model
from tasks.runtime.models.config import load_config
from tasks.runtime.models.initial_weights import initial_weights
from tasks.runtime.objectives import ObjectiveContext, build_objective
from tasks.runtime.process.error_explanations import explain
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.hub import asking_hub
from tasks.runtime.process.ranks import Processes

SPEC = RunSpec.model_validate({"model": {"name": "acme/model"}})
ASKED = {
    "config": (lambda: load_config(SPEC.model), "model.name 'acme/model'"),
    "weights": (lambda: build_model(SPEC.model, SPEC.seed), "model.name 'acme/model'"),
    "tokenizer": (lambda: read_tokenizer("acme/model", None, field="model.tokenizer"), "model.tokenizer 'acme/model'"),
    "data": (lambda: next(HubDataset("acme/texts", None, "train", None, False).rows()), "data.source 'acme/texts'"),
    "stream": (lambda: next(HubDataset("acme/texts", None, "train", None, True).rows()), "data.source 'acme/texts'"),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Sets what the Hub answers: a status, or no answer for None. commit: of its files, which are empty."""
    servers = []

    def serve(status, commit=""):
        class Hub(BaseHTTPRequestHandler):
            def do_GET(self):
                about = json.dumps({"id": "acme/model", "sha": commit}) if "/api/models/" in self.path else ""
                self.send_response(status)
                self.send_header("Content-Length", str(len(about)))
                self.send_header("X-Repo-Commit", commit)
                self.send_header("ETag", '"of-nothing"')
                self.send_header("X-Error-Code", {404: "RepoNotFound", 403: "GatedRepo"}.get(status, ""))
                self.end_headers()
                self.wfile.write(about.encode() if self.command == "GET" else b"")

            do_HEAD = do_POST = do_GET

            def log_message(self, *arguments):
                pass

        if status is None:
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
        else:
            server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            servers.append((server, thread))
            port = server.server_port
        endpoint = f"http://127.0.0.1:{port}"
        # Other tests of this process may have read a model of that name.
        config._read_config.cache_clear()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        # Made of it when the module was loaded.
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        # The client's own pauses before it asks again.
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        return endpoint

    yield serve
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("status", [None, 503, 429], ids=["refused", "503", "429"])
@pytest.mark.parametrize("what", ASKED)
def test_no_answer_is_no_mistake_of_the_user(hub, what, status):
    ask, named = ASKED[what]
    endpoint = hub(status)
    with pytest.raises(Unreachable, match=rf"^{named}: the Hugging Face Hub at {endpoint} cannot be reached \("):
        ask()


@pytest.mark.parametrize("status", [404, 403, 401], ids=["no such name", "gated", "wrong token"])
@pytest.mark.parametrize("what", ASKED)
def test_an_answer_that_there_is_no_such_thing_is_one(hub, what, status):
    ask, named = ASKED[what]
    hub(status)
    with pytest.raises(ValueError, match=named):
        ask()


@pytest.mark.parametrize("what", ASKED)
def test_offline_what_is_not_in_the_cache_is_one(what):
    ask, named = ASKED[what]
    with pytest.raises(ValueError, match=named):
        ask()


def test_where_only_data_sets_are_offline(hub, monkeypatch):
    hub(503)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"data\.source 'acme/texts' was not found"):
        ASKED["data"][0]()


def test_a_download_that_breaks_off(hub):
    hub(503)
    with pytest.raises(Unreachable, match=r"cannot be reached \(read timed out\)"), asking_hub("model.name 'x'"):
        # What is raised where a file is read, and not looked up.
        raise huggingface_hub.errors.HTTPError("read timed out")
    with pytest.raises(KeyError), asking_hub("model.name 'x'"):
        raise KeyError("something else")


def test_the_commit_of_a_model_is_the_hubs_and_without_an_answer_that_of_the_cache(hub):
    hub(503)
    assert initial_weights(SPEC) == {}
    for commit in ("a" * 40, "b" * 40):
        hub(200, commit)
        assert initial_weights(SPEC) == {"model.name": commit}
    huggingface_hub.hf_hub_download(SPEC.model.name, "config.json")
    hub(503)
    assert initial_weights(SPEC) == {"model.name": commit}


def unreachable(*arguments, **others):
    raise Unreachable("model.name 'x': the Hugging Face Hub at http://hub cannot be reached (no route)")


def test_of_a_teacher_its_own_field_is_named(monkeypatch):
    monkeypatch.setattr("tasks.runtime.objectives.teacher_model.require_position_embeddings", unreachable)
    spec = RunSpec.model_validate({"objective": {"type": "distill", "teacher": "acme/teacher"}})
    start = ObjectiveContext(spec, Processes(), None, None, None, "-", continues=False)
    with pytest.raises(Unreachable, match=r"^objective\.teacher: .* cannot be reached"):
        build_objective(spec, fused=False).prepare(start)


def test_the_attempt_may_be_repeated(tmp_path, monkeypatch, capsys):
    (tmp_path / "my.yaml").write_text(json.dumps({"output": str(tmp_path)}))
    monkeypatch.setattr("tasks.runtime.training.session.check_health", unreachable)
    monkeypatch.setattr(sys, "argv", ["strata", str(tmp_path / "my.yaml")])
    assert entry.main() == UNREACHABLE.exit_code
    assert "cannot be reached (no route)" in capsys.readouterr().err
    assert explain(Unreachable("in any words")).retry


def test_so_do_tasks_end(tmp_path, monkeypatch):
    spec = RunSpec(output=str(tmp_path))
    data = FlyteDirectory(str(tmp_path))
    for module in (prepare, finish):
        monkeypatch.setattr(module, "configure_logging", lambda: None)
    for name in (
        "data.prepare",
        "evaluation.evaluate_model.evaluate",
        "export.export_model.export",
        "training.session.session",
        "data.PreparedData.load",
    ):
        monkeypatch.setattr(f"tasks.runtime.{name}", unreachable)
    with pytest.raises(FlyteRecoverableException, match="cannot be reached"):
        prepare.prepare.task_function(DataRecipe.from_spec(spec), spec.output, "", spec)
    with pytest.raises(FlyteRecoverableException, match="cannot be reached"):
        topology._train(spec, data)
    # pytest has threads, which a fork would not have.
    monkeypatch.setattr(finish.forks, "fork_server", lambda what: nullcontext())
    opened = type("Opened", (), {"completed": lambda self: None})()
    monkeypatch.setattr("tasks.runtime.data.open_prepared", lambda *arguments: opened)
    record = type("Record", (), {"require_complete": lambda self: self})()
    with pytest.raises(FlyteRecoverableException, match="cannot be reached"):
        finish.finish.task_function(spec, record, data, data)
    monkeypatch.setattr("tasks.runtime.evaluation.evaluate_model.evaluate", lambda spec, record, *rest: record)
    with pytest.raises(FlyteRecoverableException, match="cannot be reached"):
        finish.finish.task_function(spec, record, data, data)
