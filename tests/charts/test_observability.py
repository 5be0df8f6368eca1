"""Alerts and dashboards: every expression can be read, and every metric in them is one that is served."""

import json
import re

import pytest
from prometheus_client import CollectorRegistry

from strata_platform.chart import node_health
from strata_platform.doctor.gpu_health import Fault
from strata_platform.doctor.nvml import Xid
from strata_platform.spec import RunSpec
from tasks.runtime.metrics.trackers.prometheus import Prometheus
from tasks.runtime.process.ranks import Processes
from tests.charts.conftest import CHART
from tests.charts.helpers.promql import read

DASHBOARDS = sorted(CHART.glob("dashboards/*.json"))
RULES = (CHART / "templates" / "observability" / "rules.yaml").read_text()
# Kueue's, as pkg/metrics/metrics.go of 0.19 has them.
KUEUE = {
    "kueue_pending_workloads": {"cluster_queue", "status", "replica_role"},
    "kueue_admitted_active_workloads": {"cluster_queue"},
    "kueue_admission_wait_time_seconds_bucket": {"cluster_queue", "priority_class", "le"},
    "kueue_local_queue_status": {"name", "namespace", "exported_namespace", "active"},
    "kueue_preempted_workloads_total": {"preempting_cluster_queue", "reason"},
}
# kube-state-metrics'.
OF_NODES = {"kube_node_info": {"node"}}


def of_rules():
    """Expressions of the alerts, with durations and numbers in place of values."""
    found = re.findall(
        r"- alert: (\w+)\n(?:\s+#[^\n]*\n)*\s+expr: (?:>-\n)?(.*?)\n\s+(?:for|labels): ", RULES, re.DOTALL
    )

    def of_value(value):
        return "15m" if value[1].endswith(("After", "Over")) else "0.5"

    return {f"alert {name}": re.sub(r"\{\{ \.(\w+) \}\}", of_value, expression) for name, expression in found}


def of_dashboards():
    return {
        f"{path.stem}, {panel['title']}, {target['refId']}": target["expr"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }


EXPRESSIONS = of_rules() | of_dashboards()


@pytest.fixture(scope="module")
def served():
    """What a training process serves, with the labels of each."""
    spec = RunSpec.model_validate({"tracking": {"prometheus_port": 39400}})
    kernel = {"name": "k", "seconds": 0.1, "hit": True}
    counts = ("cache_hits", "graphs_found", "graphs_compiled", "plan_seconds", "later_compiles")
    warmup = {"planned": 1, "compiled": [kernel], "failed": [], **dict.fromkeys(counts, 1)}
    metrics = Prometheus(spec, Processes(), lambda: warmup)
    try:
        families = list(metrics._registry.collect())
    finally:
        metrics.close()
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    # The namespace is a label of the target.
    common = {"run", "rank", "framework", "namespace"}
    return {name: labels.get(name, common) | common for name in names} | of_nodes() | KUEUE | OF_NODES


def of_nodes():
    """What the health check of GPU nodes serves."""
    registry = CollectorRegistry()
    metrics = node_health.Metrics("n", registry)
    metrics.add_xid(Xid(0, 79))
    metrics.update([Fault(0, "xid", "XID 79", "reboot")])
    return {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}


def test_all_expressions_are_looked_at():
    assert len(of_rules()) == RULES.count("- alert:") == 12
    assert len(of_dashboards()) > 15


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_expressions_read_metrics_that_are_there(served, where):
    selectors, grouped = read(EXPRESSIONS[where])
    assert selectors
    for selector in selectors:
        assert selector.metric in served, selector.metric
        assert set(selector.labels) <= served[selector.metric]
    assert grouped <= set.union(*(served[selector.metric] for selector in selectors))


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(a)",
        "rate(a[5m]",
        "a[5m]",
        "sum by (x) a",
        "nothing(a)",
        "a{b=c}",
        "a{b}",
        "a b",
        "1 and a",
        "a[5]",
        "sum(1)",
        "a +",
    ],
)
def test_what_prometheus_refuses_is_not_read(wrong):
    with pytest.raises(SyntaxError):
        read(wrong)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_whole(path):
    board = json.loads(path.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    # Any Prometheus may be chosen, and what is used as a variable is one.
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", path.read_text())) <= variables
