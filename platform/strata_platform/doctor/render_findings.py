"""Renders findings, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from strata_platform.doctor.finding import Finding

_MARKS = {"ok": "ok", "skipped": "-", "warning": "warning", "problem": "PROBLEM"}


def table(findings: Iterable[tuple[str, Finding]]) -> str:
    """A line for each finding, with its advice below it."""
    found = list(findings)
    width = max((len(name) for name, _ in found), default=0)
    lines = []
    for name, finding in found:
        lines.append(f"{_MARKS[finding.status]:<8}  {name:<{width}}  {finding.message}")
        if finding.advice:
            lines.append(f"{'':<8}  {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)


def to_json(findings: Iterable[tuple[str, Finding]]) -> str:
    """A list of objects with `check`, `status`, `message` and `advice`."""
    return json.dumps([{"check": name, **asdict(finding)} for name, finding in findings], indent=2)
