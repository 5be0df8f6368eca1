"""A server that generates for a run with the weights that it is sent: `python -m tasks.runtime.generation.server`.

    GET  /health     200 while it works, without a secret; for probes
    POST /session    the model, and which process asks: the newest process of a run has the server
    POST /weights    a transfer begins; the answer is two lines of JSON: where it takes place, and how it ended
    POST /generate   answers to prompts

It serves one run; another run is refused and needs its own server. If its engine fails, the server exits with code 1,
so that its supervisor starts it again; the run then sends its weights again.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread, Timer
from typing import Any, NamedTuple
from uuid import uuid4

import torch.distributed as dist

from strata_platform.outcomes import BAD_INPUT, PREEMPTED
from tasks.runtime.generation.generator import Request, Sample, Sampling
from tasks.runtime.generation.served_engines import LoadingFailed, ServedEmbedded, ServedEngine, ServedVllm
from tasks.runtime.generation.serving import (
    LOOPBACK,
    PORT,
    ServedModel,
    is_open,
    requests_from_json,
    samples_to_json,
    sampling_from_json,
    shared_token,
)
from tasks.runtime.generation.vllm_engine import require_vllm
from tasks.runtime.generation.weight_stream import GroupAddress, have_own_gpus, watched_sender

log = logging.getLogger(__name__)

MakeEngine = Callable[[ServedModel, Path], ServedEngine]
# Of a request: a tokenizer's files, or the prompts of a step.
_MAX_BODY = 1 << 28
_SKIPPED = 1 << 16
# For a client that stops in the middle of a request; and for one, in all, that has not stated the secret.
_SOCKET_SECONDS = 600.0
_UNKNOWN_SECONDS = 10.0


class Refused(Exception):
    """A rejected request: its status, what the client may do, and why."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Job:
    """A request for answers, which is answered together with those of the same `terms`."""

    def __init__(self, requests: list[Request], sampling: Sampling, version: int, key: str) -> None:
        self.requests, self.terms = requests, (sampling, version, key)
        self.samples: list[Sample] | None = None


class _Served(NamedTuple):
    model: ServedModel
    engine: ServedEngine


