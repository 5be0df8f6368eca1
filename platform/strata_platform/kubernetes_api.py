"""A client of the Kubernetes API that gives and takes plain objects.

The `kubernetes` package imports a class for every kind there is, which takes longer than most commands.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

Object = dict[str, Any]

# Where Kubernetes mounts a pod's own credentials.
_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT = urllib3.Timeout(connect=10.0, read=60.0)
# A log that is followed says nothing for as long as the run does not.
_FOLLOW = urllib3.Timeout(connect=10.0, read=None)


class NoConfiguration(Exception):
    """No kubeconfig, or one that cannot be used."""


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Access:
    """Address and credentials of a cluster."""

    server: str
    ca: bytes | None = None
    """Certificates that sign the server's, in PEM; None for those of this machine."""
    verify: bool = True
    server_name: str | None = None
    proxy: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    certificate: tuple[bytes, bytes] | None = None
    """The client's certificate and key, in PEM."""

    @classmethod
    def of_environment(cls, context: str | None = None) -> Access:
        """Access by the kubeconfig of KUBECONFIG, or of ~/.kube/config; without one, by the pod's own credentials.

        Raises NoConfiguration.
        """
        config = _merged_kubeconfig()
        if config is None and "KUBERNETES_SERVICE_HOST" in os.environ and (_POD / "token").exists():
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            token = (_POD / "token").read_text(encoding="utf-8").strip()
            server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
            return cls(server, (_POD / "ca.crt").read_bytes(), headers=_bearer(token))
        if config is None:
            raise NoConfiguration("there is no kubeconfig")
        return _access(config, context)


