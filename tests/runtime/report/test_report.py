"""The report as its readers get it: parsed back, measured, and opened in a browser where there is one."""

import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, replace
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from strata_kernels.warmup import Compiled, Failed, WarmupReport
from strata_platform.runs import MetricPoint
from tasks.runtime import report
from tasks.runtime.report import numbers, render_body, render_chart, render_report
from tasks.runtime.report.comparison import Trial, render_comparison
from tasks.runtime.report.rendering import render
from tasks.runtime.report.sections import samples
from tasks.runtime.report.svg.chart import Chart
from tasks.runtime.report.svg.series import downsample, smooth, step_axis, value_axis
from tasks.runtime.run_folder.record import CompletionRecord, Evaluated, Sample, SourceShare, TaskScore

TEMPLATES = Path(report.__file__).parent / "templates"
ROOT = TEMPLATES.parents[3]
STYLE = (TEMPLATES / "report.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--(\w+): (#\w+);", part)) for part in STYLE.split("@media (prefers-color-scheme: dark)")
)
VOID = {"meta"}
SPEC = "name: finetune\nmodel:\n  name: tiny-llama\n"
RECORD = CompletionRecord(
    status="complete",
    name="finetune",
    spec_hash="9c55ca525022b871",
    steps=60,
    steps_asked=60,
    tokens=614_400,
    target_tokens=447_123,
    train_loss=2.641,
    eval_loss_before=7.0213,
    eval_loss_after=2.7128,
    checkpoint="out/finetune/checkpoints/step-00000060",
    restarts=1,
    seconds=192.4,
    tokens_per_second=24_791.2,
    peak_memory_bytes=3 << 29,
    parameters=4_262_144,
    trainable_parameters=4_262_144,
    device="NVIDIA H200",
    world_size=2,
    data={"read": 5124, "used": 5013, "skipped_overlong": 109, "skipped_empty": 2, "train_rows": 1204},
    kernels={"rms_norm": 9, "linear_cross_entropy": 1},
    warmup={
        **WarmupReport(
            device="NVIDIA H200",
            planned=3,
            compiled=(
                Compiled("rms_norm_fwd", "x=*bfloat16, D=4096", seconds=1.02, hit=False),
                Compiled("rope", "x=*bfloat16, D=128", seconds=0.01, hit=True),
            ),
            failed=(Failed("swiglu", "x=*bfloat16", error="OutOfResources: shared memory"),),
            seconds=4.213,
        ).to_dict(),
        "later_compiles": 2,
    },
    versions={"torch": "2.11.0+cu130", "triton": "3.6.0"},
    samples=(Sample(prompt="partial(func)", reference="New function.", before="ng ng", after="Return a function."),),
)


def make_points(n, restart=None, **changes):
    noise = random.Random(0)
    return [
        MetricPoint(
            step=step,
            attempt=int(restart is not None and step >= restart),
            time=1.76e9 + step,
            loss=2.6 + 4.4 * math.exp(-7 * step / n) + noise.gauss(0, 0.1),
            learning_rate=2e-3 * (1 - step / (n + 1)),
            grad_norm=1.0 + noise.random(),
            tokens=2048 * step,
            target_tokens=1500 * step,
            tokens_per_second=24_800 + noise.gauss(0, 500),
            step_seconds=0.08,
            memory_bytes=1 << 30,
        )
        for step in range(1, n + 1)
    ]


def with_losses(losses):
    return [replace(point, loss=loss) for point, loss in zip(make_points(len(losses)), losses, strict=True)]


