"""Exported models are copied to the Hub and to object stores, whole."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import huggingface_hub
import huggingface_hub.constants
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.export import Export
from tasks.runtime.data.preparation.tokenizer import train_tokenizer
from tasks.runtime.export.publish import _require_exported, publish, require_export_targets
from tasks.runtime.models.config import PRESETS

FILES = ("config.json", "model.safetensors", "README.md", "strata_record.json")
# The shards of a larger model, and a tokenizer with several templates.
OLDER = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "generation_config.json",
         "tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tools.jinja")  # fmt: skip


def spec_of(**export):
    return RunSpec.model_validate({"name": "x", "export": export})


@pytest.fixture
def model(tmp_path):
    for name in FILES:
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(f"new {name}")
    return tmp_path / "model"


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload of small files asks of it."""

    asked, there = (), ()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.asked.append((self.path, self.headers["Authorization"], body))
        answer, status = {}, 200
        if self.path == "/api/repos/create":
            answer = {"url": f"{huggingface_hub.constants.ENDPOINT}/org/model", "name": "org/model"}
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif self.path.startswith("/api/models/org/model/preupload/"):
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif self.path.startswith("/api/models/org/model/commit/"):
            answer = {
                "commitUrl": f"{huggingface_hub.constants.ENDPOINT}/org/model/commit/1",
                "commitOid": "1",
                "pullRequestUrl": None,
            }
        else:
            status = 404
        self._answer(answer, status)

    def do_GET(self):
        if "/tree/" in self.path:
            self._answer([{"type": "file", "path": path, "size": 1, "oid": "0"} for path in self.there], 200)
        else:
            self._answer({"sha": "1", "id": "org/model", "siblings": []}, 200)

    def _answer(self, answer, status):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_is_pushed_to_the_hub(hub, model):
    targets = Export(push_to_hub="org/model")
    tokenizer = ["additional_chat_templates/tools.jinja", "chat_template.jinja", "special_tokens_map.json",
                 "tokenizer.model", "vocab.json"]  # fmt: skip
    hub.there = ["LICENSE", "adapter_config.json", "adapter_model.safetensors", "model.safetensors", *tokenizer]
    require_export_targets(targets, "x")
    publish(targets, "x", model)
    assert all(token == "Bearer hf_secret" for _, token, _ in hub.asked)
    [created] = [json.loads(body) for path, _, body in hub.asked if path == "/api/repos/create"]
    assert (created["name"], created["organization"]) == ("model", "org")
    # What older clients say, and newer ones.
    assert created.get("private") or created.get("visibility") == "private"
    [commit] = [body for path, _, body in hub.asked if "/commit/" in path]
    lines = [json.loads(line)["value"] for line in commit.splitlines()]
    assert lines[0]["summary"] == "Add the model of run x"
    sent = {line["path"]: base64.b64decode(line["content"]).decode() for line in lines[1:] if "content" in line}
    assert sent == {name: f"new {name}" for name in FILES}
    # An adapter that was there would be put on top of the new weights, and a tokenizer's files taken for the new one's.
    gone = {line["path"] for line in lines[1:] if "content" not in line}
    assert gone == {"adapter_config.json", "adapter_model.safetensors", *tokenizer}


def test_a_hub_that_refuses_is_told_of_and_the_model_stays(hub, model):
    with pytest.raises(
        ValueError, match=rf"export\.push_to_hub: the model could not be copied: .*It is complete in {model}"
    ):
        publish(Export(push_to_hub="other/model"), "x", model)
    assert (model / "config.json").exists()


def test_without_a_token_it_ends_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match=r"export\.push_to_hub 'org/model' needs a token.*HF_TOKEN"):
        require_export_targets(Export(push_to_hub="org/model"), "x")


@pytest.fixture
def store():
    store = fsspec.filesystem("memory")
    store.makedirs("/models")
    yield store
    store.rm("/models", recursive=True)


