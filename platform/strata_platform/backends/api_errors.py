"""Maps errors of Flyte, gRPC and Kubernetes to the exceptions of `strata_platform.errors`; nothing else does."""

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

# gRPC codes as HTTP statuses; any other code is 500.
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
    """Translate the errors of the block; `what` completes the sentence "Flyte refused", as in "to submit x"."""
    try:
        yield
    except (ApiException, ConfigException, HTTPError, FlyteException, grpc.RpcError) as error:
        raise translate(error, what) from error


def translate(error: Exception, what: str) -> StrataError:
    """The StrataError for an error of Kubernetes, gRPC or flytekit, with its status, reason and message."""
    if isinstance(error, ApiException):
        return _error(f"Kubernetes refused {what}", int(error.status or 503), error.reason or "Unknown", _body(error))
    if isinstance(error, ConfigException):
        text = f"{error}; set KUBECONFIG to the cluster's file"
        return BackendError(f"there is no configuration of Kubernetes {what}: {text}", reason="NoConfiguration")
    if isinstance(error, HTTPError):
        return Unreachable(f"Kubernetes does not answer the request {what}: {error}")
    call = _call(error)
    if call is not None:
        code = call.code().name
        return _error(f"Flyte refused {what}", _STATUS.get(code, 500), code, call.details() or code)
    return BackendError(f"Flyte failed {what}: {error}", reason=type(error).__name__)


def _error(what: str, status: int, reason: str, message: str) -> StrataError:
    return _KINDS.get(status, BackendError)(f"{what}: {message}", status=status, reason=reason)


def _call(error: BaseException | None) -> grpc.Call | None:
    """The gRPC call that caused flytekit's exception, if one did."""
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