class GenerationServer(ThreadingHTTPServer):
    """The server; `serve_forever`, then `close`.

    make: builds the engine called `engine` when a run has told its model. weights_port: of the store that the members
    of a transfer meet at; 0 for a free one. token: the secret that requests have to state, or "".
    """

    daemon_threads = True
    # A second server on the port is an error, not a twin that gets half of the requests.
    allow_reuse_port = False

    def __init__(
        self, host: str, port: int, make: MakeEngine, *, engine: str, weights_port: int = 0, token: str = ""
    ) -> None:
        super().__init__((host, port), _Handler)
        self.token, self._make, self._engine_name = token, make, engine
        self._folder = tempfile.TemporaryDirectory()
        self._host = host
        listening = socket.create_server((host, weights_port))
        self._weights_port = listening.getsockname()[1]
        # The default would listen on every address.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            self._weights_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._lock = Lock()
        self._served: _Served | None = None
        self._session = ""
        self._version: int | None = None
        self._waiting: list[_Job] = []
        self.failed = ""
        """How the engine failed; "" while it has not."""

    def open_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Serve the process with `key` from now on. Returns the version of its weights, None if there are none.

        Keys are in the order in which processes have started.
        """
        model, key = ServedModel.from_json(asked["model"]), str(asked["key"])
        with self._lock:
            self._require_working()
            if model.engine != self._engine_name:
                raise Refused(
                    HTTPStatus.CONFLICT,
                    "other_model",
                    f"the server runs the engine '{self._engine_name}', and objective.generation.engine is "
                    f"'{model.engine}'; set one to the other",
                )
            if self._served is None:
                model.write(Path(self._folder.name))
                self._served = _Served(model, self._guarded(lambda: self._make(model, Path(self._folder.name))))
                log.info("serving run %s with %s", model.run, self._engine_name)
            known = self._served.model
            if known != model:
                what = f"run {known.run!r}" if known.run != model.run else "the run with other settings"
                raise Refused(
                    HTTPStatus.CONFLICT,
                    "other_model",
                    f"the server already serves {what}, and one server serves one run; start it again, or another one",
                )
            self._require_newest(key)
            if key != self._session:
                self._session, self._version = key, None
            return {"weights": self._version}

    def receive(
        self,
        asked: dict[str, Any],
        tell: Callable[[dict[str, Any]], None],
        *,
        is_there: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Get the weights of `version`, unless they are here. `tell` gets where the transfer takes place, or None.

        is_there: whether the process that sends them still is.
        """
        with self._lock:
            served, version = self._require_session(asked), int(asked["version"])
            if self._version == version:
                tell({"group": None})
                return {"weights": version}
            # Those of a transfer that breaks off are no weights of any step.
            self._version = None
            size = served.engine.receivers + 1
            nccl = asked.get("device") == "cuda" and have_own_gpus(served.engine.receivers, asked.get("gpus", []))
            backend = "nccl" if nccl else "gloo"
            prefix = uuid4().hex
            tell({"group": {"port": self._weights_port, "prefix": prefix, "size": size, "backend": backend}})
            here = "127.0.0.1" if self._host == "0.0.0.0" else self._host  # noqa: S104
            own = GroupAddress(here, self._weights_port, prefix, size, backend, loopback=self._host in LOOPBACK)
            try:
                with watched_sender(self._store, prefix, is_there):
                    served.engine.receive(own)
            except Exception as error:
                failure = LoadingFailed.of(error)
                if failure.code == "failed":
                    return {"code": "failed", "error": self._fail(error, str(failure))}
                # Broken: the process that trains was killed, or the network failed. The next transfer is another one.
                log.warning("the weights are not loaded", exc_info=error)
                return {"code": failure.code, "error": str(failure)}
            self._version = version
            return {"weights": version}

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer requests, together with those of the run's other processes that wait meanwhile."""
        sampling, version = sampling_from_json(asked["sampling"]), int(asked["version"])
        served = self._require_session(asked)
        requests = requests_from_json(asked["requests"], served.model.length)
        job = _Job(requests, sampling, version, asked["key"])
        self._waiting.append(job)
        with self._lock:
            if job.samples is None:
                try:
                    self._require_session(asked)
                    self._require_weights(version)
                    jobs = [one for one in self._waiting if one.terms == job.terms]
                    together = [request for one in jobs for request in one.requests]
                    samples = self._guarded(lambda: served.engine.generate(together, sampling))
                    for one in jobs:
                        one.samples, samples = samples[: len(one.requests)], samples[len(one.requests) :]
                finally:
                    # In place: others append without the lock.
                    for one in [one for one in self._waiting if one is job or one.samples is not None]:
                        self._waiting.remove(one)
        assert job.samples is not None
        return {"samples": samples_to_json(job.samples)}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has disconnected is not an error of the server."""
        if isinstance(sys.exception(), OSError):
            log.warning("a client has disconnected: %s", sys.exception())
        else:
            log.exception("a request failed")

    def close(self) -> None:
        """Stop listening, and remove the files that were written."""
        self.server_close()
        del self._store
        self._folder.cleanup()

    def _require_session(self, asked: dict[str, Any]) -> _Served:
        self._require_working()
        key = str(asked["key"])
        self._require_newest(key)
        # A newer process has a session after it has asked for one, also where an older one was faster after a restart.
        if self._served is None or key != self._session:
            raise Refused(HTTPStatus.CONFLICT, "no_session", "the server was started again since")
        return self._served

    def _require_newest(self, key: str) -> None:
        if key < self._session:
            raise Refused(HTTPStatus.CONFLICT, "taken", "another process of this run has taken the server over")

    def _require_weights(self, version: int) -> None:
        if self._version != version:
            raise Refused(HTTPStatus.CONFLICT, "no_session", f"the server lacks the weights {version}")

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Run `work`, whose errors mean that the engine is broken or cannot be built."""
        try:
            return work()
        except Exception as error:
            message = self._fail(error, f"{type(error).__name__}: {error}")
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "failed", message) from error

    def _fail(self, error: Exception, message: str) -> str:
        """End the server after an error that broke the engine. Returns `message`, which the client gets."""
        self.failed = message
        log.error("the engine failed, and the server ends", exc_info=error)
        Thread(target=self.shutdown, daemon=True).start()
        return self.failed

    def _require_working(self) -> None:
        """Reject waiting requests after the engine has failed."""
        if self.failed:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "failed", self.failed)


