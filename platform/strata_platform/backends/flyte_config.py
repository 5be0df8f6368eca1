"""Which Flyte, by the file and the variables that pyflyte and flytectl read, without importing flytekit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from strata_platform.errors import BackendError

# Fields, with their environment variables and their places in a YAML file, as in flytekit.configuration.internal.
_FIELDS = {
    "endpoint": ("FLYTE_PLATFORM_URL", "admin.endpoint"),
    "insecure": ("FLYTE_PLATFORM_INSECURE", "admin.insecure"),
    "skip_verify": ("FLYTE_PLATFORM_INSECURE_SKIP_VERIFY", "admin.insecureSkipVerify"),
    "ca_file": ("FLYTE_PLATFORM_CA_CERT_FILE_PATH", "admin.caCertFilePath"),
    "console": ("FLYTE_PLATFORM_CONSOLE_ENDPOINT", "console.endpoint"),
    "proxied": ("FLYTE_CREDENTIALS_PROXY_COMMAND", "admin.proxyCommand"),
    "http_proxy": ("FLYTE_PLATFORM_HTTP_PROXY_URL", "admin.httpProxyURL"),
    "auth_mode": ("FLYTE_CREDENTIALS_AUTH_MODE", "admin.authType"),
    "client_id": ("FLYTE_CREDENTIALS_CLIENT_ID", "admin.clientId"),
    # Not in a YAML file.
    "client_secret": ("FLYTE_CREDENTIALS_CLIENT_SECRET", ""),
    "secret_file": ("FLYTE_CREDENTIALS_CLIENT_SECRET_LOCATION", "admin.clientSecretLocation"),
    "secret_variable": ("FLYTE_CREDENTIALS_CLIENT_SECRET_ENV_VAR", "admin.clientSecretEnvVar"),
    "scopes": ("FLYTE_CREDENTIALS_SCOPES", "admin.scopes"),
    "audience": ("FLYTE_CREDENTIALS_AUDIENCE", "admin.audience"),
    "store_endpoint": ("FLYTE_AWS_ENDPOINT", "storage.connection.endpoint"),
    "store_key": ("FLYTE_AWS_ACCESS_KEY_ID", "storage.connection.access-key"),
    "store_secret": ("FLYTE_AWS_SECRET_ACCESS_KEY", "storage.connection.secret-key"),
}
_FLAGS = ("insecure", "skip_verify", "proxied")
_OFF = ("", "false", "0", "off", "no")


class LoginFailed(Exception):
    """Flyte asks who calls, and no token could be had."""


@dataclass(frozen=True)
class FlyteConfig:
    """Address of Flyte, and of the store of its outputs where the machine has no other access to that."""

    file: str | None = None
    """The file that was read."""
    endpoint: str = "localhost:30080"
    insecure: bool = False
    skip_verify: bool = False
    ca_file: str | None = None
    console: str | None = None
    proxied: bool = False
    """Whether a proxy in front of Flyte asks for a token of its own."""
    http_proxy: str | None = None
    auth_mode: str | None = None
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    secret_variable: str | None = None
    """Of a program's secret: the environment variable that has it."""
    scopes: tuple[str, ...] = ()
    audience: str | None = None
    store_endpoint: str | None = None
    store_key: str | None = None
    store_secret: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, file: str | None = None) -> FlyteConfig:
        """The configuration in `file`, or in the first of the places where Flyte's own clients look.

        Raises BackendError if the file cannot be read: those clients would silently use this machine instead.
        """
        named = file or os.environ.get("FLYTECTL_CONFIG")
        home = Path.home() / ".flyte"
        places = [named] if named else [Path("flytekit.config"), home / "config", home / "config.yaml"]
        path = next((Path(place) for place in places if named or Path(place).exists()), None)
        found = {} if path is None else _values(path)
        given = {field: os.environ.get(variable, found.get(place)) for field, (variable, place) in _FIELDS.items()}
        values: dict[str, Any] = {field: value for field, value in given.items() if value not in (None, "")}
        for flag in _FLAGS:
            if flag in values:
                values[flag] = str(values[flag]).lower() not in _OFF
        if "scopes" in values:
            scopes = values["scopes"]
            values["scopes"] = tuple(scopes.split(",") if isinstance(scopes, str) else scopes)
        if "endpoint" in values:
            values["endpoint"] = str(values["endpoint"]).replace("dns:///", "")
        return cls(file=None if path is None else str(path), **values)

    @property
    def console_url(self) -> str:
        """Address of Flyte's console."""
        return self.console or f"{'http' if self.insecure else 'https'}://{self.endpoint}"


def _values(path: Path) -> Mapping[str, Any]:
    """The values in a file, by the places of `_FIELDS`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else _sections(text)
        if not isinstance(content, dict):
            raise ValueError("it has no fields")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BackendError(
            f"Flyte's configuration {path} cannot be read: {error}; write the file, or set FLYTECTL_CONFIG to another",
            reason="NoConfiguration",
        ) from error
    found: dict[str, Any] = {}
    for _, place in _FIELDS.values():
        value: Any = content
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        found[place] = value
    return found


def _sections(text: str) -> dict[str, Any]:
    """An INI file of flytekit's as the fields of a YAML file. Its options are named as the environment variables."""
    import configparser

    parser = configparser.ConfigParser()
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise ValueError(str(error)) from error
    content: dict[str, Any] = {}
    for variable, place in _FIELDS.values():
        section, _, option = variable.removeprefix("FLYTE_").lower().partition("_")
        value = parser.get(section, option, fallback=None)
        part = content
        *outer, last = place.split(".")
        for key in outer:
            part = part.setdefault(key, {})
        part[last] = value
    return content
