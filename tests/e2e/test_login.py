"""A Flyte that asks who calls: what it answers to nobody, to a program with a secret, and to a person."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.helpers.cluster import ROOT, SPEC

CONFIG = Path(os.environ.get("FLYTECTL_CONFIG", os.devnull))
ADMIN = (yaml.safe_load(CONFIG.read_text()) or {}).get("admin", {})
pytestmark = pytest.mark.skipif("authType" not in ADMIN, reason="this Flyte asks nobody who calls")


def strata(tmp_path, *arguments, env=(), **admin):
    """What a `strata` command of somebody with this section `admin` answers: exit code, standard output, all output."""
    file = tmp_path / "flyte.yaml"
    reached = {name: ADMIN[name] for name in ("endpoint", "insecure") if name in ADMIN}
    file.write_text(yaml.safe_dump({"admin": reached | admin}))
    command = [Path(sys.executable).with_name("strata"), *arguments, "--backend", "flyte"]
    known = {name: value for name, value in os.environ.items() if not name.startswith("FLYTE_CREDENTIALS")}
    known |= {"FLYTECTL_CONFIG": str(file), "STRATA_OWNER": "ada", **dict(env)}
    ended = subprocess.run(command, env=known, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    return ended.returncode, ended.stdout, ended.stdout + ended.stderr


def own_client():
    return {name: ADMIN[name] for name in ("authType", "clientId", "clientSecretLocation")}


def test_nobody_is_refused_with_the_ways_to_log_in(cluster, tmp_path):
    name = f"nobodys-{time.time_ns() // 10**9}"
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC | {"name": name}))
    code, _, said = strata(tmp_path, "submit", str(spec), "--image", cluster.image)
    assert code == 1 and "error: Flyte asks who you are" in said and "Traceback" not in said
    assert all(way in said for way in ("Pkce", "DeviceFlow", "ClientSecret", "clientSecretLocation"))
    code, _, said = strata(tmp_path, "get", name, **own_client())
    assert code == 2 and f"no run was submitted to flytesnacks-development as '{name}'" in said


def test_a_wrong_secret_is_refused_and_not_shown(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-wrong-secret")
    code, _, said = strata(tmp_path, "list", **own_client() | {"clientSecretLocation": str(secret)})
    assert code == 1 and "invalid_client" in said and "Traceback" not in said and "a-wrong-secret" not in said


def test_a_program_logs_in_with_a_secret_from_a_file_or_a_variable(tmp_path):
    secret = Path(ADMIN["clientSecretLocation"]).read_text()
    by_variable = own_client() | {"clientSecretLocation": None, "clientSecretEnvVar": "OWN_SECRET"}
    for admin, env in ((own_client(), {}), (by_variable, {"OWN_SECRET": secret})):
        code, shown, said = strata(tmp_path, "list", env=env, **admin)
        assert code == 0 and shown.startswith("NAME"), said
        assert secret not in said


def test_a_person_logs_in_with_a_browser(tmp_path):
    sign_in = f"{sys.executable} {ROOT / 'tests/e2e/helpers/sign_in.py'} ada %s &"
    code, shown, said = strata(tmp_path, "list", "--format", "json", env={"BROWSER": sign_in}, authType="Pkce")
    assert code == 0 and isinstance(yaml.safe_load(shown), list), said
    # The address that the browser came back to has a code for a token.
    assert "code=" not in said
