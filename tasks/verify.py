"""Flyte task: whether a spec's model and data train right, on the kind of node that will train."""

from __future__ import annotations

import json
import subprocess
import sys

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from strata_platform.outcomes import UNREACHABLE
from strata_platform.pod_settings import RETRIES
from strata_platform.spec import RunSpec, dump_spec
from tasks.runtime.report.checks import render_verification


@task(retries=RETRIES, enable_deck=True, deck_fields=())
def verify(spec: RunSpec) -> str:
    """Do all checks and return the report as JSON; it is the task's Deck, too.

    Raises ValueError, which is not tried again, when a check fails or the spec or its data cannot be read.
    """
    # Its lines go to the pod's log as they come; the report comes at the end.
    done = subprocess.run(
        [sys.executable, "-m", "tasks.runtime.verification", "-", "--json"],
        input=dump_spec(spec),
        stdout=subprocess.PIPE,
        text=True,
    )
    if not done.stdout:
        raise RuntimeError(f"the verification ended with code {done.returncode} and no report; the log says why")
    report = json.loads(done.stdout)
    if done.returncode == UNREACHABLE.exit_code:
        raise FlyteRecoverableException(report["error"])
    if "error" in report:
        raise ValueError(report["error"])
    Deck("Verification", render_verification(report))
    if not report["passed"]:
        failed = [f"{check['name']}: {check['detail']}" for check in report["checks"] if check["status"] == "fail"]
        raise ValueError(f"{spec.name} does not train correctly: {'; '.join(failed) or 'no check applies to it'}")
    return done.stdout
