"""CPU seconds of each command of `strata` against a Flyte and a Kubernetes in this process: user and system time.

    python -m benchmarks.commands [--strata PATH] [--runs 5]

The first column is that of a Flyte that asks nobody who calls, the second of one that gives a token for a secret.
`--strata` names another installation's command, to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import yaml
from flyteidl.core.execution_pb2 import WorkflowExecution
from flyteidl.service import admin_pb2_grpc, auth_pb2_grpc

from tests.platform.helpers.servers import Admin, Kubernetes, Tokens, content, kubeconfig, pod

COMMANDS = {
    "--version": [],
    "spec": ["spec.yaml"],
    "estimate": ["spec.yaml"],
    "submit": ["spec.yaml", "--force"],
    "list": [],
    "get": ["run"],
    "wait": ["done"],
    "logs": ["run"],
    "metrics": ["run"],
    "events": ["run"],
    "outputs": ["done"],
    "cancel": ["ended"],
}
GIVEN = "a-token"
STRATA = Path(sys.executable).with_name("strata").absolute()
RECORD = {"steps": 4, "steps_asked": 4, "train_loss": 1.5, "eval_loss_after": 1.2, "tokens_per_second": 10.0}


TOKENS = {"without authentication": None, "with a secret": GIVEN}


def measure(strata: Path, runs: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Each command with its CPU seconds, the least of `runs`, for each kind of Flyte."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        admin = _serve(folder)
        (folder / "spec.yaml").write_text("name: fresh\n")
        (folder / "record.json").write_text(json.dumps(RECORD | {"restarts": 0}))
        admin.outputs["done"] = {kind: f"file://{folder}/record.json" for kind in ("model", "report", "record")}
        places = {"KUBECONFIG": folder / "kubeconfig", "FLYTECTL_CONFIG": folder / "flyte.yaml"}
        # Bytecode is compiled by the first of the runs.
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment = inherited | {key: str(path) for key, path in places.items()} | {"STRATA_BACKEND": "flyte"}
        for command, arguments in COMMANDS.items():
            found = {}
            for kind, admin.token in TOKENS.items():
                line = [strata, command, *arguments]
                found[kind] = min(_measure(line, folder, environment, admin) for _ in range(runs))
            yield command, found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strata", type=Path, default=STRATA)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    for command, found in measure(asked.strata, asked.runs):
        print(f"{command:<10}" + "".join(f" {seconds:5.2f} s" for seconds in found.values()), flush=True)


def _serve(folder: Path) -> Admin:
    """Start both servers, and write the files that name them."""
    server = _listen(Kubernetes)
    server.content = content() | {"pods": [pod("w0", replica=0)], "logs": {"w0": ["2026-11-22T00:00:00Z hello\n"]}}
    server.after, server.read = lambda: None, []
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig(server.server_port)))
    tokens = _listen(Tokens)
    tokens.token, tokens.secret, tokens.asked = GIVEN, "secret", []
    (folder / "secret").write_text(tokens.secret)
    admin = Admin()
    admin.metadata.token_endpoint = f"http://127.0.0.1:{tokens.server_port}/token"
    admin.active = "v1"
    flyte = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, flyte)
    auth_pb2_grpc.add_AuthMetadataServiceServicer_to_server(admin.metadata, flyte)
    port = flyte.add_insecure_port("127.0.0.1:0")
    flyte.start()
    admin.server = flyte
    login = {"clientId": "me", "clientSecretLocation": str(folder / "secret")}
    known = {"endpoint": f"dns:///127.0.0.1:{port}", "insecure": True, **login}
    (folder / "flyte.yaml").write_text(yaml.safe_dump({"admin": known}))
    return admin


def _listen(handler: type[BaseHTTPRequestHandler]) -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _measure(command: list[str | Path], folder: Path, environment: dict[str, str], admin: Admin) -> float:
    admin.executions.clear()
    for name, phase in (("done", "SUCCEEDED"), ("ended", "FAILED"), ("run", "RUNNING")):
        admin.add(name, WorkflowExecution.Phase.Value(phase))
    before = _seconds()
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    after = _seconds()
    if ended.returncode:
        print(f"{command[1]}: exit code {ended.returncode}: {ended.stderr.strip()}", file=sys.stderr)
    return after - before


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
