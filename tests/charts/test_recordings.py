"""Alerts and panels over series that Prometheus has read from Kueue and from a run, in each state."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.charts.conftest import CHART, HELM
from tests.charts.helpers.promql import read
from tests.charts.test_alerts import PROMTOOL

pytestmark = [
    pytest.mark.skipif(HELM is None, reason="no Helm on the PATH or in HELM"),
    pytest.mark.skipif(PROMTOOL is None, reason="no promtool on the PATH or in PROMTOOL"),
]

RECORDINGS = Path(__file__).parent / "recordings"
# Thresholds for recordings of three minutes or less.
SHORT = {
    "stalledAfter": "30s", "checkpointAfter": "1m", "slowAfter": "20s", "speedOver": "3m", "queuedAfter": "20s",
    "stuckAfter": "20s",
}  # fmt: skip
# What fires at the end of each.
FIRES = {
    "busy": set(),
    "waiting": {"StrataQueueWaiting"},
    "preempted": {"StrataQueueWaiting"},
    "stuck": {"StrataQueueWaiting", "StrataQueueStuck"},
    "held": {"StrataQueueHeld"},
    "saved": set(),
    "unsaved": {"StrataCheckpointTooOld"},
    "stalled": {"StrataRunStalled"},
    # Its process was stopped for most of the time. It has no checkpoint yet either.
    "slow": {"StrataRunSlow", "StrataCheckpointTooOld"},
    "ended": set(),
}
SHOWN = {"runs": "saved", "queues": "preempted"}
# Metrics that a short run on CPUs does not serve.
ABSENT = {
    "strata_mfu_ratio", "strata_eval_loss", "strata_eval_seconds_total",
    "strata_warmup_kernels", "strata_warmup_seconds", "strata_warmup_graphs",
}  # fmt: skip


def evaluated(folder, name, expressions, rules=()):
    """promtool's answer: whether the expressions have these samples at the end of a recording."""
    recording = yaml.safe_load((RECORDINGS / f"{name}.yaml").read_text())
    interval = recording["interval"]
    end = f"{int(interval.removesuffix('s')) * (recording['samples'] - 1)}s"
    tests = [{"expr": text, "eval_time": end, "exp_samples": samples} for text, samples in expressions]
    test = {"interval": interval, "input_series": recording["series"], "promql_expr_test": tests}
    file = folder / "test.yaml"
    written = {"rule_files": [*map(str, rules)], "evaluation_interval": interval, "tests": [test]}
    file.write_text(yaml.safe_dump(written))
    ended = subprocess.run([PROMTOOL, "test", "rules", file], text=True, capture_output=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def rules(helm, tmp_path_factory):
    values = [word for name, value in SHORT.items() for word in ("--set", f"observability.alerts.{name}={value}")]
    rendered = helm.render("--set", "observability.enabled=true", *values)
    (rule,) = [item for item in rendered if item["kind"] == "PrometheusRule"]
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    return file


def test_every_recording_is_evaluated():
    assert set(FIRES) == {path.stem for path in RECORDINGS.glob("*.yaml")}


@pytest.mark.parametrize("name", FIRES)
def test_alerts_fire_in_their_state_alone(rules, tmp_path, name):
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(FIRES[name])]
    evaluated(tmp_path, name, [(firing, samples)], [rules])


@pytest.mark.parametrize("board", SHOWN)
def test_panels_have_lines(tmp_path, board):
    panels = json.loads((CHART / "dashboards" / f"{board}.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    shown = [text for text in expressions if not ABSENT & {selector.metric for selector in read(text)[0]}]
    assert len(shown) > len(expressions) / 2
    chosen = {"$__rate_interval": "40s", "$namespace": ".*", "$run": ".*"}
    shown = [re.sub("|".join(map(re.escape, chosen)), lambda name: chosen[name[0]], text) for text in shown]
    # What is not a number is no line.
    lines = [(f"count(({text}) > -Inf) > bool 0", [{"labels": "{}", "value": 1}]) for text in shown]
    evaluated(tmp_path, SHOWN[board], lines)