class Page(HTMLParser):
    """A parsed report. Parsing fails on tags that do not match."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tags = [], []
        self.sections, self.tables, self._heading, self._cells = {}, {}, "", None
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self._heading = ""
        if tag == "tr":
            self._cells = []
        if tag in {"td", "th"}:
            self._cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append(tuple(self._cells))

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self._heading += data
        elif {"td", "th"} & set(self.open):
            self._cells[-1] += data
        if "style" not in self.open:
            self.sections[self._heading] = self.sections.get(self._heading, "") + data.replace("\xa0", " ") + "\n"

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(points=(), **changes):
    return Page(render_report(RECORD.model_copy(update=changes), list(points), SPEC))


def test_where_the_time_of_the_start_went_is_a_table():
    text = render_report(RECORD.model_copy(update={"startup": {"imports": 61.5, "first step": 1.25}}), [], SPEC)
    assert "<h2>Start</h2>" in text and "First step" in text and "Together" in text
    assert f"strata events {RECORD.name}" in text
    assert "<h2>Start</h2>" not in render_report(RECORD, [], SPEC)


def test_headline_tells_result_and_cost():
    said = page_of(make_points(60)).sections[""].split("\n")
    for expected in ("finetune", "Complete", "7.021", "2.713", "\u221261.4 %", "1,120", "15.1", "3 min 12 s", "24.8 k"):
        assert expected in said
    for expected in ("60", "of 60; 614 k tokens", "1.50 GiB", "NVIDIA H200, 2 processes", "1 restart"):
        assert expected in said


def test_incomplete_run_says_how_to_go_on():
    said = page_of(status="incomplete", steps=31).sections[""]
    assert "Incomplete" in said
    assert "31 of 60 steps are done. Start the run again with the same spec" in said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (2.0, 3.0, "+50.0 %"),
        (None, None, "not measured"),
        (math.nan, 2.0, "NaN"),
        (2000.0, 2.0, "\u221e"),
        (0.0, 1.0, "1.000"),
    ],
    ids=["worse", "unmeasured", "nan", "perplexity-overflow", "from-zero"],
)
def test_headline_with_unusual_losses(before, after, said):
    assert said in page_of(make_points(3), eval_loss_before=before, eval_loss_after=after).sections[""]


def test_steps_that_were_not_taken_are_told():
    points = [replace(point, skipped=int(point.step in (3, 40))) for point in make_points(60)]
    page = page_of(points, skipped_steps=2, rollbacks=1)
    assert "of 60; 614 k tokens; 2 skipped; 1 rollback" in page.sections[""]
    assert "because of their loss or their gradients: 2 steps, 3, 40." in page.sections["Curves"]
    many = page_of([replace(point, skipped=1) for point in make_points(25)]).sections["Curves"]
    assert "25 steps, 1, 2, " in many and ", 20 and 5 more." in many
    assert "Skipped because" not in page_of(make_points(3)).sections["Curves"]


def test_scores_of_tasks_are_a_table():
    scores = (
        TaskScore(task="hellaswag", metric="acc", before=0.25, after=0.3125, error=0.0189, higher_is_better=True),
        TaskScore(task="wikitext", metric="word_perplexity", before=812.5, after=21.75),
    )
    assert page_of(make_points(3), task_scores=scores).tables["Tasks"] == [
        ("Task", "Metric", "Before", "After", "Standard error"),
        ("hellaswag", "acc", "0.2500", "0.3125", "0.01890"),
        ("wikitext", "word_perplexity", "812.5", "21.75", "none"),
    ]
    assert "Tasks" not in page_of(make_points(3)).tables


def test_what_was_read_of_several_sources_is_a_table():
    sources = (
        SourceShare(source="a.jsonl", weight=0.7, rows=700, row_share=0.7, samples=4200, tokens=9, token_share=0.68,
                    epochs=2.5, eval_loss_before=8.25, eval_loss_after=3.125),
        SourceShare(source="test.jsonl", weight=None),
    )  # fmt: skip
    assert [row[1:] for row in page_of(make_points(3), sources=sources).tables["Sources"][1:]] == [
        ("70.0\N{NO-BREAK SPACE}%",) * 2 + ("68.0\N{NO-BREAK SPACE}%", "4,200", "2.50", "8.250", "3.125"),
        ("evaluation", "", "", "", "", "not measured", "not measured"),
    ]
    assert "Sources" not in page_of(make_points(3)).tables


def test_layers_that_stay_exact_beside_fp8_are_named():
    found = {"scaling": "tensorwise", "exact": ["model.layers.0.self_attn.k_proj"]}
    page = page_of(make_points(60), float8=found)
    expected = "FP8 (tensorwise) but those for which that is not faster: model.layers.0.self_attn.k_proj."
    assert expected in page.sections["Fused operators"]
    assert "FP8" not in page_of(make_points(60)).sections["Fused operators"]


def test_tables_hold_the_record():
    tables = page_of(make_points(60)).tables
    assert tables["Fused operators"] == [
        ("Operator", "Modules patched"),
        ("rms_norm", "9"),
        ("linear_cross_entropy", "1"),
    ]
    assert tables["Data"][1:4] == [("Read", "5,124"), ("Used", "5,013"), ("Skipped overlong", "109")]
    assert tables["Versions"][1:] == [("torch", "2.11.0+cu130"), ("triton", "3.6.0")]
    fields = dict(tables["Completion record"])
    assert set(fields) - {"Field"} == set(CompletionRecord.model_fields) - {
        "data",
        "kernels",
        "float8",
        "warmup",
        "versions",
        "samples",
        "task_scores",
        "evaluations",
        "sources",
    }
    assert fields["checkpoint"] == RECORD.checkpoint
    assert fields["tokens"] == "614,400"
    assert fields["train_loss"] == "2.641"


def test_a_run_that_was_evaluated_and_stopped_early():
    evaluations = tuple(Evaluated(step=step, loss=loss) for step, loss in ((20, 4.0), (40, 2.5), (60, 3.5)))
    early = {"evaluations": evaluations, "best_step": 40, "stopped_early": True, "steps_asked": 100}
    # The last attempt went on without evaluation.
    html = render_report(RECORD.model_copy(update=early), make_points(80, restart=70), SPEC)
    assert "Stopped early after step 60 of 100: the validation loss was lowest after step 40." in html
    assert "Validation loss over 4" in html and "lowest 2.500" in html
    assert "Validation loss" not in render_report(RECORD, make_points(80), SPEC)


def test_warmup_in_total_and_by_kernel():
    tables = page_of().tables
    assert tables["Kernel warm-up"][1:] == [
        ("Kernels planned", "3"),
        ("Compiled", "1"),
        ("Hits in the cache", "1"),
        ("Failed", "1"),
        ("Seconds", "4.213"),
        ("Compiled later, during training", "2"),
    ]
    assert tables["Warm-up by kernel"] == [
        ("Kernel", "Error"),
        ("swiglux=*bfloat16", "OutOfResources: shared memory"),
        ("Kernel", "Cache", "Seconds"),
        ("rms_norm_fwdx=*bfloat16, D=4096", "compiled", "1.020"),
        ("ropex=*bfloat16, D=128", "hit", "0.010"),
    ]


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"skipped": "no GPU here", "later_compiles": 0}, "no GPU here"),
        (WarmupReport("cpu", 3, (), (), 0.1, skipped="the plan is empty").to_dict(), "the plan is empty"),
        ({}, "no report was written"),
    ],
    ids=["not-started", "nothing-to-do", "no-report"],
)
def test_warmup_says_why_nothing_was_warmed(report, said):
    page = page_of(warmup=report)
    assert f"No kernels were warmed up: {said}." in page.sections["Kernel warm-up"]
    assert "Warm-up by kernel" not in page.sections


def test_graphs_of_the_compiler_are_told_also_without_kernels():
    report = {"skipped": "no GPU here", "graphs_from": "store", "graphs_found": 2, "graphs_compiled": 0}
    page = page_of(warmup={**report, "graph_problems": ["could not trim the store"]})
    assert page.tables["Kernel warm-up"][1:] == [
        ("Source of cached graphs", "store"),
        ("Graphs found", "2"),
        ("Graphs compiled", "0"),
    ]
    assert "could not trim the store" in page.sections["Kernel warm-up"]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (RECORD.data, "5,124 read = 5,013 used + 111 skipped."),
        ({"read": 10, "used": 8, "skipped": 2, "skipped_overlong": 2}, "10 read = 8 used + 2 skipped."),
        ({"read": 10, "used": 8, "skipped_overlong": 1}, "1 of 10 samples read are not accounted for."),
        ({}, "No count was reported."),
    ],
    ids=["by-reason", "with-total", "lost", "none"],
)
def test_every_sample_read_is_accounted_for(counts, said):
    assert said in page_of(data=counts).sections["Data"]


def test_spec_is_shown_in_full():
    assert SPEC in page_of().sections["Spec"]


def test_curves_name_their_final_value():
    labels = [svg["aria-label"] for svg in page_of(make_points(60, restart=31)).named("svg") if "role" in svg]
    assert [label.split(" over")[0] for label in labels] == [
        "Training loss",
        "Throughput",
        "Learning rate",
        "Peak memory",
        "Gradient norm",
    ]
    assert "final value 1.00 GiB" in labels[3].replace("\xa0", " ")
    assert "evaluation before 7.021; evaluation after 2.713; 1\xa0restart" in labels[0]


def test_no_gradient_norm_no_curve():
    page = page_of([replace(point, grad_norm=None) for point in make_points(5)])
    assert "Gradient norm" not in page.sections["Curves"]


def test_restart_is_marked_where_the_attempt_changes():
    said = page_of(make_points(60, restart=31)).sections["Curves"]
    assert "restart: a new attempt begins with step 31" in said
    assert "restart" not in page_of(make_points(60)).sections["Curves"]


def test_losses_that_are_not_finite_are_gaps_and_named():
    losses = [3.0, 2.9, math.nan, 2.8, math.inf, 2.7, 2.6, -math.inf]
    page = page_of(with_losses(losses))
    assert "3 steps without a finite value, shown as a gap: 3, 5, 8" in page.sections["Curves"].replace("\xa0", " ")
    line, dot = page.named("path")[:2]
    assert line["d"].count("M") == 2
    assert dot["class"] == "dots"
    assert dot["d"].count("h0") == 1


def test_no_drawable_loss_leaves_the_other_curves():
    page = page_of(with_losses([math.nan, math.nan]), eval_loss_before=None, eval_loss_after=None)
    assert len([svg for svg in page.named("svg") if "role" in svg]) == 4


@pytest.mark.parametrize(
    "points",
    [
        [],
        make_points(1),
        with_losses([2.0] * 30),
        with_losses([0.0] * 3),
        with_losses([1e300, 1e99, -1e99, 5e-324]),
        [replace(point, memory_bytes=0, tokens_per_second=0.0, learning_rate=0.0) for point in make_points(2)],
        [replace(point, attempt=point.step) for point in make_points(40)],
    ],
    ids=["none", "one", "constant", "zero", "extreme", "all-zero", "restart-every-step"],
)
def test_every_number_of_a_drawing_is_finite(points):
    page = page_of(points)
    inside = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height")
    for tag, attributes in page.tags:
        for name in inside:
            if name in attributes and attributes[name].endswith("%"):
                assert -0.01 <= float(attributes[name][:-1]) <= 100.01, (tag, attributes)
        if tag == "path":
            values = [float(value) for value in re.findall(r"[^MLh ]+", attributes["d"])]
            assert all(0 <= value <= 4000 for value in values)
    assert "No step was recorded" in page.sections["Curves"] or points


HOSTILE = "</div></pre><script>alert(1)</script><img src=x onerror=alert(1)> &amp; \"'> \x00\x1b[31m \ud800 \u202e"


def assert_harmless(page):
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe", "object", "link", "base", "a"})
    assert not any(name.startswith("on") or name == "style" for _, attributes in page.tags for name in attributes)


def test_text_of_models_and_users_is_escaped():
    sample = Sample.model_construct(prompt=HOSTILE, reference=HOSTILE, before=HOSTILE, after=HOSTILE)
    html = render_report(
        RECORD.model_copy(
            update={
                "name": HOSTILE,
                "device": HOSTILE,
                "checkpoint": HOSTILE,
                "samples": (sample,),
                "kernels": {HOSTILE: 1},
                "versions": {HOSTILE: HOSTILE},
                "warmup": {"failed": [{"name": HOSTILE, "signature": HOSTILE, "error": HOSTILE}]},
                "data": {HOSTILE: 1},
            }
        ),
        make_points(3),
        HOSTILE,
    )
    html.encode("utf-8")
    page = Page(html)
    assert_harmless(page)
    shown = page.sections["Samples"]
    assert shown.count("<script>alert(1)</script>") == 4
    assert "&amp;" in shown
    assert "\ufffd\ufffd[31m \ufffd" in shown
    assert not re.search(r"[\x00\x1b]", html)


def test_names_of_metrics_and_tasks_are_escaped():
    """They are in attributes too: a chart is described by its label."""
    points = [replace(point, metrics={HOSTILE: 1.0}) for point in make_points(3)]
    scores = (
        TaskScore(task="a", metric="b", before=0.1, after=0.2).model_copy(update={"task": HOSTILE, "metric": HOSTILE}),
    )
    changes = {"eval_metrics": {HOSTILE: 1.0}, "task_scores": scores, "loss_unit": HOSTILE, "spec_hash": HOSTILE}
    html = render_report(RECORD.model_copy(update=changes), points, SPEC)
    page = Page(html)
    assert_harmless(page)
    assert any("<script>" in svg.get("aria-label", "") for svg in page.named("svg"))
    assert not re.search(r"[\x00\x1b]", html)
    html.encode("utf-8")


def test_a_comparison_is_escaped():
    html = render_comparison(HOSTILE, [HOSTILE], [Trial(HOSTILE, (HOSTILE,), RECORD), Trial("b", (1,), RECORD)])
    page = Page(html)
    assert_harmless(page)
    html.encode("utf-8")


def test_a_chart_is_escaped():
    page = Page(render_chart(Chart(HOSTILE, HOSTILE, [1, 2], [1.0, 2.0])))
    assert_harmless(page)
    assert len([svg for svg in page.named("svg") if "role" in svg]) == 1


def test_addresses_are_text_not_links():
    page = page_of(device="javascript:alert(1)", checkpoint="https://example.com/a?b=1&c=<2>")
    assert_harmless(page)
    assert ("checkpoint", "https://example.com/a?b=1&c=<2>") in page.tables["Completion record"]


def test_a_template_without_a_value_raises():
    with pytest.raises(UndefinedError, match="'figure' is undefined"):
        render("chart.html")


def test_templates_are_in_the_wheel(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "from tasks.runtime import report; from tasks.runtime.report.svg.chart import Chart;"
        "print(report.__file__, report.render_chart(Chart('Loss', '', [1, 2], [1.0, 2.0])))"
    )
    path = os.pathsep.join(map(str, (tmp_path / "installed", ROOT / "platform", ROOT / "kernels")))
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(tmp_path / "installed"))
    assert ".strata-report h1" in ended.stdout and "</svg>" in ended.stdout


def test_nothing_is_loaded_from_elsewhere():
    html = render_report(RECORD, make_points(60, restart=31), SPEC)
    assert not re.search(r"https?:|//\w|url\(|@import|src=|href=|srcset", html)
    assert "default-src 'none'; style-src 'unsafe-inline'" in [
        meta.get("content") for meta in Page(html).named("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    ]


def test_body_stands_inside_another_page():
    body = render_body(RECORD, make_points(3), SPEC)
    page = Page(body)
    assert {tag for tag, _ in page.tags}.isdisjoint({"html", "head", "body", "meta"})
    assert body in render_report(RECORD, make_points(3), SPEC)
    assert not any("id" in attributes for _, attributes in page.tags)


def test_style_reaches_nothing_outside_the_report():
    rules = re.sub(r"/\*.*?\*/|@[^{]+\{", "", STYLE)
    selectors = [selector for group in re.findall(r"([^{}]+)\{", rules) for selector in group.split(",")]
    assert selectors
    assert all(selector.strip().startswith(".strata-report") for selector in selectors)
    assert STYLE.count("{") == STYLE.count("}")


def test_the_page_has_the_reports_background():
    page = (TEMPLATES / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"background: (#\w+)", page) == [LIGHT["back"], DARK["back"]]


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(colors):
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one, other):
        dark, light = sorted((luminance(colors[one]), luminance(colors[other])))
        return (light + 0.05) / (dark + 0.05)

    for name in ("ink", "muted", "good", "bad"):
        assert min(contrast(name, "back"), contrast(name, "panel")) >= 4.5, name
    assert min(contrast("accent", "back"), contrast("mark", "back")) >= 3


def test_headings_and_tables_are_accessible():
    page = page_of(make_points(3))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    assert {cell.get("scope") for cell in page.named("th")} == {"col", "row"}


def test_samples_of_evaluations_stand_between_before_and_after():
    """Four of them at most: the best one, and the last of each part of the run."""
    evaluations = tuple(
        Evaluated(step=step, loss=1.0, samples=(f"text of step {step}",) if step != 30 else ())
        for step in range(10, 101, 10)
    )
    record = RECORD.model_copy(update={"evaluations": evaluations, "best_step": 40})
    [excerpts], _ = samples(record)
    assert [(excerpt.label, excerpt.text) for excerpt in excerpts[2:]] == [
        ("Before training", "ng ng"),
        ("After step 20", "text of step 20"),
        ("After step 40, the best", "text of step 40"),
        ("After step 70", "text of step 70"),
        ("After step 100", "text of step 100"),
        ("After training", "Return a function."),
    ]
    text = Page(render_report(record, [], SPEC)).sections["Samples"]
    assert text.index("text of step 40") < text.index("text of step 100") < text.index("Return a function.")
    [excerpts], _ = samples(record.model_copy(update={"evaluations": evaluations[:1], "best_step": None}))
    assert [excerpt.label for excerpt in excerpts[3:]] == ["After step 10", "After training"]


def test_many_long_samples_stay_within_the_size_limit():
    long = Sample(prompt="p" * 20_000, reference="r" * 20_000, before="&" * 20_000, after="")
    html = render_report(RECORD.model_copy(update={"samples": (long,) * 64}), [], SPEC)
    page = Page(html)
    assert len(html) < 500_000
    assert "56 more samples" in page.sections["Samples"]
    assert "19,375 more characters in record.json" in page.sections["Samples"]
    assert "empty" in page.sections["Samples"]


def test_a_long_run_is_rendered_fast_and_small():
    points = make_points(100_000, restart=5_000)
    points[70_000] = replace(points[70_000], loss=91.5)
    started = time.process_time()
    html = render_report(RECORD, points, SPEC)
    assert time.process_time() - started < 2
    assert len(html) < 500_000
    assert "highest 91.50" in html
    assert max(attributes["d"].count("L") for attributes in Page(html).named("path")) < 1000


@pytest.mark.parametrize("n", [0, 1, 999, 1000, 1001, 4567])
def test_thin_keeps_the_extremes(n):
    noise = random.Random(n)
    values = [noise.gauss(0, 1) for _ in range(n)]
    if n > 1000:
        values[n // 3] = math.nan
    kept = downsample(values)
    finite = [index for index in kept if math.isfinite(values[index])]
    assert len(finite) <= 1000
    assert kept == sorted(set(kept)) == downsample(values)
    assert kept == list(range(n)) if n <= 1000 else {0, n - 1, n // 3} <= set(kept)
    if n:
        whole = [value for value in values if math.isfinite(value)]
        assert {min(whole), max(whole)} <= {values[index] for index in finite}


def test_smooth_is_a_mean_that_skips_gaps():
    assert smooth([1.0, 2.0, 6.0, 4.0], 1) == [1.0, 3.0, 4.0, 5.0]
    means = smooth([1.0, math.nan, 3.0], 1)
    assert means[0] == 1.0
    assert math.isnan(means[1])
    assert means[2] == 3.0


@pytest.mark.parametrize(
    ("values", "from_zero", "labels"),
    [
        ((2.9, 7.0), False, ("2", "4", "6", "8")),
        ((12_000.0, 25_100.0), True, ("0", "10\xa0k", "20\xa0k", "30\xa0k")),
        ((0.0021, 0.0), True, ("0", "1e-3", "2e-3", "3e-3")),
        ((0.62,), True, ("0", "0.2", "0.4", "0.6", "0.8")),
        ((0.0,), True, ("0", "0.25", "0.50", "0.75", "1.00")),
    ],
    ids=["loss", "si", "powers", "gib", "zero"],
)
def test_axis_has_round_ticks_around_the_values(values, from_zero, labels):
    axis = value_axis(values, from_zero=from_zero)
    assert axis.labels == labels
    assert axis.ticks[0] <= min(values) <= max(values) <= axis.end


def test_step_axis_ends_at_the_last_step():
    axis = step_axis(1234)
    assert axis.labels == ("0", "250", "500", "750", "1,000")
    assert axis.at(1234) == 1.0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (numbers.number(8266.4), "8,266"),
        (numbers.number(-0.002), "\u22122.00e-3"),
        (numbers.number(1.5e9), "1.50\xa0G"),
        (numbers.number(0.0), "0"),
        (numbers.duration(8.44), "8.4\xa0s"),
        (numbers.duration(3840), "1\xa0h 04\xa0min"),
        (numbers.duration(2 * 86400 + 3 * 3600), "2\xa0d 3\xa0h"),
        (numbers.duration(59.99), "1\xa0min 00\xa0s"),
        (numbers.gib(3 << 29), "1.50\xa0GiB"),
        (numbers.change(2.0, 2.0), "0.0\xa0%"),
    ],
)
def test_numbers(written, expected):
    assert written == expected


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """
<body onload="
  const frame = document.querySelector('iframe').contentWindow, page = frame.document;
  const boxes = [...page.querySelectorAll('svg text, td, th, .text, h1, dd')].map(box => box.getBoundingClientRect());
  document.title = [page.documentElement.scrollWidth, frame.innerWidth,
    Math.floor(Math.min(...boxes.map(box => box.left))), Math.ceil(Math.max(...boxes.map(box => box.right))),
    frame.getComputedStyle(page.querySelector('.strata-report .tiles')).display].join(' ')">
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to measure the page")
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_overflows_in_a_browser(width, tmp_path):
    word = "x" * 300
    sample = Sample(prompt=word, reference=word, before=word, after=word)
    record = RECORD.model_copy(
        update={
            "name": "a" * 53,
            "samples": (sample,),
            "checkpoint": f"out/{word}",
            "versions": {"torch": word},
            "warmup": {
                "failed": [{"name": word, "signature": word, "error": word}],
                "compiled": [asdict(Compiled("k" * 40, "x=*bfloat16, " * 20, 1.0, False))],
            },
        }
    )
    report = render_report(record, make_points(1234, restart=600), f"key: {word}")
    page = tmp_path / "page.html"
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{escape(report)}"></iframe>'
    page.write_text(f"<!doctype html><html>{MEASURE}{frame}</body></html>", encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--no-first-run", "--disable-sync", "--disable-component-update", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    environment = {**os.environ, "HOME": str(tmp_path)}
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment).stdout
    measured = re.search(r"<title>(\d+) (\d+) (-?\d+) (-?\d+) (\w+)</title>", dumped)
    assert measured is not None, dumped[:500]
    scroll, inner, left, right = map(int, measured.groups()[:4])
    assert inner == width
    assert scroll <= inner
    assert left >= 0
    assert right <= inner
    assert measured.group(5) == "grid"
