"""Upstream's own flyte-binary in the cluster of `local_cluster`, in place of the stand-in for flyteadmin.

STRATA_FLYTE is that program, built of Flyte's sources without cgo: flyteadmin and its scheduler, datacatalog, propeller
and the pod webhook in one. It keeps its state in a PostgreSQL of this machine, whose programs have to be installed, and
asks who calls: people log in at an identity provider, which is the package oidc-provider-mock, and programs with a
client and its secret.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = os.environ.get("STRATA_FLYTE", "")
IMAGE = "flyte-upstream"
# PostgreSQL refuses to be root.
_USER = "postgres"
_PASSWORD = "in-the-tests"

# The identity provider: a package, and the port that it listens at.
PROVIDER = "oidc-provider-mock==0.3.4"
_PROVIDER_PORT = 9400
# Flyte's port for browsers and for tokens.
HTTP = 8088
# Flyte's clients with their secrets, and what Flyte wants to know of these: base64 of bcrypt.
CLIENT = "strata"
SECRETS = {"flytepropeller": "propellers-secret", CLIENT: "stratas-secret"}
_HASHES = {
    "flytepropeller": ("JDJiJDA2JDJEaGp3eXZmalQ0Sk1Pei5SSW9yWWU2SUwwTGdmRFBiOEFEWFJ5dkRXZk84UktZV01BQWtx"),
    CLIENT: "JDJiJDA2JG5sbDNQMW1BbWdTTzRsazAwbFo0Ty5XR3RiRHNYZ3lLZlBzd0RHbGxDcVJ6cTlTejhZSHc2",
}


def pack(scripts: Path, images: Path) -> None:
    """An image of the program, as the scripts make theirs."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        (Path(root) / "tmp").mkdir(mode=0o777)
        (Path(root) / "tmp").chmod(0o1777)
        shutil.copy2(PROGRAM, Path(root) / "flyte")
        # The chart makes Flyte's keys in a shell, with the program of the PATH.
        for place in ("bin", "usr/local/bin"):
            (Path(root) / place).mkdir(parents=True)
        shutil.copy2("/bin/busybox", Path(root) / "bin" / "sh")
        (Path(root) / "usr/local/bin/flyte").symlink_to("/flyte")
        made = [f"registry.local/{IMAGE}:1", str(images / f"{IMAGE}.tar"), "65532", "/flyte"]
        subprocess.run(["python3", str(scripts / "mkimage.py"), root, *made], check=True, timeout=120)


def configure(flyte: dict[str, Any], host: str, address: str, projects: list[str]) -> None:
    """Change the values of its chart from the stand-in's: a database, log-in, and all that the stand-in does not have.

    The provider and the database listen at `host`, Flyte at `address`.
    """
    configuration = flyte["configuration"]
    database = {"host": host, "port": 5432, "username": _USER, "password": _PASSWORD, "dbname": "flyte"}
    configuration["database"] = database | {"options": "sslmode=disable"}
    del configuration["inline"]["catalog-cache"]
    # The stand-in knows every project.
    flyte["flyte-core-components"]["admin"] |= {"disableScheduler": False, "seedProjects": projects}
    flyte["deployment"]["image"]["repository"] = f"registry.local/{IMAGE}"
    del flyte["deployment"]["extraEnvVars"]
    own = "flytepropeller"
    configuration["auth"] = {
        "enabled": True,
        "oidc": {"baseUrl": f"http://{host}:{_PROVIDER_PORT}", "clientId": "flyte", "clientSecret": "providers-secret"},
        "internal": {"clientSecret": SECRETS[own], "clientSecretHash": _HASHES[own]},
        "authorizedUris": [f"http://{address}:{HTTP}"],
    }
    client = {
        "id": CLIENT,
        "client_secret": _HASHES[CLIENT],
        "grant_types": ["client_credentials"],
        "response_types": ["token"],
        "scopes": ["all", "offline", "access_token"],
    }
    configuration["inline"]["auth"] = {"appAuth": {"selfAuthServer": {"staticClients": {CLIENT: client}}}}


