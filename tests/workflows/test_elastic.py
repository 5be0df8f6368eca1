"""How an attempt ends decides what Flyte does next: the cluster's doing is retried, the user's error is not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = """
import sys
from pathlib import Path
from flytekit.exceptions.user import FlyteRecoverableException
from tests.workflows.elastic_tasks import run
try:
    print("RESULT", run(sys.argv[1], Path(sys.argv[2])))
except FlyteRecoverableException as error:
    print("RECOVERABLE", error)
except BaseException as error:
    print("FATAL", type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("finishes", ("RESULT Result(record=\"0 of 2, ['shard']\"",)),
        ("is_killed", ("RECOVERABLE", "was killed: SIGKILL; usually out of memory", "run the same command again")),
        ("is_preempted", ("RECOVERABLE", "stopped by SIGTERM")),
        (
            "whose_pod_is_stopped",
            ("RECOVERABLE", "the pod was told to stop: SIGTERM; the cluster wants the machine back"),
        ),
        ("is_misused", ("FATAL", "training.micro_batch_size is too large")),
    ],
)
def test_end_of_an_attempt(name, says, tmp_path):
    (tmp_path / "shard").touch()
    # In a process of its own: the agent takes signals, and one of the tasks sends it one.
    ended = subprocess.run(
        [sys.executable, "-c", CODE, name, str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    for words in says:
        assert words in ended.stdout
