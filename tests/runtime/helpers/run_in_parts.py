"""A whole run whose sources have parts of a few rows: `python -m tests.runtime.helpers.run_in_parts PROCESSES SPEC`.

With `data.streaming`, only the first parts are prepared until there is a file `go` in the spec's output folder, so that
a run can be killed while others are left.
"""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from itertools import count
from pathlib import Path
from unittest import mock

from strata_platform.spec import load_spec
from tasks.runtime.data.preparation import part_processes, pipeline
from tests.runtime.helpers.narrow_preset import narrow
from tests.runtime.helpers.train_forked import run_forked

PART_BYTES = 400
FIRST = 6
_GATE = "TEST_GATE"


def run(file):
    """The run of one process."""
    from tasks.runtime.__main__ import main
    from tasks.runtime.data.preparation.background_preparation import BackgroundPreparation

    def start(self, recipe, out, url, weights):
        how = json.dumps({"url": url, "weights": weights})
        command = [sys.executable, "-m", "tests.runtime.helpers.run_in_parts", recipe.model_dump_json(), str(out), how]
        self._process = subprocess.Popen(command)

    os.environ[_GATE] = f"{load_spec(file).output}/go"
    with (
        narrow(),
        mock.patch.object(BackgroundPreparation, "start", start),
        mock.patch.object(pipeline, "PART_BYTES", PART_BYTES),
        mock.patch.object(part_processes, "available_cpus", lambda: 1),
        mock.patch.object(sys, "argv", ["run", file]),
    ):
        code = main()
    assert code == 0, code


def prepare():
    """What the process beside training does."""
    from tasks.runtime.data.preparation.background_preparation import main

    prepare_one, numbers, gate = part_processes._prepare_one, count(), Path(os.environ[_GATE])

    def gated(*task):
        if next(numbers) >= FIRST:
            while not gate.exists():
                time.sleep(0.02)
        return prepare_one(*task)

    # In this process, as it alone is patched.
    with mock.patch.multiple(part_processes, _prepare_one=gated, available_cpus=lambda: 1):
        main()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        prepare()
    else:
        # Once, before the processes are forked.
        import_module("tasks.runtime.training.frameworks.torch")
        sys.exit(run_forked(int(sys.argv[1]), lambda: run(sys.argv[2])))
