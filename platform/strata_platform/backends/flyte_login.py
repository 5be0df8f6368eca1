"""Logs in to a Flyte that asks who calls, with flytekit's authenticators.

They keep tokens in the keyring and renew them. flytekit takes a second to import: only a log-in imports it.
"""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from typing import TYPE_CHECKING, Any

import grpc

from strata_platform.backends.flyte_config import FlyteConfig, LoginFailed

if TYPE_CHECKING:
    from flytekit.configuration import PlatformConfig

_WAYS = (
    "in the file of FLYTECTL_CONFIG, or in ~/.flyte/config.yaml, set admin.authType to Pkce (a browser on this "
    "machine), DeviceFlow (a browser anywhere, if the identity provider offers it), or ClientSecret with clientId and "
    "clientSecretLocation or clientSecretEnvVar (no person)"
)


def logged_in_channel(config: FlyteConfig, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """A channel whose calls have the token of whoever calls. Raises LoginFailed if no way to log in is configured."""
    from flytekit.clients.auth.auth_client import OAuthCallbackHandler
    from flytekit.clients.auth_helper import (
        get_channel,
        upgrade_channel_to_authenticated,
        upgrade_channel_to_proxy_authenticated,
    )
    from flytekit.configuration import PlatformConfig

    # It would write the address that the browser comes back to, which has the code for a token, to standard error.
    OAuthCallbackHandler.log_message = lambda *_: None
    _fix_device_flow()
    with login_errors_explained():
        platform = PlatformConfig.auto(config.file)
        _reject_unanswered_browser(platform)
        channel = upgrade_channel_to_proxy_authenticated(platform, get_channel(platform, options=list(options)))
        return upgrade_channel_to_authenticated(platform, channel)


@contextmanager
def login_errors_explained() -> Iterator[None]:
    """Raise errors of flytekit's authenticators as LoginFailed; their output goes to standard error."""
    try:
        # `--format json` has standard output for itself.
        with redirect_stdout(sys.stderr):
            yield
    except (RuntimeError, ValueError, OSError) as error:
        # A server that rejects the login, a configuration without a client, a missing server or file.
        raise LoginFailed(f"{error}; {_WAYS}") from error


def _fix_device_flow() -> None:
    """Mend what flytekit 1.16 does at two answers of a provider, where it raises KeyError and TypeError."""
    from flytekit.clients.auth import token_client

    read = token_client.DeviceCodeResponse.from_json_response
    if hasattr(read, "__wrapped__"):
        return

    @wraps(read)
    def with_interval(answer: dict[str, Any]) -> token_client.DeviceCodeResponse:
        # RFC 8628, 3.2: a provider may leave it out, and means 5 seconds.
        return read({"interval": 5} | answer)

    token_client.DeviceCodeResponse.from_json_response = with_interval
    # Of a log-in that was refused: a record with an argument that its text has no place for. The error follows.
    token_client.logger.addFilter(lambda record: record.msg != "Authentication attempt failed: ")


def _reject_unanswered_browser(platform: PlatformConfig) -> None:
    """Reject a log-in that would wait for ever: flytekit waits for the answer of a browser without a limit."""
    from flytekit.clients.auth.keyring import KeyringStore
    from flytekit.configuration import AuthType

    mode = platform.auth_mode
    name = mode.name if isinstance(mode, AuthType) else str(mode).upper()
    if name not in (AuthType.STANDARD.name, AuthType.PKCE.name) or KeyringStore.retrieve(platform.endpoint):
        return
    try:
        webbrowser.get()
    except webbrowser.Error as error:
        # A person at a terminal can open the link that flytekit prints.
        if not sys.stdin.isatty():
            raise LoginFailed(f"nobody is logged in, and this machine has no browser; {_WAYS}") from error
