"""What the sections of the report show: tables, charts and samples, from the record and the metrics.

`templates/body.html` has their order and their markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from strata_platform.runs import MetricPoint
from tasks.runtime.report.numbers import GIB, MINUS, change, counted, duration, grouped, loss, number, percent, words
from tasks.runtime.report.svg.chart import Chart, Mark
from tasks.runtime.run_folder.record import CompletionRecord, Evaluated, SourceShare

OPEN_SAMPLES = 8
"""Samples that are shown; the others are collapsed."""
SAMPLED_EVALUATIONS = 4
"""Evaluations during training whose samples are shown: the best one, and others spread over the run."""
SAMPLE_CHARACTERS = 160_000
"""Upper limit for the texts of all samples together; beyond it each text is truncated."""
LISTED_STEPS = 20
"""Skipped steps that are listed; further ones are counted."""
NO_WRAP_CHARACTERS = 12
"""Longest text of a table cell that does not wrap, even on a narrow page."""

# Fields of the record that have their own sections.
_NESTED = frozenset(
    {"data", "kernels", "float8", "warmup", "versions", "samples", "task_scores", "evaluations", "sources"}
)


@dataclass(frozen=True, slots=True)
class Code:
    """A table cell in a monospaced font, with a note below."""

    text: str
    note: str = ""


Cell = str | Code


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column is the row's header."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def classes(self) -> list[str]:
        """CSS class of each column; empty for none."""
        return ["", *(_column_class([row[i] for row in self.rows]) for i in range(1, len(self.headers)))]


def _column_class(cells: Sequence[Cell]) -> str:
    """Numbers are right-aligned; numbers and short texts do not wrap."""
    texts = [cell for cell in cells if isinstance(cell, str) and len(cell) <= NO_WRAP_CHARACTERS]
    if len(texts) < len(cells):
        return ""
    return "number" if all(text[:1].isdigit() for text in texts) else "short"


@dataclass(frozen=True, slots=True)
class Change:
    """A relative change of the loss."""

    percent: str
    better: bool


def loss_change(record: CompletionRecord) -> Change | None:
    """The evaluation loss after training relative to the one before; None when it is undefined."""
    before, after = record.eval_loss_before, record.eval_loss_after
    if before is None or after is None:
        return None
    relative = change(before, after)
    return None if relative is None else Change(relative, better=after < before)


def charts(record: CompletionRecord, points: Sequence[MetricPoint]) -> list[Chart]:
    """Training and validation loss, throughput, learning rate, memory, gradient norm and further metrics by step."""
    if not points:
        return []
    steps = [point.step for point in points]
    restarts = [point.step for earlier, point in pairwise(points) if point.attempt != earlier.attempt]
    evaluations = (
        (0, record.eval_loss_before, "evaluation before"),
        (max(record.steps, steps[-1]), record.eval_loss_after, "evaluation after"),
    )
    marks = [Mark(step, value, label) for step, value, label in evaluations if value is not None]
    norms = [float("nan") if point.grad_norm is None else point.grad_norm for point in points]
    drawn = [
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
        *_validation(record, restarts),
        Chart("Throughput", "tokens/s", steps, [point.tokens_per_second for point in points], restarts),
        Chart("Learning rate", "", steps, [point.learning_rate for point in points], restarts),
        Chart("Peak memory", "GiB", steps, [point.memory_bytes / GIB for point in points], restarts),
    ]
    if any(point.grad_norm is not None for point in points):
        drawn.append(Chart("Gradient norm", "before clipping", steps, norms, restarts))
    for name in dict.fromkeys(name for point in points for name in point.metrics):
        values = [point.metrics.get(name, float("nan")) for point in points]
        drawn.append(Chart(words(name), "", steps, values, restarts, from_zero=False, digits=4))
    return drawn


def _validation(record: CompletionRecord, restarts: Sequence[int]) -> Iterator[Chart]:
    """Validation loss and metrics by step, with evaluation during training."""
    if not record.evaluations:
        return
    steps = [evaluation.step for evaluation in record.evaluations]
    # Later attempts may have been without evaluation.
    restarts = [step for step in restarts if step <= steps[-1]]
    losses = [evaluation.loss for evaluation in record.evaluations]
    if record.eval_loss_before is not None:
        steps, losses = [0, *steps], [record.eval_loss_before, *losses]
    lowest = [Mark(step, loss, "lowest") for step, loss in zip(steps, losses, strict=True) if step == record.best_step]
    yield Chart("Validation loss", record.loss_unit, steps, losses, restarts, lowest, from_zero=False, digits=4)
    for name in record.evaluations[-1].metrics:
        values = [evaluation.metrics.get(name, float("nan")) for evaluation in record.evaluations]
        during = [evaluation.step for evaluation in record.evaluations]
        yield Chart(f"Validation: {words(name)}", "", during, values, restarts, from_zero=False, digits=4)


def skipped_steps(points: Sequence[MetricPoint]) -> str | None:
    """The number of skipped steps and the first of them; None without any."""
    steps = [grouped(point.step) for point in points if point.skipped]
    if not steps:
        return None
    more = f" and {len(steps) - LISTED_STEPS:,} more" if len(steps) > LISTED_STEPS else ""
    return f"{counted(len(steps), 'step')}, {', '.join(steps[:LISTED_STEPS])}{more}"


def task_scores(record: CompletionRecord) -> Table:
    """Scores in `evaluation.tasks` before and after training."""
    rows = [
        (
            Code(score.task),
            score.metric,
            loss(score.before),
            loss(score.after),
            "none" if score.error is None else loss(score.error),
        )
        for score in record.task_scores
    ]
    return Table(("Task", "Metric", "Before", "After", "Standard error"), rows)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of a text, and how many characters of it are left out."""

    label: str
    text: str
    hidden: int


