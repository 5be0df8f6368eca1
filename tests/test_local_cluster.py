"""What the scripts of the tests' cluster are told. The cluster itself is tested by tests/e2e."""

import signal

import pytest

from tests.e2e.helpers import local_cluster


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A folder of scripts, and a cluster below `tmp_path` alone."""
    monkeypatch.setattr(local_cluster, "SCRIPTS", tmp_path / "scripts")
    for name in ("STATE", "RUNS", "DATABASE", "PROVIDER"):
        monkeypatch.setattr(local_cluster, name, tmp_path / "state" / name.lower())
    # Restored afterwards.
    for name in ("KC", "VENV", "PYROOT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "scripts").mkdir()
    yield tmp_path / "scripts"
    signal.signal(signal.SIGTERM, before)


def test_scripts_and_what_they_start_find_the_cluster_under_any_tmpdir(scripts, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    script, told = scripts / "down.sh", tmp_path / "told"
    # Like the real ones, which look below TMPDIR where KC is not set.
    script.write_text(f"#!/bin/sh\nsh -c 'echo \"${{KC:-$TMPDIR/kc}}\"' > {told}\n")
    script.chmod(0o755)
    assert local_cluster.main("down") == 0
    assert told.read_text().strip() == str(local_cluster.STATE)