def test_a_model_is_copied_to_a_store_in_place_of_the_one_before(model, store):
    for name in (*FILES, *OLDER):
        store.pipe(f"/models/x/{name}", b"old")
    require_export_targets(Export(url="memory://models"), "x")
    assert publish(Export(url="memory://models"), "x", model) == ["memory://models/x"]
    assert {path: store.cat(path) for path in store.find("/models/x")} == {
        f"/models/x/{path.name}": path.read_bytes() for path in model.iterdir()
    }


@pytest.mark.parametrize("copied", range(len(FILES)))
def test_what_a_broken_copy_leaves_has_no_configuration_and_is_replaced(model, store, monkeypatch, copied):
    left, put = iter(range(copied)), type(store).put_file

    def put_some(*arguments):
        next(left)
        put(*arguments)

    publish(Export(url="memory://models"), "x", model)
    with monkeypatch.context() as broken:
        broken.setattr(type(store), "put_file", put_some)
        with pytest.raises(ValueError, match=r"export\.url: the model could not be copied: .*StopIteration"):
            publish(Export(url="memory://models"), "x", model)
    assert not store.exists("/models/x/config.json")
    publish(Export(url="memory://models"), "x", model)
    assert len(store.find("/models/x")) == len(FILES)


@pytest.mark.parametrize(
    "there",
    [
        ["data.jsonl", "config.json"],
        ["checkpoint-2/manifest.json"],
        ["strata_record.json", "config.json", "notes.md"],
        ["strata_record.json", "projects/config.json"],
        [""],
    ],
    ids=["data", "a run", "a model and more", "a model and a folder", "a file"],
)
def test_what_no_export_wrote_is_never_removed(model, store, there):
    paths = [f"/models/x/{name}".rstrip("/") for name in there]
    for path in paths:
        store.pipe(path, b"precious")
    for attempt in (require_export_targets, lambda targets, run: publish(targets, "x", model)):
        with pytest.raises(ValueError, match=r"export\.url: .*memory://models/x has files that no export wrote.*"
                           r"choose another export\.url or name"):  # fmt: skip
            attempt(Export(url="memory://models"), "x")
    assert store.find("/models") == sorted(paths)
    assert {store.cat(path) for path in paths} == {b"precious"}


def test_the_mark_of_an_empty_folder_is_no_file(store, monkeypatch):
    monkeypatch.setattr(type(store), "find", lambda *arguments: ["/models/x/"])
    require_export_targets(Export(url="memory://models"), "x")


def test_all_that_an_export_writes_is_known(tmp_path):
    """Else the next one would be refused."""
    LlamaForCausalLM(LlamaConfig(**{**PRESETS["tiny-llama"], "num_hidden_layers": 1})).save_pretrained(tmp_path)
    tokenizer = train_tokenizer(["a few words"])
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(names) > 4 and "additional_chat_templates/tool_use.jinja" in names
    _require_exported("address", [*names, "README.md", "strata_record.json"])


def test_a_store_that_cannot_be_read_is_told_of_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", lambda *arguments: 1 / 0)
    with pytest.raises(ValueError, match=r"export\.url: memory://models/x cannot be read: ZeroDivisionError"):
        require_export_targets(Export(url="memory://models"), "x")


@pytest.mark.parametrize(("checkpoints", "models"), [("s3://b/a", "s3://b/a/"), ("s3://b/x/y", "s3://b")])
def test_models_and_checkpoints_have_places_of_their_own(checkpoints, models):
    with pytest.raises(SpecError, match=r"export\.url: replaces everything in s3://b.*set export\.url to"):
        RunSpec.model_validate({"name": "x", "checkpoint": {"url": checkpoints}, "export": {"url": models}})
    RunSpec.model_validate({"name": "x", "checkpoint": {"url": "s3://b/a"}, "export": {"url": "s3://b/models"}})


def test_places_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"export\.url 's4://x' cannot be opened"):
        require_export_targets(Export(url="s4://x"), "x")
    for export in ({"push_to_hub": "model"}, {"url": "s3://key:secret@bucket"}):
        with pytest.raises(SpecError, match=r"a name such as organization/model|a URL without credentials"):
            spec_of(**export)
    require_export_targets(Export(), "x")