def client_configuration(address: str, folder: Path) -> dict[str, Any]:
    """The section `admin` of a program that logs in with the client's secret, which a file in `folder` has."""
    secret = folder / "flyte-client-secret"
    secret.touch(0o600)
    secret.write_text(SECRETS[CLIENT])
    return {
        "endpoint": f"dns:///{address}:8089",
        "insecure": True,
        "authType": "ClientSecret",
        "clientId": CLIENT,
        "clientSecretLocation": str(secret),
    }


def client_secret(name: str, namespace: str) -> dict[str, Any]:
    """The manifest of what the chart's own programs log in with."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": {"client_id": CLIENT, "client_secret": SECRETS[CLIENT]},
    }


def install_provider(folder: Path) -> None:
    """The identity provider's package, in an environment of its own."""
    if not (folder / "bin" / "oidc-provider-mock").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", PROVIDER], check=True, timeout=300)


def start_provider(enter: list[str], folder: Path, host: str) -> None:
    """The identity provider at `host`, where `enter` lets a command see it, until `stop_provider`."""
    serve = [*enter, str(folder / "bin" / "oidc-provider-mock"), "--host", host, "--port", str(_PROVIDER_PORT)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(serve, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    (folder / "pid").write_text(str(process.pid))
    ask = [*enter, sys.executable, "-c", f"import socket; socket.create_connection(('{host}', {_PROVIDER_PORT}), 5)"]
    end = time.monotonic() + 30
    while subprocess.run(ask, stderr=subprocess.DEVNULL, timeout=30).returncode:
        if time.monotonic() > end:
            raise subprocess.SubprocessError(f"the identity provider does not start: {(folder / 'log').read_text()}")
        time.sleep(0.2)


def stop_provider(folder: Path) -> None:
    """End it, where there is one, also one that a killed process left."""
    file = folder / "pid"
    if file.exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
        file.unlink()


def start_database(run: Callable[..., object], folder: Path, host: str) -> None:
    """An empty PostgreSQL that listens at `host`, where `run` runs commands, until `stop_database`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.chown(folder, _USER, _USER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(_PASSWORD)
        file.flush()
        shutil.chown(file.name, _USER)
        run(*_as_user("initdb"), "-D", str(folder), "-U", _USER, "-A", "scram-sha-256", "--pwfile", file.name)
    with (folder / "pg_hba.conf").open("a") as rules:
        rules.write("host all all all scram-sha-256\n")
    options = f"-c listen_addresses={host} -c unix_socket_directories={folder}"
    run(*_as_user("pg_ctl"), "-D", str(folder), "-l", str(folder / "log"), "-w", "-o", options, "start")


def back_up_database(run: Callable[..., object], file: Path, host: str) -> None:
    """Write all of Flyte's state to `file`, while it runs."""
    run(*_as_client("pg_dump", host), "--format", "custom", "--file", str(file), "flyte")


def restore_database(run: Callable[..., object], file: Path, host: str) -> None:
    """Lose Flyte's database, and restore it from `file`. Nobody may use it meanwhile."""
    run(*_as_client("dropdb", host), "flyte")
    run(*_as_client("createdb", host), "flyte")
    run(*_as_client("pg_restore", host), "--dbname", "flyte", "--exit-on-error", str(file))


def stop_database(run: Callable[..., object], folder: Path) -> None:
    """End it, where there is one, also one that a killed process left."""
    try:
        if (folder / "postmaster.pid").exists():
            run(*_as_user("pg_ctl"), "-D", str(folder), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_client(program: str, host: str) -> list[str]:
    os.environ["PGPASSWORD"] = _PASSWORD
    return [_program(program), "--host", host, "--username", _USER]


def _as_user(program: str) -> list[str]:
    return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--", _program(program)]


def _program(program: str) -> str:
    # Debian keeps PostgreSQL's programs out of the PATH.
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin")), *os.get_exec_path()]
    found = shutil.which(program, path=os.pathsep.join(map(str, places)))
    if found is None:
        raise FileNotFoundError(f"STRATA_FLYTE needs PostgreSQL, and {program} is not here")
    return found
