"""`pyflyte` that forks itself where it would start an interpreter that imports everything once more.

    python -m tests.workflows.helpers.forked_flyte run workflows/finetune.py finetune --spec FILE

So begin the processes that train, and those that read an exported folder. Tests of the command itself start the real
one: `test_finetune`.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

from tests.helpers import fork_server


def pyflyte(*arguments, **variables):
    """Start it, and return what has become of it when it has ended."""
    return fork_server.run(
        [sys.executable, "-m", "tests.workflows.helpers.forked_flyte", *arguments],
        cwd=fork_server.ROOT, env=fork_server.clean_environment(**variables), text=True, capture_output=True,
        timeout=500,
    )  # fmt: skip


def run(command, *, text, capture_output):
    """As `subprocess.run`, for `python -m MODULE ARGUMENT...`."""
    assert text and capture_output and command[1] == "-m"
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
        pid = os.fork()
        if pid == 0:
            os._exit(run_module(command[2:], files))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))


def run_module(command, files):
    """The exit code of a module that writes to these files."""
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = command
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        # As the interpreter: None is 0, and a text is printed.
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main():
    """Run `pyflyte`, changed."""
    from flytekit.clis.sdk_in_container.pyflyte import main

    from tasks.elastic import TrainingTask
    from tasks.runtime.process import forks

    plain_execute = TrainingTask._execute

    def execute(self, **inputs):
        self.task_config.start_method = "fork"
        return plain_execute(self, **inputs)

    TrainingTask._execute = execute
    forks.subprocess = SimpleNamespace(run=run)
    main()


if __name__ == "__main__":
    main()
