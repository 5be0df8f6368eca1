"""A machine whose training runtime is a program that needs no torch."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A working directory where `tasks.runtime` is helpers/fake_runtime.py; names of runs are kept there, too."""
    package = tmp_path / "tasks" / "runtime"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()
    shutil.copy(Path(__file__).parent / "helpers" / "fake_runtime.py", package / "__main__.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path
