"""The chart, its presets, and Helm where there is one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "strata"
PRESETS = sorted(CHART.glob("ci/*-values.yaml"))


class Helm:
    """Helm, as a person runs it."""

    def __init__(self, program):
        self.program = program

    def __call__(self, *arguments):
        return subprocess.run([self.program, *map(str, arguments)], text=True, capture_output=True)

    def template(self, *arguments):
        return self("template", "strata", CHART, "--namespace", "strata-system", *arguments)

    def notes(self, chart, *arguments):
        """What a person is told who installs it."""
        done = self("install", "strata", chart, "--dry-run=client", "--namespace", "strata-system", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("\nNOTES:\n")[2]

    def render(self, *arguments):
        done = self.template(*arguments)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]


HELM = os.environ.get("HELM") or shutil.which("helm")


@pytest.fixture(scope="session")
def helm():
    assert HELM is not None, "tests of a module that needs Helm are skipped where there is none"
    return Helm(HELM)
