"""Log-in to a Flyte that asks who calls."""

import importlib
import io
import json
import os
import subprocess
import sys
import threading
import webbrowser
from http.server import HTTPServer
from pathlib import Path

import grpc
import keyring
import pytest
from flyteidl.core import execution_pb2 as core_pb2

from strata_platform.backends import flyte_admin
from strata_platform.backends.flyte import FlyteBackend
from strata_platform.backends.flyte_config import FlyteConfig
from strata_platform.client import Client
from strata_platform.errors import Refused
from strata_platform.runs import Phase
from tests.platform.helpers.servers import Tokens

FAILED = core_pb2.WorkflowExecution.FAILED


@pytest.fixture
def asking(admin):
    """A Flyte that has a run and refuses calls without a token."""
    admin.add("twin", FAILED)
    admin.token = "secret-token"
    return admin


def client(tmp_path, **login):
    """The client of somebody whose configuration says how to log in."""
    file = tmp_path / "flyte.yaml"
    told = "".join(f", {name}: {value}" for name, value in login.items())
    file.write_text(file.read_text().replace("}", f"{told}}}"))
    return Client(FlyteBackend(config=str(file)))


def test_the_token_that_a_command_prints_is_sent(tmp_path, asking):
    run = client(tmp_path, authType="ExternalCommand", command="[echo, secret-token]").get("twin")
    assert run.phase is Phase.FAILED and grpc.StatusCode.UNAUTHENTICATED in asking.refused


class Keyring(keyring.backend.KeyringBackend):
    """Holds tokens in memory."""

    priority = 1

    def __init__(self):
        self.kept = {}

    def get_password(self, service, username):
        return self.kept.get((service, username))

    def set_password(self, service, username, password):
        self.kept[service, username] = password


class NeedsFlytekit(Exception):
    pass


@pytest.fixture
def without_flytekit(monkeypatch):
    def refuse(*_):
        raise NeedsFlytekit

    monkeypatch.setattr(flyte_admin, "logged_in_channel", refuse)


@pytest.mark.parametrize("login", [{}, {"authType": "Pkce"}, {"authType": "DeviceFlow"}])
def test_whoever_is_logged_in_needs_no_flytekit(tmp_path, asking, without_flytekit, monkeypatch, login):
    ring = Keyring()
    monkeypatch.setattr(keyring.core, "_keyring_backend", ring)
    with pytest.raises(NeedsFlytekit):
        client(tmp_path, **login).get("twin")
    file = str(tmp_path / "flyte.yaml")
    ring.set_password(FlyteConfig.read(file).endpoint, "access_token", asking.token)
    logged_in = Client(FlyteBackend(config=file))
    for _ in range(2):
        assert logged_in.get("twin").phase is Phase.FAILED
    # flytekit renews a token that has expired.
    asking.token = "another"
    with pytest.raises(NeedsFlytekit):
        logged_in.get("twin")


@pytest.fixture
def tokens(asking):
    """A server of tokens that Flyte names."""
    server = HTTPServer(("127.0.0.1", 0), Tokens)
    server.token, server.secret, server.asked = asking.token, "s/ecret", []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    asking.metadata.token_endpoint = f"http://127.0.0.1:{server.server_port}/token"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_program_with_a_secret_needs_no_flytekit(tmp_path, tokens, without_flytekit, monkeypatch):
    (tmp_path / "secret").write_text("s/ecret\n")
    known = {"clientId": "me", "scopes": "[all, offline]", "audience": "flyte"}
    assert client(tmp_path, **known, clientSecretLocation=tmp_path / "secret").get("twin").phase is Phase.FAILED
    assert tokens.asked == [{"grant_type": "client_credentials", "scope": "all offline", "audience": "flyte"}]
    # A secret in a variable goes before that of the file.
    (tmp_path / "secret").write_text("wrong")
    monkeypatch.setenv("OWN_SECRET", "s/ecret")
    assert client(tmp_path, clientSecretEnvVar="OWN_SECRET").get("twin").phase is Phase.FAILED
    monkeypatch.setenv("OWN_SECRET", "wrong")
    with pytest.raises(NeedsFlytekit):
        client(tmp_path).get("twin")
    # flytekit knows proxies.
    monkeypatch.setenv("OWN_SECRET", "s/ecret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_grpc_proxy", "127.0.0.1")
    with pytest.raises(NeedsFlytekit):
        client(tmp_path).get("twin")
    assert len(tokens.asked) == 3


