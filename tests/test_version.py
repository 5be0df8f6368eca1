"""One version for everything: `platform/pyproject.toml` has it, and the files that cannot read it there repeat it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "platform" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
# An image of ours with its tag, in a command.
IMAGE = re.compile(r"\bstrata(?:-platform)?:(\d[\w.]*\w)")


def loaded(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_kernels_have_the_version():
    # Alone in its folder when it is built, it cannot read the version elsewhere.
    project = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == VERSION


def test_the_project_reads_the_version():
    command = [sys.executable, "-m", "hatchling", "metadata", "version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == VERSION


@pytest.mark.parametrize("chart", ["strata", "strata-stack"])
def test_charts_have_the_version(chart):
    values = loaded(f"charts/{chart}/Chart.yaml")
    ours = [part["version"] for part in values.get("dependencies", ()) if part["name"] == "strata"]
    assert {values["version"], values["appVersion"], *ours} == {VERSION}


def test_the_citation_has_the_version():
    assert loaded("CITATION.cff")["version"] == VERSION


def test_the_changelog_has_the_version():
    headings = re.findall(r"^## \[(.+)\] - ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == VERSION


def test_commands_name_images_of_the_version():
    files = [ROOT / "Dockerfile", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*"), ROOT / "README.md"]
    named = {(path.name, tag) for path in files for tag in IMAGE.findall(path.read_text(encoding="utf-8"))}
    assert named and {(name, tag) for name, tag in named if tag != VERSION} == set()
