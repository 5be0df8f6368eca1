"""What Flyte and Kubernetes answer when they do not do what they are asked: the one place where that becomes ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from flytekit.exceptions.base import FlyteException
from kubernetes.client import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from strata_platform.errors import BackendError, Refused, RunNotFound, StrataError, Unreachable

# gRPC's codes as HTTP statuses; of the others, 500.
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_KINDS: dict[int, type[StrataError]] = {
    401: Refused,
    403: Refused,
    404: RunNotFound,
    503: Unreachable,
    504: Unreachable,
}


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Raise what goes wrong inside as our errors; `what` is what was tried, as in 'to submit x'."""
    try:
        yield
    except (ApiException, ConfigException, HTTPError, FlyteException, grpc.RpcError) as error:
        raise translate(error, what) from error


def translate(error: Exception, what: str) -> StrataError:
    """The error of our tree for one of Kubernetes', gRPC's or flytekit's, with its status, its reason and its words."""
    if isinstance(error, ApiException):
        return _error(f"Kubernetes refused {what}", int(error.status or 503), error.reason or "Unknown", _body(error))
    if isinstance(error, ConfigException):
        text = f"{error}; set KUBECONFIG to the cluster's file"
        return BackendError(f"no way to Kubernetes is known, {what}: {text}", reason="NoConfiguration")
    if isinstance(error, HTTPError):
        return Unreachable(f"Kubernetes does not answer, {what}: {error}")
    call = _call(error)
    if call is not None:
        code = call.code().name
        return _error(f"Flyte refused {what}", _STATUS.get(code, 500), code, call.details() or code)
    return BackendError(f"Flyte failed {what}: {error}", reason=type(error).__name__)


def _error(what: str, status: int, reason: str, words: str) -> StrataError:
    return _KINDS.get(status, BackendError)(f"{what}: {words}", status=status, reason=reason)


def _call(error: BaseException | None) -> grpc.Call | None:
    """The answer that flytekit's exception is made from."""
    while error is not None:
        if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
            return error
        error = error.__cause__
    return None


def _body(error: ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
