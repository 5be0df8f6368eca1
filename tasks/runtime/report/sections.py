"""The sections of the report in order, each a function from the record to HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from strata_platform.runs import MetricPoint
from tasks.runtime.report.markup import Html, element, join
from tasks.runtime.report.numbers import GIB, MINUS, change, count, duration, gib, loss, number, perplexity
from tasks.runtime.report.svg.chart import Chart, Mark, figure
from tasks.runtime.run_folder.record import NATS, CompletionRecord, Sample, TaskScore

OPEN_SAMPLES = 8
"""Samples that are shown; the others are collapsed."""
SAMPLE_CHARACTERS = 160_000
"""Upper limit for the texts of all samples together; beyond it each text is truncated."""
LISTED_STEPS = 20
"""Skipped steps that are listed; further ones are counted."""
NO_WRAP_CHARACTERS = 12
"""Longest text of a table cell that does not wrap, even on a narrow page."""

# Fields of the record that have their own sections.
_NESTED = frozenset({"data", "kernels", "warmup", "versions", "samples", "task_scores"})
_ARROW = element("span", " \u2192 ", class_="arrow")


def headline(record: CompletionRecord) -> Html:
    """The summary: status, losses before and after, steps, duration, throughput, memory."""
    complete = record.status == "complete"
    processes = f"{record.world_size:,}\u00a0process{'' if record.world_size == 1 else 'es'}"
    facts = (
        f"{number(record.parameters)}\u00a0parameters",
        f"{record.device}, {processes}",
        count(record.restarts, "restart"),
        f"spec\u00a0{record.spec_hash}",
    )
    return element(
        "header",
        element(
            "div",
            element("h1", record.name),
            element("span", record.status.capitalize(), class_=f"status {record.status}"),
            class_="title",
        ),
        element("p", *(element("span", fact) for fact in facts), class_="facts"),
        None if complete else element("p", _unfinished(record), class_="note problem"),
        element("dl", *_tiles(record), class_="tiles"),
    )


def _unfinished(record: CompletionRecord) -> str:
    return (
        f"{record.steps:,} of {record.steps_asked:,} steps are done. "
        "Start the run again with the same spec to continue from its last checkpoint."
    )


def _tiles(record: CompletionRecord) -> list[Html | None]:
    before, after = record.eval_loss_before, record.eval_loss_after
    relative = _relative_change(before, after, record.loss_unit)
    return [
        _tile("Evaluation loss", _pair(loss(before), loss(after)), relative, class_="key-result"),
        _perplexity(before, after) if record.loss_unit == NATS else None,
        *(
            _tile(_words(name), number(value), element("small", "after training"), class_="key-result")
            for name, value in record.eval_metrics.items()
        ),
        _tile(
            "Steps",
            f"{record.steps:,}",
            element("small", f"of {record.steps_asked:,}; {number(record.tokens)}\u00a0tokens{_skipped_steps(record)}"),
        ),
        _tile("Duration", duration(record.seconds), element("small", f"training steps, all attempts; {_wait(record)}")),
        _tile(
            "Throughput", number(record.tokens_per_second), element("small", f"{_rate(record)}, median of the steps")
        ),
        _tile("Peak memory", gib(record.peak_memory_bytes), element("small", "busiest process")),
    ]


def _perplexity(before: float | None, after: float | None) -> Html:
    return _tile(
        "Perplexity",
        _pair(perplexity(before), perplexity(after)),
        element("small", "exp of the loss, before and after training"),
        class_="key-result",
    )


def _wait(record: CompletionRecord) -> str:
    share = record.data_wait_seconds / record.seconds if record.seconds else 0.0
    return f"{100 * share:.1f}\u00a0% waiting for data"


def _rate(record: CompletionRecord) -> str:
    return "tokens/s" if record.mfu is None else f"tokens/s, {100 * record.mfu:.1f}\u00a0% MFU"


def _skipped_steps(record: CompletionRecord) -> str:
    """Numbers of skipped steps and rollbacks, if any."""
    skipped = f"; {record.skipped_steps:,} skipped" if record.skipped_steps else ""
    rollbacks = f"; {count(record.rollbacks, 'rollback')}" if record.rollbacks else ""
    return skipped + rollbacks


def _tile(label: str, *value: object, class_: str | None = None) -> Html:
    return element("div", element("dt", label), element("dd", *value), class_=class_)


def _pair(before: str, after: str) -> Html:
    return Html(before) if before == after == "not measured" else join((before, _ARROW, after))


def _relative_change(before: float | None, after: float | None, unit: str) -> Html:
    relative = None if before is None or after is None else change(before, after)
    if relative is None or before is None or after is None:
        return element("small", f"{unit}, before and after training")
    percentage = element("span", relative, class_="better" if after < before else "worse")
    return element("small", percentage, f", {unit}")


def curves(record: CompletionRecord, points: Sequence[MetricPoint]) -> Html:
    """Loss, learning rate, throughput, memory, gradient norm and the objective's own metrics by step."""
    if not points:
        return element("section", element("h2", "Curves"), element("p", "No step was recorded.", class_="note"))
    steps = [point.step for point in points]
    restarts = [point.step for earlier, point in pairwise(points) if point.attempt != earlier.attempt]
    evaluations = (
        (0, record.eval_loss_before, "evaluation before"),
        (max(record.steps, steps[-1]), record.eval_loss_after, "evaluation after"),
    )
    marks = [Mark(step, value, label) for step, value, label in evaluations if value is not None]
    norms = [float("nan") if point.grad_norm is None else point.grad_norm for point in points]
    charts = [
        Chart(
            "Training loss",
            record.loss_unit,
            steps,
            [point.loss for point in points],
            restarts,
            marks,
            from_zero=False,
            smoothed=True,
            digits=4,
        ),
        Chart("Throughput", "tokens/s", steps, [point.tokens_per_second for point in points], restarts),
        Chart("Learning rate", "", steps, [point.learning_rate for point in points], restarts),
        Chart("Peak memory", "GiB", steps, [point.memory_bytes / GIB for point in points], restarts),
    ]
    if any(point.grad_norm is not None for point in points):
        charts.append(Chart("Gradient norm", "before clipping", steps, norms, restarts))
    for name in dict.fromkeys(name for point in points for name in point.metrics):
        values = [point.metrics.get(name, float("nan")) for point in points]
        charts.append(Chart(_words(name), "", steps, values, restarts, from_zero=False, digits=4))
    drawn = element("div", *(figure(chart) for chart in charts), class_="charts")
    return element("section", element("h2", "Curves"), _skipped(points), drawn)


