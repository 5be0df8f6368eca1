"""A machine whose training runtime is a program that needs no torch, and a cluster that answers what a test puts in."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import yaml
from flyteidl.service import admin_pb2_grpc, auth_pb2_grpc

from strata_platform.backends.flyte import FlyteBackend
from strata_platform.client import Client
from tests.platform.helpers.servers import Admin, Kubernetes, content, kubeconfig


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A working directory where `tasks.runtime` is helpers/fake_runtime.py; names of runs are kept there, too."""
    package = tmp_path / "tasks" / "runtime"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()
    shutil.copy(Path(__file__).parent / "helpers" / "fake_runtime.py", package / "__main__.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def kubernetes(tmp_path, monkeypatch):
    """A server that answers as `content` says, and calls `after` then; `read` has the names of the logs it gave."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kubernetes)
    server.content = content()
    server.after, server.read = lambda: None, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig(server.server_port)))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def admin(tmp_path):
    servicer = Admin()
    server = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    auth_pb2_grpc.add_AuthMetadataServiceServicer_to_server(servicer.metadata, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tmp_path / "flyte.yaml").write_text(f"admin: {{endpoint: 'dns:///127.0.0.1:{port}', insecure: true}}\n")
    servicer.stop = lambda: server.stop(None).wait()
    yield servicer
    servicer.stop()


@pytest.fixture
def client(admin, kubernetes, tmp_path):
    return Client(FlyteBackend(config=str(tmp_path / "flyte.yaml")), poll=0.01)
