"""Exit codes become outcomes: what happened, what to do, and whether another attempt may succeed."""

import doctest

import pytest

from strata_platform import outcomes
from strata_platform.outcomes import outcome_of_exit, outcome_of_job


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (0, "complete", "all steps are done"),
        (2, "bad_input", "the spec or the data must change"),
        (68, "unreachable", "could not be reached"),
        (69, "unhealthy", "not fit to train on"),
        (74, "lost", "lost its peers"),
        (75, "hung", "stacks"),
        (124, "time_limit", "raise it"),
        (-15, "preempted", "the cluster stopped the pod"),
        (143, "preempted", "the cluster stopped the pod"),
        (-9, "killed", "SIGKILL; the machine is gone"),
        (137, "killed", "ran out of memory"),
        (-7, "killed", "resources.shared_memory"),
        (-6, "killed", "NCCL after a collective timed out"),
        (-4, "killed", "processor with other instructions"),
        (-14, "killed", "hung in native code"),
        (-11, "killed", "native code crashed"),
        (-10, "killed", "SIGUSR1"),
        (-35, "killed", "signal 35"),
        (3, "failed", "exit code 3"),
        (1, "failed", "exit code 1"),
        (128, "failed", "exit code 128"),
        (200, "failed", "exit code 200"),
    ],
)
def test_exit_codes_become_outcomes(code, kind, words):
    outcome = outcome_of_exit(code)
    assert outcome.kind == kind
    assert words in outcome.sentence
    assert outcome.retryable is (kind not in ("complete", "bad_input", "time_limit", "failed"))


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        ([0, 0], "complete"),
        ([0, 1], "failed"),
        ([1, -15], "failed"),
        ([-15, 143], "preempted"),
        # The others lost their peer.
        ([1, -9], "killed"),
        ([1, 68], "unreachable"),
        ([74, -15], "lost"),
        ([74, 1], "failed"),
        ([74, -9], "killed"),
        ([75, 1], "hung"),
        ([69, 1, -15], "unhealthy"),
        ([68, 2], "bad_input"),
        ([124, -15], "time_limit"),
    ],
)
def test_the_cause_decides_about_a_job(codes, kind):
    assert outcome_of_job(codes).kind == kind


def test_examples():
    result = doctest.testmod(outcomes)
    assert result.attempted and not result.failed


def test_codes_that_a_cluster_retries_are_those_of_retryable_outcomes():
    retried = set(outcomes.RETRYABLE_CODES)
    assert retried >= {68, 69, 74, 75, 128 + 9, 128 + 15} and not retried & {0, 1, 2, 3, 124, 128}
    # Kubernetes wants them in order.
    assert list(outcomes.RETRYABLE_CODES) == sorted(retried)
