"""How `pyflyte run` reads a spec; in this process, as starting flytekit takes seconds."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from flytekit.clis.sdk_in_container.pyflyte import main

from tasks.parameters import read_files_as_strata_does

FILE = Path(__file__).parent / "helpers" / "print_spec.py"


@pytest.fixture
def pyflyte(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYTE_LOCAL_CACHE_ENABLED", "false")
    # As `workflows` does where a command line imports it; another test may have imported it without one.
    read_files_as_strata_does()
    (tmp_path / "base.yaml").write_text("name: base\noutput: ${SCRATCH}/runs\n")
    (tmp_path / "my.yaml").write_text("include: base.yaml\noptimizer: {lr: 1.0e-3}\n")

    def run(*arguments):
        # A file's path is looked up below the working directory, where the project lies.
        return CliRunner().invoke(main, ["run", str(FILE), "print_spec", *arguments])

    return run


def test_a_spec_is_whole_when_it_is_sent(pyflyte, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    spec = str(tmp_path / "my.yaml")
    assert "name base, lr 0.001, output /scratch/runs" in pyflyte("--spec", spec).output
    changed = pyflyte("--set", "optimizer.lr=1e-5", "--spec", spec, "--set", "name=mine")
    assert (changed.exit_code, "name mine, lr 1e-05, output /scratch/runs" in changed.output) == (0, True)


def test_overrides_change_the_default_and_specs_on_the_command_line(pyflyte):
    assert "name mine, lr None, output out" in pyflyte("--set", "name=mine").output
    assert "name a, lr 0.5, output out" in pyflyte("--spec", '{"name": "a"}', "--set", "optimizer.lr=0.5").output
    assert "--set" in pyflyte("--help").output


def test_mistakes_in_overrides_are_told_as_strata_does(pyflyte, tmp_path, monkeypatch):
    monkeypatch.delenv("SCRATCH", raising=False)
    ended = pyflyte("--spec", str(tmp_path / "my.yaml"), "--set", "optimizer.rl=1")
    said = " ".join(ended.output.split())
    assert ended.exit_code == 2
    assert "optimizer.rl (--set optimizer.rl=1): no such field" in said.replace("│ ", "").replace(" │", "")
    assert "the environment variable SCRATCH is not set" in said.replace("│ ", "").replace(" │", "")
