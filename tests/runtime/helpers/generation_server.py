"""A server of generation in a thread or in a process, and its clients."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import torch

from tasks.runtime.generation.remote_engine import RemoteGenerator
from tasks.runtime.generation.served_engines import ServedEmbedded
from tasks.runtime.generation.server import GenerationServer
from tasks.runtime.generation.weight_stream import GroupAddress, WeightGroup
from tasks.runtime.process.ranks import Processes
from tests.runtime.generation.test_embedded import ids
from tests.runtime.generation.test_vllm_engine import words
from tests.runtime.helpers.free_port import free_port


@contextmanager
def serving(make=ServedEmbedded, *, port=0, engine="embedded", token=""):
    """A server in a thread; its address."""
    server = GenerationServer("127.0.0.1", port, make, engine=engine, token=token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.close()


def client(model, server, **options):
    address = server if isinstance(server, str) else f"127.0.0.1:{server.server_port}"
    given = {
        "address": address, "run": "a", "engine": "embedded", "dtype": torch.float32, "seed": 1, "temperature": 1.3,
        "length": 64, "batch_size": 8, "pad_token_id": 0, "patience": 60.0, **options,
    }  # fmt: skip
    return RemoteGenerator(model, words(model.config.vocab_size), Processes(), **given)


def learn(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter)


def require_same(found, expected):
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.log_probs, other.log_probs) and one.finished == other.finished


def meeting(size=2):
    """The address of a group of this machine, and the store that its members meet at."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return GroupAddress("127.0.0.1", store.port, "a", size, "gloo", loopback=True), store


@contextmanager
def transfer(made, version):
    """A group to send the weights `version` in. It breaks off at the end of the block, and the server has noticed."""
    made._version = version
    connection = made._connection()
    response = made._request(connection, "/weights", {"version": version, "device": "cpu"})
    address = json.loads(response.readline())["group"]
    yield (group := WeightGroup(GroupAddress(host="127.0.0.1", loopback=True, **address), 0, torch.device("cpu")))
    # Its connections end with it.
    group._group = None
    assert json.loads(response.readline())["code"] == "broken"
    connection.close()


MODEL = {
    "run": "a", "engine": "embedded", "files": {}, "dtype": "float32", "seed": 1, "temperature": 1.0, "length": 64,
    "batch_size": 8, "pad_token_id": 0,
}  # fmt: skip


@contextmanager
def started(*options):
    """The server as a user starts it: its address, and the process."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "tasks.runtime.generation.server", "--port", str(ports[0])]
    process = subprocess.Popen([*command, "--weights-port", str(ports[1]), *options])
    try:
        yield f"127.0.0.1:{ports[0]}", process
    finally:
        process.kill()
        process.wait()