class _Handler(BaseHTTPRequestHandler):
    server: GenerationServer
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_SECONDS

    def setup(self) -> None:
        """Accept an unknown client; its connection has a time limit, however slowly it sends."""
        super().setup()
        self._unknown = Timer(_UNKNOWN_SECONDS, self._hang_up)
        self._unknown.daemon = True
        self._unknown.start()

    def finish(self) -> None:
        """End the connection."""
        self._unknown.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answer a probe."""
        if self.path != "/health":
            return self._answer(HTTPStatus.NOT_FOUND, {"code": "unknown", "error": f"there is no {self.path}"})
        status = HTTPStatus.SERVICE_UNAVAILABLE if self.server.failed else HTTPStatus.OK
        self._answer(status, {"status": self.server.failed or "ok"})

    def do_POST(self) -> None:
        """Answer a request of a run."""
        known = {"/session": self.server.open_session, "/generate": self.server.generate, "/weights": None}
        try:
            given = self.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
                self._skip_body()
                raise Refused(HTTPStatus.UNAUTHORIZED, "token", "the server has another secret")
            self._unknown.cancel()
            if self.path not in known:
                self._skip_body()
                raise Refused(HTTPStatus.NOT_FOUND, "unknown", f"there is no {self.path}")
            asked = self._body()
            work = known[self.path]
            try:
                if work is None:
                    return self._transfer(asked)
                answer = work(asked)
            except (ValueError, KeyError, TypeError) as error:
                raise Refused(HTTPStatus.BAD_REQUEST, "bad_request", f"{type(error).__name__}: {error}") from error
        except Refused as refused:
            return self._answer(refused.status, {"code": refused.code, "error": str(refused)})
        self._answer(HTTPStatus.OK, answer)

    def _transfer(self, asked: dict[str, Any]) -> None:
        def tell(line: dict[str, Any]) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/jsonl")
            # The end of the second line is that of the connection.
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            self.wfile.write(json.dumps(line).encode() + b"\n")
            self.wfile.flush()

        ended = self.server.receive(asked, tell, is_there=lambda: is_open(self.connection))
        self.wfile.write(json.dumps(ended).encode() + b"\n")

    def _size(self) -> int:
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            size = -1
        if not 0 <= size <= _MAX_BODY:
            self.close_connection = True
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "bad_request", f"a request has 0 to {_MAX_BODY} bytes")
        return size

    def _skip_body(self) -> None:
        """Read and drop the body: closing the connection before would lose the answer, too."""
        left = self._size()
        while left and (read := self.rfile.read(min(left, _SKIPPED))):
            left -= len(read)

    def _body(self) -> dict[str, Any]:
        try:
            body = json.loads(self.rfile.read(self._size()))
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "bad_request", f"no JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "bad_request", "no JSON object")
        return body

    def _answer(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request."""


def engine_maker(engine: str, tensor_parallel: int, memory: float) -> MakeEngine:
    """What builds the engine of that name."""
    if engine == "embedded":
        return ServedEmbedded
    return lambda model, folder: ServedVllm(model, folder, tensor_parallel=tensor_parallel, memory=memory)


def main() -> int:
    """Serve until SIGTERM. Exit codes: 2 for a setting that cannot be used, 1 after the engine failed."""
    from tasks.runtime.process.log import configure_logging

    parser = argparse.ArgumentParser(prog="python -m tasks.runtime.generation.server", description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for other machines")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--weights-port", type=int, default=PORT + 1, help="where transfers of weights meet")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the model, with vllm")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of each GPU, with vllm")
    given = parser.parse_args()
    if given.engine == "embedded" and given.tensor_parallel > 1:
        parser.error(f"--tensor-parallel {given.tensor_parallel} needs --engine vllm")
    configure_logging()
    try:
        if given.engine == "vllm":
            require_vllm()
        make = engine_maker(given.engine, given.tensor_parallel, given.gpu_memory_utilization)
        server = GenerationServer(
            given.host, given.port, make,
            engine=given.engine, weights_port=given.weights_port, token=shared_token(given.host),
        )  # fmt: skip
    except ValueError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT.exit_code
    except OSError as error:
        print(
            f"cannot listen on --host {given.host} with --port {given.port} and --weights-port {given.weights_port}: "
            f"{error}; choose others",
            file=sys.stderr,
        )
        return BAD_INPUT.exit_code
    log.info("listening on %s:%d, weights on %d", given.host, given.port, given.weights_port)
    # The first process of a container ignores it by default.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(PREEMPTED.exit_code))
    try:
        server.serve_forever()
    finally:
        server.close()
    return 1


if __name__ == "__main__":
    sys.exit(main())
