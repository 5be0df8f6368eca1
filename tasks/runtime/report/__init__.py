"""The report of a run: one self-contained HTML page, for the Flyte Deck and for `out/<name>/report.html`.

It has no scripts, fonts or images and fetches nothing. So it opens from disk without a network, in an iframe, and under
a content security policy that allows only inline style sheets. All text from models and users is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata_platform.runs import MetricPoint
from tasks.runtime.report import sections
from tasks.runtime.report.rendering import render
from tasks.runtime.report.svg.chart import Chart, figure
from tasks.runtime.run_folder.record import NATS, CompletionRecord

__all__ = ["render_body", "render_chart", "render_report"]


def render_report(record: CompletionRecord, points: Sequence[MetricPoint], spec_yaml: str) -> str:
    """The report as an HTML document.

    points: metrics by step, from `read_points`; may be empty.
    spec_yaml: the full spec, defaults included.
    """
    return render("report.html", **_values(record, points, spec_yaml))


def render_body(record: CompletionRecord, points: Sequence[MetricPoint], spec_yaml: str) -> str:
    """The same report for embedding in a page such as a Flyte Deck: one element and its scoped style sheet."""
    return render("body.html", **_values(record, points, spec_yaml))


def render_chart(chart: Chart) -> str:
    """One chart for embedding in a page such as a notebook: one element and its scoped style sheet."""
    return render("chart.html", figure=figure(chart))


def _values(record: CompletionRecord, points: Sequence[MetricPoint], spec_yaml: str) -> dict[str, Any]:
    """What the templates show: the record, and what is derived from it."""
    opened, collapsed = sections.samples(record)
    return {
        "record": record,
        "NATS": NATS,
        "loss_change": sections.loss_change(record),
        "skipped_steps": sections.skipped_steps(points),
        "figures": [figure(chart) for chart in sections.charts(record, points)],
        "task_scores": sections.task_scores(record),
        "samples": opened,
        "more_samples": collapsed,
        "startup": sections.startup(record),
        "warmup": sections.warmup(record),
        "kernels": sections.kernels(record),
        "float8": sections.float8(record),
        "data": sections.data(record),
        "sources": sections.sources(record),
        "accounting": sections.accounting(record.data),
        "versions": sections.versions(record),
        "failed_kernels": sections.failed_kernels(record),
        "ready_kernels": sections.ready_kernels(record),
        "completion": sections.completion(record),
        "spec_yaml": spec_yaml,
    }
