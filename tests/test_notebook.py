"""The notebook of the examples runs from its first cell to its last: the client, the real runtime, a real model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "submit.ipynb"


def test_it_is_a_notebook_without_results():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert all(line.endswith("\n") for line in cell["source"][:-1])


def test_its_last_cell_goes_to_the_clients_place_through_flytes_own(monkeypatch):
    for name in ("STRATA_PROJECT", "STRATA_DOMAIN", "FLYTECTL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STRATA_BACKEND", "flyte")
    remote, given = MagicMock(), MagicMock()
    monkeypatch.setattr("flytekit.remote.FlyteRemote", remote)
    last = "".join(json.loads(NOTEBOOK.read_text())["cells"][-1]["source"])
    exec(last, {"os": os, "spec": given, "client": given})
    assert remote.call_args.args[1:] == ("flytesnacks", "development")


def test_it_submits_follows_draws_and_generates(tmp_path):
    own = {"XDG_STATE_HOME": str(tmp_path / "state"), "STRATA_BACKEND": "local", "TMPDIR": str(tmp_path)}
    command = [sys.executable, ROOT / "tests" / "helpers" / "run_notebook.py", NOTEBOOK, tmp_path / "displayed.json"]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "[rank 0] training: 20 steps" in ended.stdout
    assert "Stage training" in ended.stdout
    assert "def sorted(iterable):" in ended.stdout
    drawn = json.loads((tmp_path / "displayed.json").read_text())["loss"]
    assert len(drawn) == 20
    assert "Training loss over 20" in drawn[-1]