def _skipped(points: Sequence[MetricPoint]) -> Html | None:
    """A note that lists the skipped steps."""
    steps = [f"{point.step:,}" for point in points if point.skipped]
    if not steps:
        return None
    more = f" and {len(steps) - LISTED_STEPS:,} more" if len(steps) > LISTED_STEPS else ""
    total = f"Skipped because of their loss or their gradients: {count(len(steps), 'step')}, "
    return _note(f"{total}{', '.join(steps[:LISTED_STEPS])}{more}.")


def tasks(record: CompletionRecord) -> Html | None:
    """Scores in `evaluation.tasks` before and after training."""
    if not record.task_scores:
        return None
    rows = [
        (element("code", score.task), score.metric, loss(score.before), loss(score.after), _error(score))
        for score in record.task_scores
    ]
    headers = ("Task", "Metric", "Before", "After", "Standard error")
    return element("section", element("h2", "Tasks"), table(headers, rows))


def _error(score: TaskScore) -> str:
    return "none" if score.error is None else loss(score.error)


def samples(record: CompletionRecord) -> Html:
    """Generations for the same prompts before and after training."""
    if not record.samples:
        return element("section", element("h2", "Samples"), element("p", "No sample was generated.", class_="note"))
    limit = min(4000, SAMPLE_CHARACTERS // (4 * len(record.samples)))
    articles = [_sample(index, sample, limit) for index, sample in enumerate(record.samples, start=1)]
    hidden = articles[OPEN_SAMPLES:]
    more = element("details", element("summary", count(len(hidden), "more sample")), *hidden) if hidden else None
    return element("section", element("h2", "Samples"), *articles[:OPEN_SAMPLES], more)


def _sample(index: int, sample: Sample, limit: int) -> Html:
    texts = (
        ("Prompt", sample.prompt, "text"),
        ("Reference", sample.reference, "text"),
        ("Before training", sample.before, "text"),
        ("After training", sample.after, "text after"),
    )
    return element(
        "article",
        element("h3", f"Sample {index}"),
        element("div", *(_column(label, text, limit, class_) for label, text, class_ in texts), class_="columns"),
        class_="sample",
    )


def _column(label: str, text: str, limit: int, class_: str) -> Html:
    shown = (
        text[:limit] if text.strip() else element("span", "empty" if not text else "only white space", class_="empty")
    )
    cut = f"{count(len(text) - limit, 'more character')} in record.json" if len(text) > limit else None
    return element(
        "div",
        element("h4", label),
        # `dir=auto`, so that right-to-left text is displayed correctly and cannot reorder its surroundings.
        element("div", shown, class_=class_, dir="auto"),
        element("p", cut, class_="note") if cut else None,
    )


def warmup(record: CompletionRecord) -> Html:
    """Kernels compiled before training and during it, or why the warm-up was skipped."""
    report = record.warmup
    reason = report.get("skipped")
    rows = [("Compiled later, during training", report["later_compiles"])] if "later_compiles" in report else []
    if "planned" in report and reason is None:
        hits = sum(kernel["hit"] for kernel in report["compiled"])
        rows = [
            ("Kernels planned", report["planned"]),
            ("Compiled", len(report["compiled"]) - hits),
            ("Hits in the cache", hits),
            *((label, report[key]) for key, label in _ORIGINS.items() if key in report),
            ("Failed", len(report["failed"])),
            ("Seconds", report["seconds"]),
            *((label, report[key]) for key, label in _SECONDS.items() if key in report),
            *rows,
        ]
    elif reason is None:
        reason = "no report was written"
    rows += [(label, report[key]) for key, label in _AFTERWARDS.items() if report.get(key) is not None]
    missed = [(element("code", miss["kernel"]), miss["difference"]) for miss in report.get("later_misses", ())]
    return element(
        "section",
        element("h2", "Kernel warm-up"),
        _note(f"No kernels were warmed up: {reason}.") if reason else None,
        table(("Warm-up", "Value"), [(label, _value(value)) for label, value in rows]) if rows else None,
        *(
            element("p", problem, class_="note problem")
            for problem in (*report.get("problems", ()), *report.get("graph_problems", ()))
        ),
        table(("Compiled during training", "Difference from the plan"), missed) if missed else None,
    )


# Where the kernels that were hits came from.
_ORIGINS = {
    "cache_hits": "of them in the pod already",
    "image_hits": "of them from the image",
    "store_hits": "of them from the store",
    "pushed": "Archives uploaded to the store",
}
_AFTERWARDS = {
    "module_wait_seconds": "Seconds that training waited for modules",
    "graphs_from": "Source of cached torch.compile graphs",
    "graphs_found": "Graphs found",
    "graphs_compiled": "Graphs compiled",
    "graphs_not_kept": "Graphs that PyTorch cannot cache",
    "graphs_pushed": "Archives of graphs uploaded to the store",
}
_SECONDS = {
    "plan_seconds": "Seconds of planning",
    "image_seconds": "Seconds of copying from the image, summed over threads",
    "store_seconds": "Seconds of waiting for the store",
    "compile_seconds": "Seconds of compiling, summed over threads",
}


def warmed_kernels(record: CompletionRecord) -> Html | None:
    """The warm-up by kernel: first the failed kernels, then the compiled ones."""
    failed = [(_kernel(kernel), kernel["error"]) for kernel in record.warmup.get("failed", ())]
    ready = [
        (_kernel(kernel), "hit" if kernel["hit"] else "compiled", _value(kernel["seconds"]))
        for kernel in record.warmup.get("compiled", ())
    ]
    if not failed and not ready:
        return None
    return element(
        "section",
        element("h2", "Warm-up by kernel"),
        table(("Kernel", "Error"), failed) if failed else None,
        table(("Kernel", "Cache", "Seconds"), ready) if ready else None,
    )


def _kernel(kernel: Mapping[str, Any]) -> Html:
    return join((element("code", kernel["name"]), element("small", kernel["signature"])))


def kernels(record: CompletionRecord) -> Html:
    """Number of modules with a fused operator, by operator."""
    patched = [(element("code", name), f"{modules:,}") for name, modules in record.kernels.items()]
    body = table(("Operator", "Modules patched"), patched) if patched else _note("No module was patched.")
    return element("section", element("h2", "Fused operators"), body)


def data(record: CompletionRecord) -> Html:
    """Counts of the prepared data, and whether used and skipped samples add up to those read."""
    rows = [(_words(key), f"{value:,}") for key, value in record.data.items()]
    body = table(("Data", "Count"), rows) if rows else _note("No count was reported.")
    return element("section", element("h2", "Data"), body, _accounting(record.data))


def _accounting(counts: Mapping[str, int]) -> Html | None:
    if "read" not in counts or "used" not in counts:
        return None
    skipped = counts.get("skipped", sum(value for key, value in counts.items() if key.startswith("skipped_")))
    missing = counts["read"] - counts["used"] - skipped
    if missing:
        problem = f"{abs(missing):,} of {count(counts['read'], 'sample')} read are not accounted for."
        return element("p", problem, class_="note problem")
    return _note(f"{counts['read']:,} read = {counts['used']:,} used + {skipped:,} skipped.")


def versions(record: CompletionRecord) -> Html:
    """Versions of the packages."""
    rows = [(name, element("code", version)) for name, version in record.versions.items()]
    body = table(("Package", "Version"), rows) if rows else _note("No version was recorded.")
    return element("section", element("h2", "Versions"), body)


def completion(record: CompletionRecord) -> Html:
    """The fields of record.json under their own names."""
    values = record.model_dump(exclude=set(_NESTED))
    rows = [(element("code", name), "none" if value is None else _value(value)) for name, value in values.items()]
    return element("section", element("h2", "Completion record"), table(("Field", "Value"), rows))


def spec(spec_yaml: str) -> Html:
    """The full spec, defaults included."""
    return element(
        "section",
        element("h2", "Spec"),
        element("details", element("summary", "The full spec, as YAML"), element("div", spec_yaml, class_="text")),
    )


def _note(text: str) -> Html:
    return element("p", text, class_="note")


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _value(value: Any) -> str:
    """Format a value of the record: numbers with thousands separators, everything else with `str`."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if 1e-3 <= abs(value) < 1e12 or value == 0:
            return f"{value:,.3f}".replace("-", MINUS)
        case float():
            return number(value, digits=4)
        case _:
            return str(value)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table whose first column is the row's header; columns of numbers are right-aligned."""
    rows = list(rows)
    classes = [_column_class([row[column] for row in rows]) if column else None for column in range(len(headers))]
    head = [element("th", header, scope="col", class_=class_) for header, class_ in zip(headers, classes, strict=True)]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, class_=class_) for cell, class_ in zip(row[1:], classes[1:], strict=True)),
        )
        for row in rows
    ]
    return element("table", element("thead", element("tr", *head)), element("tbody", *body))


def _column_class(cells: Sequence[object]) -> str | None:
    """CSS class of a column: numbers are right-aligned; numbers and short texts do not wrap."""
    if not all(isinstance(cell, str) and len(cell) <= NO_WRAP_CHARACTERS for cell in cells):
        return None
    return "number" if all(str(cell)[:1].isdigit() for cell in cells) else "short"
