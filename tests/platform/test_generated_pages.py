"""The support matrix and the reference of commands say what specs and commands themselves say."""

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from strata_platform import cli_docs
from strata_platform.cli import app
from strata_platform.spec import RunSpec, SpecError, support_matrix


@pytest.fixture(scope="module")
def page():
    return support_matrix.matrix()


def reasons(page):
    return dict(re.findall(r'^(\d+)\. <a id="reason-\1"></a>(.*)$', page, re.MULTILINE))


def cell(page, feature, kind):
    header, *rows = [line.split(" | ") for line in page.split("## With")[1].split("##")[0].splitlines() if "|" in line]
    (row,) = [row for row in rows if row[0] == f"| `{feature}`"]
    return row[[name.strip(" |") for name in header].index(kind)].strip(" |")


@pytest.mark.parametrize(
    ("feature", "kind", "words"),
    [
        ("optimizer.type: adamw", "fsdp, tensor_parallel", None),
        ("objective.type: kto", "fsdp, tensor_parallel", None),
        ("optimizer.type: muon", "deepspeed, stage 3", "whole matrices"),
        ("optimizer.in_backward", "ddp", "averages them"),
        ("training.compile", "deepspeed, stage 3", "parallel.stage 3"),
        ("adapter.quantization: nf4", "fsdp, cpu_offload", None),
    ],
)
def test_cells_have_the_rule_of_the_spec(page, feature, kind, words):
    found = cell(page, feature, kind)
    if words is None:
        assert found == "yes"
    else:
        assert words in reasons(page)[re.search(r"\d+", found)[0]]


def test_a_reason_is_the_message_of_the_error(page):
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate({"model": {"name": "a/b"}, "adapter": {"type": "lora"}, "optimizer": {"type": "muon"}})
    (problem,) = caught.value.problems
    assert f"`{problem.path}`: {problem.message}" in reasons(page).values()


def test_settings_that_are_alternatives_are_no_pair():
    assert support_matrix.together({"model": {"dtype": "float32"}}, {"model": {"dtype": "bfloat16"}}) is None


@pytest.mark.parametrize("name", ["submit", "estimate", "logs"])
def test_the_reference_has_the_options_that_help_shows(name):
    code = "from strata_platform.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, name, "--help"],
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    section = cli_docs.reference().split(f"## strata {name}\n")[1].split("\n## ")[0]
    options = set(re.findall(r"--[a-z]+", ended.stdout)) - {"--help"}
    assert options and all(f"{option}`" in section for option in options), options


def test_every_command_is_in_the_reference():
    assert all(f"## strata {name}\n" in cli_docs.reference() for name in get_command(app).commands)
