"""Log-in to a Flyte that asks who calls."""

import io
import os
import subprocess
import sys
import webbrowser
from pathlib import Path

import grpc
import pytest
from flyteidl.core import execution_pb2 as core_pb2

from strata_platform.backends.flyte import FlyteBackend
from strata_platform.client import Client
from strata_platform.errors import Refused
from strata_platform.runs import Phase

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
