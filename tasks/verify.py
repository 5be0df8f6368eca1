"""Flyte task: whether a spec's model and data train right, on the kind of node that will train."""

from __future__ import annotations

import html
import json
import subprocess
import sys
from typing import Any

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from strata_platform.outcomes import UNREACHABLE
from strata_platform.spec import RunSpec, dump_spec
from tasks.resources import RETRIES


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
    Deck("Verification", page(report))
    if not report["passed"]:
        failed = [f"{check['name']}: {check['detail']}" for check in report["checks"] if check["verdict"] == "fail"]
        raise ValueError(f"{spec.name} does not train right: {'; '.join(failed) or 'no check applies to it'}")
    return done.stdout


def page(report: dict[str, Any]) -> str:
    """The report as HTML: a row for each check, and the text whose targets were looked at."""
    names = ("verdict", "name", "figure", "limit", "seconds", "detail")
    rows = [[_cell(check[name]) for name in names] for check in report["checks"]]
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    texts = [check["shown"] for check in report["checks"] if "shown" in check]
    shown = "".join(f"<p>Learned tokens are marked.</p><pre>{_marked(text)}</pre>" for text in texts)
    return f"<h1>{html.escape(report['subject'])}</h1><table><tr>{head}</tr>{body}</table>{shown}"


def _cell(value: Any) -> str:
    return html.escape("" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value))


def _marked(pieces: list[dict[str, Any]]) -> str:
    texts = [(html.escape(piece["text"]), piece["learned"]) for piece in pieces]
    return "".join(f"<mark>{text}</mark>" if learned else text for text, learned in texts)