def samples(record: CompletionRecord) -> tuple[list[list[Excerpt]], list[list[Excerpt]]]:
    """Generations for the same prompts before, during and after training: those shown, and those collapsed."""
    during = _sampled(record)
    limit = min(4000, SAMPLE_CHARACTERS // ((4 + len(during)) * max(1, len(record.samples))))
    excerpts = [_excerpts(record, number, during, limit) for number in range(len(record.samples))]
    return excerpts[:OPEN_SAMPLES], excerpts[OPEN_SAMPLES:]


def _sampled(record: CompletionRecord) -> list[Evaluated]:
    """The evaluations during training whose samples are shown, in order."""
    found = [evaluation for evaluation in record.evaluations if evaluation.samples]
    best = [evaluation for evaluation in found if evaluation.step == record.best_step]
    others = [evaluation for evaluation in found if evaluation not in best]
    wanted = min(len(others), SAMPLED_EVALUATIONS - len(best))
    # The last one of each of so many equal parts.
    kept = best + [others[(part + 1) * len(others) // wanted - 1] for part in range(wanted)]
    return sorted(kept, key=lambda evaluation: evaluation.step)


def _excerpts(record: CompletionRecord, number: int, during: Sequence[Evaluated], limit: int) -> list[Excerpt]:
    sample = record.samples[number]
    best = record.best_step
    texts = {
        "Prompt": sample.prompt,
        "Reference": sample.reference,
        "Before training": sample.before,
        # Earlier attempts may have had fewer samples.
        **{
            f"After step {evaluation.step:,}{', the best' if evaluation.step == best else ''}": evaluation.samples[
                number
            ]
            for evaluation in during
            if number < len(evaluation.samples)
        },
        "After training": sample.after,
    }
    return [Excerpt(label, text[:limit], max(0, len(text) - limit)) for label, text in texts.items()]


@dataclass(frozen=True, slots=True)
class Warmup:
    """The warm-up in total. `skipped`: why no kernel was warmed up."""

    skipped: str | None
    totals: Table
    problems: Sequence[str]
    missed: Table


def warmup(record: CompletionRecord) -> Warmup:
    """Kernels compiled before training and during it, or why the warm-up was skipped."""
    report = record.warmup
    skipped = report.get("skipped")
    rows = [("Compiled later, during training", report["later_compiles"])] if "later_compiles" in report else []
    if "planned" in report and skipped is None:
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
    elif skipped is None:
        skipped = "no report was written"
    rows += [(label, report[key]) for key, label in _AFTERWARDS.items() if report.get(key) is not None]
    missed = [(Code(miss["kernel"]), miss["difference"]) for miss in report.get("later_misses", ())]
    return Warmup(
        skipped,
        Table(("Warm-up", "Value"), [(label, _value(value)) for label, value in rows]),
        (*report.get("problems", ()), *report.get("graph_problems", ())),
        Table(("Compiled during training", "Difference from the plan"), missed),
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
    "graphs_from": "Source of cached graphs",
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


def startup(record: CompletionRecord) -> Table:
    """How long each phase of the last start took, until its second step."""
    rows = [(words(name), duration(seconds)) for name, seconds in record.startup.items()]
    total = [("Together", duration(sum(record.startup.values())))] if rows else []
    return Table(("Start", "Time"), rows + total)


def failed_kernels(record: CompletionRecord) -> Table:
    """Kernels of the warm-up that could not be compiled."""
    return Table(
        ("Kernel", "Error"), [(_kernel(kernel), kernel["error"]) for kernel in record.warmup.get("failed", ())]
    )


def ready_kernels(record: CompletionRecord) -> Table:
    """Kernels of the warm-up that were compiled or found."""
    rows = [
        (_kernel(kernel), "hit" if kernel["hit"] else "compiled", _value(kernel["seconds"]))
        for kernel in record.warmup.get("compiled", ())
    ]
    return Table(("Kernel", "Cache", "Seconds"), rows)


def _kernel(kernel: Mapping[str, Any]) -> Code:
    return Code(kernel["name"], note=kernel["signature"])


def kernels(record: CompletionRecord) -> Table:
    """Number of modules with a fused operator, by operator."""
    return Table(("Operator", "Modules patched"), [(Code(name), grouped(n)) for name, n in record.kernels.items()])


def float8(record: CompletionRecord) -> str | None:
    """Which layers multiplied in FP8, in a sentence; None without `training.float8`."""
    if not record.float8:
        return None
    exact = record.float8["exact"]
    rest = f" but those for which that is not faster: {', '.join(exact)}" if exact else ""
    return f"Linear layers multiplied in FP8 ({record.float8['scaling']}){rest}."


def data(record: CompletionRecord) -> Table:
    """Counts of the prepared data."""
    return Table(("Data", "Count"), [(words(key), grouped(value)) for key, value in record.data.items()])


@dataclass(frozen=True, slots=True)
class Accounting:
    """Whether used and skipped samples add up to those read, in a sentence."""

    text: str
    complete: bool


def accounting(counts: Mapping[str, int]) -> Accounting | None:
    """Compare the samples read with those used and skipped; None where they were not counted."""
    if "read" not in counts or "used" not in counts:
        return None
    skipped = counts.get("skipped", sum(value for key, value in counts.items() if key.startswith("skipped_")))
    missing = counts["read"] - counts["used"] - skipped
    if missing:
        lost = f"{abs(missing):,} of {counted(counts['read'], 'sample')} read are not accounted for."
        return Accounting(lost, complete=False)
    return Accounting(f"{counts['read']:,} read = {counts['used']:,} used + {skipped:,} skipped.", complete=True)


def sources(record: CompletionRecord) -> Table:
    """The rows that the run read of each of several sources, and the losses on their validation rows."""
    rows: list[tuple[Cell, ...]] = []
    for share in record.sources:
        read = ("evaluation", "", "", "", "") if share.weight is None else _share(share)
        rows.append((Code(share.source), *read, loss(share.eval_loss_before), loss(share.eval_loss_after)))
    return Table(("Source", "Weight", "Rows", "Tokens", "Samples", "Epochs", "Loss before", "Loss after"), rows)


def _share(share: SourceShare) -> tuple[str, ...]:
    shares = (share.weight or 0.0, share.row_share, share.token_share)
    return (*map(percent, shares), grouped(share.samples), f"{share.epochs:,.2f}")


def versions(record: CompletionRecord) -> Table:
    """Versions of the packages."""
    return Table(("Package", "Version"), [(name, Code(version)) for name, version in record.versions.items()])


def completion(record: CompletionRecord) -> Table:
    """The fields of record.json under their own names."""
    values = record.model_dump(exclude=set(_NESTED))
    return Table(
        ("Field", "Value"),
        [(Code(name), "none" if value is None else _value(value)) for name, value in values.items()],
    )


def _value(value: Any) -> str:
    """Format a value of the record: numbers with thousands separators, everything else with `str`."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return grouped(value)
        case float() if 1e-3 <= abs(value) < 1e12 or value == 0:
            return f"{value:,.3f}".replace("-", MINUS)
        case float():
            return number(value, digits=4)
        case _:
            return str(value)
