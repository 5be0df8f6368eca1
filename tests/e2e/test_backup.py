"""Flyte's database is lost and restored while a run waits."""

import os
import subprocess

import pytest

from strata_platform.errors import BackendError
from strata_platform.runs import Phase, Stage
from tests.e2e.helpers.cluster import PATIENCE, named, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "STRATA_E2E_BACKUP" not in os.environ,
        reason="STRATA_E2E_BACKUP and STRATA_E2E_RESTORE have no commands that back up Flyte's database and restore it",
    ),
]


def shell(name):
    subprocess.run(os.environ[name], shell=True, check=True, timeout=300)


def listed(strata):
    """Every run as the database knows it; empty while Flyte does not answer, as just after its start."""
    try:
        return {run.name: (run.phase, run.owner, run.submitted) for run in strata.list(limit=None)}
    except BackendError:
        return {}


def test_runs_are_known_and_go_on_after_the_database_was_lost_and_restored(cluster, strata, undisturbed):
    undisturbed.wait()
    spec = named("restored", resources={"queue": "express"})
    with cluster.held("express"):
        strata.submit(spec)
        until("it waits", lambda: strata.get(spec.name).stage is Stage.WAITING)
        cluster.until_settled(spec.name)
        before = listed(strata)
        complete = strata.get(undisturbed.spec.name)
        shell("STRATA_E2E_BACKUP")
        shell("STRATA_E2E_RESTORE")
        assert until("it answers", lambda: listed(strata)) == before
        # Its phase and times are of the database, its losses of the object store.
        assert complete.phase is Phase.SUCCEEDED and strata.get(undisturbed.spec.name) == complete
    assert strata.wait(spec.name, timeout=PATIENCE).phase is Phase.SUCCEEDED