class Devices(Tokens):
    """A provider that leaves out the interval, and at which somebody has answered already."""

    def answer(self):
        if self.path == "/device":
            return 200, {"device_code": "d", "user_code": "ABCD", "verification_uri": "http://page", "expires_in": 60}
        if self.server.refusal:
            return 400, {"error": self.server.refusal}
        return 200, {"access_token": self.server.token, "expires_in": 60}

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, answer = self.answer()
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize("refusal", [None, "access_denied"])
def test_a_person_logs_in_with_a_browser_elsewhere(tmp_path, asking, tokens, monkeypatch, capfd, refusal):
    # As in a notebook: they filter what flytekit logs, which gives one message an argument too many.
    importlib.import_module("tasks")
    monkeypatch.setattr(keyring.core, "_keyring_backend", Keyring())
    tokens.RequestHandlerClass, tokens.refusal = Devices, refusal
    asking.metadata.device_endpoint = asking.metadata.token_endpoint.replace("/token", "/device")
    person = client(tmp_path, authType="DeviceFlow")
    if refusal:
        with pytest.raises(Refused, match=r"Flyte asks who you are .*access_denied.*DeviceFlow"):
            person.get("twin")
    else:
        assert person.get("twin").phase is Phase.FAILED
    shown, said = capfd.readouterr()
    assert shown == "" and "http://page?user_code=ABCD" in said and "Logging error" not in said


@pytest.mark.parametrize(
    ("login", "why"),
    [
        ({"authType": "ExternalCommand", "command": "['false']"}, "Failed to refresh token with command"),
        (
            {"authType": "ClientSecret", "clientId": "me", "clientSecretLocation": "/none"},
            "No such file",
        ),
        ({"authType": "ClientSecret"}, "Client ID and Client SECRET both are required"),
        ({"authType": "Magic"}, "Unknown authentication type 'Magic'"),
    ],
    ids=["command", "no-file", "no-client", "unknown"],
)
def test_a_login_that_fails_says_why_and_which_ways_there_are(tmp_path, asking, login, why):
    with pytest.raises(Refused) as refused:
        client(tmp_path, **login).get("twin")
    said = str(refused.value)
    assert (refused.value.status, refused.value.reason) == (401, "NotLoggedIn")
    assert "Flyte asks who you are to look for twin" in said and why in said
    assert "DeviceFlow" in said and "clientSecretLocation" in said


def test_a_browser_that_nobody_can_open_is_not_waited_for(tmp_path, asking, monkeypatch):
    def none():
        raise webbrowser.Error("no browser")

    monkeypatch.setattr(webbrowser, "get", none)
    # pytest's own standard input is no terminal either.
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(Refused, match="nobody is logged in, and this machine has no browser"):
        client(tmp_path).get("twin")


def test_what_a_login_prints_is_not_among_the_answers(tmp_path, asking):
    """`--format json` is read by programs."""
    script = tmp_path / "token.py"
    script.write_text("print('secret-token')")
    client(tmp_path, authType="ExternalCommand", command=f"[{sys.executable}, {script}]")
    (tmp_path / "kubeconfig").write_text("{}")
    command = [Path(sys.executable).with_name("strata"), "list", "--backend", "flyte", "--format", "json"]
    env = os.environ | {"FLYTECTL_CONFIG": str(tmp_path / "flyte.yaml"), "KUBECONFIG": str(tmp_path / "kubeconfig")}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "secret-token" not in ended.stdout + ended.stderr and '"twin"' in ended.stdout
