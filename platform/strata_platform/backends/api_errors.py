"""Maps errors of Flyte, gRPC and Kubernetes to the exceptions of `strata_platform.errors`; nothing else does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from urllib3.exceptions import HTTPError

from strata_platform.backends.flyte_config import LoginFailed
from strata_platform.errors import BackendError, Refused, RunNotFound, StrataError, Unreachable
from strata_platform.kubernetes_api import ApiError, NoConfiguration

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
    except (ApiError, NoConfiguration, HTTPError, LoginFailed) as error:
        raise translate(error, what) from error
    except _errors_of_grpc() as error:
        raise translate(error, what) from error


def _errors_of_grpc() -> tuple[type[Exception], ...]:
    """Errors of Flyte's client; () where nothing has imported it, as without Flyte, which needs no grpc."""
    grpc = sys.modules.get("grpc")
    return () if grpc is None else (grpc.RpcError,)


def translate(error: Exception, what: str) -> StrataError:
    """The StrataError for an error of Kubernetes or gRPC, with its status, reason and message."""
    if isinstance(error, ApiError):
        return _error(f"Kubernetes refused {what}", error.status, error.reason, str(error))
    if isinstance(error, NoConfiguration):
        text = f"{error}; set KUBECONFIG to the cluster's file"
        return BackendError(f"there is no configuration of Kubernetes {what}: {text}", reason="NoConfiguration")
    if isinstance(error, HTTPError):
        return Unreachable(f"Kubernetes does not answer the request {what}: {error}")
    if isinstance(error, LoginFailed):
        return Refused(f"Flyte asks who you are {what}: {error}", status=401, reason="NotLoggedIn")
    # grpc's errors are calls, which its types do not say.
    call: Any = error
    code = call.code().name
    return _error(f"Flyte refused {what}", _STATUS.get(code, 500), code, call.details() or code)


def _error(what: str, status: int, reason: str, message: str) -> StrataError:
    return _KINDS.get(status, BackendError)(f"{what}: {message}", status=status, reason=reason)
