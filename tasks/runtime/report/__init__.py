"""The report of a run: one self-contained HTML page, for the Flyte Deck and for `out/<name>/report.html`.

It has no scripts, fonts or images and fetches nothing. So it opens from disk without a network, in an iframe, and under
a content security policy that allows only inline style sheets. All text from models and users is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_platform.runs import MetricPoint
from tasks.runtime.report import sections
from tasks.runtime.report.markup import Html, element, join
from tasks.runtime.report.style import PAGE_STYLE, SCOPE, STYLE
from tasks.runtime.run_folder.record import CompletionRecord

__all__ = ["render_body", "render_report"]

# A second line of defense behind the escaping: this page runs no script and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_report(record: CompletionRecord, points: Sequence[MetricPoint], spec_yaml: str) -> str:
    """The report as an HTML document.

    points: metrics by step, from `read_points`; may be empty.
    spec_yaml: the full spec, defaults included.
    """
    head = join(
        (
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            element("title", f"{record.name}: training report"),
            element("style", Html(PAGE_STYLE)),
        )
    )
    body = element("body", Html(render_body(record, points, spec_yaml)))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'


def render_body(record: CompletionRecord, points: Sequence[MetricPoint], spec_yaml: str) -> str:
    """The same report for embedding in a page such as a Flyte Deck: one element and its scoped style sheet."""
    tables = element(
        "div",
        sections.warmup(record),
        sections.kernels(record),
        sections.data(record),
        sections.versions(record),
        class_="tables",
    )
    report = element(
        "main",
        sections.headline(record),
        sections.curves(record, points),
        sections.tasks(record),
        sections.samples(record),
        tables,
        sections.warmed_kernels(record),
        sections.completion(record),
        sections.spec(spec_yaml),
        class_=SCOPE,
    )
    return join((element("style", Html(STYLE)), report))
