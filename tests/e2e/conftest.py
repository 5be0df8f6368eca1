"""Tests on a cluster with everything installed, skipped without one: docs/cluster-tests.md says how to get one."""

import os
import signal
import warnings
from contextlib import contextmanager

import pytest

NEEDED = {
    "KUBECONFIG": "a cluster, with an administrator's rights",
    "FLYTECTL_CONFIG": "the file of flytectl and pyflyte for its Flyte",
    "STRATA_E2E_IMAGE": "the project's image there",
}
MISSING = [name for name in NEEDED if not os.environ.get(name)]


def pytest_configure(config):
    if not MISSING:
        # Flyte's and Kubernetes' clients leave connections for the garbage collector to close: in tests, and at the end
        # of pytest, which has read the lines by now.
        for category in (ResourceWarning, pytest.PytestUnraisableExceptionWarning):
            config.addinivalue_line("filterwarnings", f"ignore::{category.__module__}.{category.__name__}")
            warnings.simplefilter("ignore", category)


def pytest_collection_modifyitems(items):
    if MISSING:
        skip = pytest.mark.skip(reason=f"no cluster: {', '.join(MISSING)} not set; docs/cluster-tests.md")
        for item in items:
            if "tests/e2e" in item.path.as_posix():
                item.add_marker(skip)


# Seconds that a test may take, and its fixtures, too: clients of Flyte and Kubernetes have waits without a limit.
LIMIT, SLOW_LIMIT = 600, 1500


@contextmanager
def limited(item):
    seconds = SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT

    def over(number, frame):
        raise TimeoutError(f"{item.nodeid} takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    with limited(item):
        return (yield)


@pytest.fixture(scope="session")
def cluster():
    from kubernetes import config

    from tests.e2e.helpers.cluster import Cluster, Window, until

    config.load_kube_config()
    found = Cluster(os.environ["STRATA_E2E_IMAGE"])
    with found.pod(["sleep", "86400"]) as name:
        until("the window is open", lambda: found.is_running(name))
        found.window = Window(name)
        yield found


@pytest.fixture(scope="session")
def undisturbed(cluster, tmp_path_factory):
    """The run that others are compared with, started as a person does."""
    return cluster.launched(tmp_path_factory.mktemp("spec") / "spec.yaml")


@pytest.fixture(scope="session")
def strata(cluster, undisturbed):
    """The client, of the workflow of this checkout, which its first submission registers."""
    from strata_platform.backends.flyte import FlyteBackend
    from strata_platform.client import Client
    from tests.e2e.helpers.cluster import DOMAIN, PROJECT, ROOT

    return Client(FlyteBackend(PROJECT, DOMAIN, image=cluster.image, source=ROOT), poll=0.5)


@pytest.fixture(scope="session")
def preempted(cluster, strata, undisturbed):
    """A run that the client submits and follows to its end; an urgent pod takes its place in the middle of training."""
    from tests.e2e.helpers.cluster import MIDDLE, NO_ROOM, Followed, until

    idle = ["sleep", "86400"]
    # The queue has no room for a run beside this pod: both runs come to wait, in whichever order.
    with cluster.pod(idle, queue="research", priority="background"):
        followed = Followed(cluster, strata, "preempted")

        def both_wait():
            # Kueue says nothing of the second of two that are alike. That one will have to wait for the first.
            return undisturbed.jobs() and any(run.position == 1 or NO_ROOM in run.message for run in followed.seen)

        until("both runs wait", both_wait)
    followed.run.until_step(MIDDLE)
    # What Flyte makes of a task with resources.priority, without the task.
    with cluster.pod(idle, queue="research", priority="urgent", cpu="1600m") as urgent:
        followed.run.until_suspended()
        until("the urgent pod runs", lambda: cluster.is_running(urgent))
    followed.run.until_done()
    return followed
