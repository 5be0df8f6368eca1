"""The page of a verification: a row for each check, and the text whose targets were looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.runtime.report.rendering import render
from tasks.runtime.report.sections import Table

_COLUMNS = ("name", "status", "figure", "limit", "seconds", "detail")


def render_verification(report: Mapping[str, Any]) -> str:
    """The page as HTML for embedding in a page such as a Flyte Deck.

    report: what `python -m tasks.runtime.verification --json` prints.
    """
    return render(
        "verification.html",
        subject=report["subject"],
        checks=Table(
            [column.capitalize() for column in _COLUMNS],
            [[_cell(check[column]) for column in _COLUMNS] for check in report["checks"]],
        ),
        texts=[check["shown"] for check in report["checks"] if "shown" in check],
    )


def _cell(value: float | str | None) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