def _merged_kubeconfig() -> Object | None:
    """The files of KUBECONFIG as one, of which the first that names something decides; None if there is none."""
    named = os.environ.get("KUBECONFIG")
    paths = [Path(name).expanduser() for name in (named or "~/.kube/config").split(os.pathsep) if name]
    merged: Object = {}
    for path in paths:
        if not path.is_file():
            continue
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise NoConfiguration(f"{path} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise NoConfiguration(f"{path} is not a kubeconfig")
        merged.setdefault("current-context", found.get("current-context"))
        for kind in ("clusters", "contexts", "users"):
            for item in found.get(kind) or []:
                merged.setdefault(kind, {}).setdefault(item["name"], (item.get(kind[:-1]) or {}, path.parent))
    return merged or None


def _access(config: Object, context: str | None) -> Access:
    name = context or config["current-context"]
    named = config.get("contexts", {}).get(name)
    if named is None:
        known = ", ".join(config.get("contexts", {})) or "none"
        raise NoConfiguration(f"there is no context {name!r} in the kubeconfig, only: {known}")
    chosen = named[0]
    try:
        cluster, folder = config["clusters"][chosen["cluster"]]
        server = cluster["server"]
    except KeyError as error:
        raise NoConfiguration(f"context {name!r} names no cluster with a server") from error
    user, home = config.get("users", {}).get(chosen.get("user"), ({}, folder))
    if "exec" in user:
        user = {**user, **_credential(user["exec"], home, cluster)}
    headers: Mapping[str, str] = {}
    token = user.get("token")
    if token is None and "tokenFile" in user:
        token = (home / user["tokenFile"]).read_text(encoding="utf-8").strip()
    if token is not None:
        headers = _bearer(token)
    elif "username" in user:
        pair = f"{user['username']}:{user.get('password', '')}"
        headers = {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    certificate, key = _content(user, "client-certificate", home), _content(user, "client-key", home)
    return Access(
        server=server.rstrip("/"),
        ca=_content(cluster, "certificate-authority", folder),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        server_name=cluster.get("tls-server-name"),
        proxy=cluster.get("proxy-url"),
        headers=headers,
        certificate=(certificate, key) if certificate and key else None,
    )


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _content(values: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    """The bytes of a field `NAME-data`, or of the file that the field NAME names, relative to its kubeconfig."""
    if data := values.get(f"{name}-data"):
        return base64.b64decode(data)
    if not values.get(name):
        return None
    try:
        return Path(folder, values[name]).read_bytes()
    except OSError as error:
        raise NoConfiguration(f"{name} cannot be read: {error}") from error


def _credential(command: Mapping[str, Any], folder: Path, cluster: Mapping[str, Any]) -> Object:
    """What a credential plugin prints, as fields of a user."""
    exec_info: Object = {"apiVersion": command["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    if command.get("provideClusterInfo"):
        exec_info["spec"]["cluster"] = {
            name: cluster[name] for name in ("server", "certificate-authority-data") if name in cluster
        }
    more = {item["name"]: item["value"] for item in command.get("env") or []}
    program = command["command"]
    if os.sep in program:
        program = str(folder / program)
    try:
        ended = subprocess.run(
            [program, *(command.get("args") or [])],
            env=os.environ | more | {"KUBERNETES_EXEC_INFO": json.dumps(exec_info)},
            capture_output=True,
            text=True,
            check=True,
        )
        status = json.loads(ended.stdout)["status"]
    except subprocess.CalledProcessError as error:
        raise NoConfiguration(f"{command['command']} failed: {error.stderr.strip() or error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoConfiguration(f"{command['command']} gave no credential: {error}") from error
    found = {"token": status.get("token")}
    for name, key in (("client-certificate", "clientCertificateData"), ("client-key", "clientKeyData")):
        if status.get(key):
            found[f"{name}-data"] = base64.b64encode(status[key].encode()).decode()
    return {name: value for name, value in found.items() if value}


class KubernetesApi:
    """Requests to an API server. Methods raise ApiError, NoConfiguration, and urllib3's HTTPError."""

    def __init__(self, access: Access) -> None:
        self.access = access

    @cached_property
    def _pool(self) -> urllib3.PoolManager:
        more: dict[str, Any] = {}
        if self.access.server.startswith("https:"):
            more["ssl_context"] = _tls(self.access)
            if self.access.server_name:
                more |= {"server_hostname": self.access.server_name, "assert_hostname": self.access.server_name}
        # A GET that finds no connection, or a lost one, is sent again.
        retries = urllib3.Retry(total=3, backoff_factor=0.2, status=0, redirect=0, allowed_methods={"GET"})
        common = {"headers": dict(self.access.headers), "retries": retries, "timeout": _TIMEOUT, **more}
        # Threads follow the logs of several pods.
        common["maxsize"] = 16
        if self.access.proxy:
            return urllib3.ProxyManager(self.access.proxy, **common)
        return urllib3.PoolManager(**common)

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> urllib3.BaseHTTPResponse:
        """Send a request and return the whole response. The body of a PATCH is a merge patch."""
        return self._send(method, path, body, query)

    def get(self, path: str, **query: Any) -> Object:
        """The object at `path`."""
        found: Object = json.loads(self._send("GET", path, None, query).data)
        return found

    def account(self) -> str:
        """The name that Kubernetes knows this client by."""
        group = "authentication.k8s.io/v1"
        asked = {"apiVersion": group, "kind": "SelfSubjectReview"}
        answer = self.request("POST", f"/apis/{group}/selfsubjectreviews", asked)
        return str(json.loads(answer.data)["status"]["userInfo"]["username"])

    def items(self, path: str, **query: Any) -> list[Object]:
        """The items of the list at `path`, whatever the size of a page."""
        found: list[Object] = []
        page: Object = {"limit": 500, **query}
        while True:
            answer = self.get(path, **page)
            found += answer["items"] or []
            following = (answer.get("metadata") or {}).get("continue")
            if not following:
                return found
            page["continue"] = following

    def lines(self, path: str, *, follow: bool, **query: Any) -> Iterator[bytes]:
        """The lines of a text, as they come."""
        timeout = _FOLLOW if follow else _TIMEOUT
        query |= {"follow": "true"} if follow else {}
        answer = self._send("GET", path, None, query, preload_content=False, timeout=timeout)
        try:
            rest = b""
            for part in answer.stream(1 << 16):
                *lines, rest = (rest + part).split(b"\n")
                yield from lines
            if rest:
                yield rest
        finally:
            answer.close()

    def _send(
        self, method: str, path: str, body: Any, query: Mapping[str, Any], **more: Any
    ) -> urllib3.BaseHTTPResponse:
        wanted = {name: value for name, value in query.items() if value not in (None, "")}
        url = f"{self.access.server}{path}{'?' if wanted else ''}{urlencode(wanted)}"
        headers = {**self.access.headers, "Accept": "application/json, */*"}
        if body is not None:
            more["body"] = json.dumps(body)
            headers["Content-Type"] = f"application/{'merge-patch+' if method == 'PATCH' else ''}json"
        answer = self._pool.request(method, url, headers=headers, **more)
        if answer.status >= 400:
            reason = answer.reason or "Unknown"
            raise ApiError(answer.status, reason, _message(answer.data) or reason)
        return answer


def items_if_installed(api: KubernetesApi, path: str, **query: Any) -> list[Object]:
    """The items of a kind; none if the cluster does not have the kind."""
    try:
        return api.items(path, **query)
    except ApiError as error:
        if error.status != 404:
            raise
        return []


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return ""


def _tls(access: Access) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=access.ca.decode() if access.ca else None)
    if not access.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if access.certificate is not None:
        # OpenSSL reads a key from a file alone; it is gone when this returns.
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write(b"\n".join(access.certificate))
            file.flush()
            context.load_cert_chain(file.name)
    return context
