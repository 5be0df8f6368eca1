"""The token of somebody who is logged in already, and that of a program with a secret, without importing flytekit.

People who are not logged in yet, and all other ways to log in, are for `flyte_login`, which also tells what failed:
there is no error here.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from urllib.parse import quote_plus, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import grpc
from flyteidl.service import auth_pb2, auth_pb2_grpc

from strata_platform.backends.flyte_config import FlyteConfig

_PERSONS = ("standard", "pkce", "deviceflow")
_PROGRAMS = ("basic", "client_credentials", "clientsecret")
# As flytekit stores tokens.
_KEPT = "access_token"
_SECONDS = 10.0


def token_header(config: FlyteConfig, channel: grpc.Channel) -> tuple[str, str] | None:
    """The header of calls with a token, which may have expired; None if flytekit has to log in."""
    # A secret decides, as it does for flytekit.
    has_secret = config.secret_file or os.environ.get(config.secret_variable or "")
    mode = (_PROGRAMS[0] if has_secret else config.auth_mode or _PERSONS[0]).lower()
    metadata = auth_pb2_grpc.AuthMetadataServiceStub(channel)
    try:
        client_config = metadata.GetPublicClientConfig(auth_pb2.PublicClientAuthConfigRequest(), timeout=_SECONDS)
        if mode in _PERSONS:
            token = _kept(config.endpoint)
        elif mode in _PROGRAMS:
            oauth = metadata.GetOAuth2Metadata(auth_pb2.OAuth2MetadataRequest(), timeout=_SECONDS)
            token = _granted(config, oauth.token_endpoint, list(client_config.scopes), client_config.audience)
        else:
            token = None
    except grpc.RpcError:
        return None
    return (client_config.authorization_metadata_key or "authorization", f"Bearer {token}") if token else None


def _kept(endpoint: str) -> str | None:
    import keyring
    from keyring.errors import KeyringError

    try:
        return keyring.get_password(endpoint, _KEPT)
    except KeyringError:
        return None


def _granted(config: FlyteConfig, endpoint: str, scopes: list[str], audience: str) -> str | None:
    """A new token for a client and its secret, as in RFC 6749, 4.4. None if it is not to be had in this simple way."""
    import urllib3

    secret = _secret(config)
    if not (config.client_id and secret) or config.skip_verify or config.ca_file or _is_behind_proxy(config, endpoint):
        return None
    body = {"grant_type": "client_credentials", "scope": " ".join(config.scopes or scopes)}
    if config.audience or audience:
        body["audience"] = config.audience or audience
    client = base64.b64encode(f"{config.client_id}:{quote_plus(secret)}".encode()).decode()
    try:
        answer = urllib3.PoolManager().request(
            "POST",
            endpoint,
            body=urlencode(body),
            headers={
                "Authorization": f"Basic {client}",
                "Accept": "application/json",
                "Content-Type": "application/x-www-form-urlencoded",
            },
            timeout=_SECONDS,
            retries=False,
            redirect=False,
        )
        token = json.loads(answer.data)["access_token"] if answer.status == 200 else None
    except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError):
        return None
    return token if isinstance(token, str) else None


def _secret(config: FlyteConfig) -> str | None:
    """The secret, where flytekit finds it: in the variable that is named, in the file, or in its own variable."""
    if config.secret_variable and (named := os.environ.get(config.secret_variable)):
        return named
    if config.secret_file:
        try:
            text = Path(config.secret_file).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        return text.strip() if text.endswith("\n") else text
    return config.client_secret


def _is_behind_proxy(config: FlyteConfig, endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    return bool(config.http_proxy) or (parts.scheme in getproxies() and not proxy_bypass(parts.netloc))
