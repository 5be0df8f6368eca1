"""Which version of the workflow a run is submitted to.

A release is what somebody activated: everybody's default. A working copy is registered under a version that is derived
from its content, so nobody takes another one's by accident, and an unchanged one is registered once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version as version_of_package
from pathlib import Path

import grpc
from flyteidl.core import identifier_pb2

from strata_platform.backends.api_errors import translated_errors
from strata_platform.backends.flyte_admin import FlyteAdmin
from strata_platform.errors import BackendError
from strata_platform.owner import this_user

log = logging.getLogger(__name__)

WORKFLOW = "workflows.finetune.finetune"
_FILE = Path("workflows") / "finetune.py"
# Of the code in the image, which has it compiled, so that no pod fetches and unpacks it.
_RELEASE = "pyflyte register --copy none --image IMAGE --version VERSION --activate-launchplans workflows"
# What no package of the code has, where there is no git to say so.
_LEFT_OUT = frozenset({".git", ".venv", "__pycache__", "out", "node_modules"})


class Registration:
    """Finds the registered workflow, or registers the working copy `source` to run in `image`."""

    def __init__(self, admin: FlyteAdmin, *, image: str | None, version: str | None, source: Path) -> None:
        self._admin, self._image, self._version, self._source = admin, image, version, source

    def launch_plan(self) -> identifier_pb2.Identifier:
        """The launch plan to start. Raises BackendError if there is none."""
        if self._image:
            return self._working_copy(self._image)
        where = f"{self._admin.project}-{self._admin.domain}"
        if self._version:
            found = self._find(self._version)
            if found is None:
                raise _not_registered(
                    f"{WORKFLOW} has no version {self._version!r} in {where}; name another (--version), or the image "
                    "that your working copy runs in (--image)"
                )
            return found
        with translated_errors(f"to look for the release of {WORKFLOW}"):
            try:
                return self._admin.active_launch_plan(WORKFLOW).id
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
        raise _not_registered(
            f"no release of {WORKFLOW} is active in {where}; register your working copy with the image that it runs in "
            f"(--image), name a version (--version), or have the platform team release one: {_RELEASE}"
        )

    def _find(self, version: str) -> identifier_pb2.Identifier | None:
        with translated_errors(f"to look for version {version} of {WORKFLOW}"):
            try:
                return self._admin.launch_plan(WORKFLOW, version).id
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
        return None

    def _working_copy(self, image: str) -> identifier_pb2.Identifier:
        if not (self._source / _FILE).is_file():
            raise BackendError(
                f"{self._source.absolute()} has no {_FILE} to register; start in the project's folder, or leave out "
                "the image to take the release of the cluster"
            )
        version = f"{this_user()}-{digest(self._source, image)}"
        found = self._find(version)
        if found is None:
            self._register(version, image)
            found = self._find(version)
            assert found is not None
        return found

    def _register(self, version: str, image: str) -> None:
        pyflyte = [str(Path(sys.executable).with_name("pyflyte"))]
        if self._admin.config.file:
            pyflyte += ["--config", str(Path(self._admin.config.file).absolute())]
        place = ["--project", self._admin.project, "--domain", self._admin.domain, "--version", version]
        # The working directory of the image, as `pyflyte run` uses; the default of `pyflyte register` is /root.
        code = ["--copy", "all", "--destination-dir", ".", "--image", image, str(_FILE)]
        command = [*pyflyte, "register", *place, *code]
        ended = subprocess.run(command, cwd=self._source, capture_output=True, text=True)
        if ended.returncode:
            raise BackendError(f"the workflow could not be registered:\n{(ended.stdout + ended.stderr)[-2000:]}")


def digest(source: Path, image: str) -> str:
    """A name for the content of a working copy, as it is registered to run in `image`."""
    known = hashlib.sha256()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for part in (image, python, version_of_package("flytekit")):
        known.update(f"{part}\0".encode())
    for path in sorted(_files(source)):
        file = source / path
        if file.is_file():
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            known.update(f"{path}\0{os.access(file, os.X_OK)}\0{content}\0".encode())
    return known.hexdigest()[:16]


def _files(source: Path) -> Iterator[str]:
    """Files that may be packaged: those that git does not ignore, or without git all but outputs and environments."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(git, cwd=source, capture_output=True, text=True)
    except FileNotFoundError:
        listed = None
    tracked = set(listed.stdout.split("\0")) if listed is not None and listed.returncode == 0 else set()
    # A folder that a repository around it ignores lists nothing.
    if str(_FILE) in tracked:
        yield from filter(None, tracked)
        return
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (str(Path(folder, name).relative_to(source)) for name in files)


def _not_registered(message: str) -> BackendError:
    return BackendError(message, status=404, reason="NotRegistered")
