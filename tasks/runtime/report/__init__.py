"""The report of a run: one HTML page that needs nothing else, for the Flyte Deck and for `out/<name>/report.html`.

No scripts, no fonts, no images, nothing fetched: it opens from a disk without a network, in an iframe, and under a
content security policy that allows inline style sheets alone. Everything that a model or a user wrote is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_platform.runs import MetricPoint
from tasks.runtime.report import sections
from tasks.runtime.report.markup import Html, element, join
from tasks.runtime.report.style import PAGE_STYLE, SCOPE, STYLE
from tasks.runtime.run_folder.record import CompletionRecord

__all__ = ["render_body", "render_report"]

# A second wall behind the escaping: this page runs no script and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_report(record: CompletionRecord, points: Sequence[MetricPoint], spec_yaml: str) -> str:
    """The report as an HTML document.

    points: by step, as `read_points` gives them; none is fine.
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
    """The same report as a part of another page, such as a Flyte Deck: one element and its scoped style sheet."""
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
