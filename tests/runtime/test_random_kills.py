"""A few of the random kills of `python -m tests.runtime.helpers.random_kills`."""

import sys

from tests.helpers import fork_server


def test_whatever_kills_it_a_run_ends_complete_with_the_losses_of_an_undisturbed_one():
    ended = fork_server.run(
        [sys.executable, "-m", "tests.runtime.helpers.random_kills", "--runs", "3", "--seed", "0"],
        cwd=fork_server.ROOT, env=fork_server.clean_environment(), text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 runs, 0 failed" in ended.stdout
