"""Alerts fire in the state that they are of, and in no other: promtool evaluates the rendered rules over series.

The series have the names and labels that Kueue 0.19 (pkg/metrics) and a training process print.
"""

import os
import shutil
import subprocess

import pytest
import yaml

from tests.charts.conftest import HELM

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
pytestmark = [
    pytest.mark.skipif(HELM is None, reason="no Helm on the PATH or in HELM"),
    pytest.mark.skipif(PROMTOOL is None, reason="no promtool on the PATH or in PROMTOOL"),
]

RUN = 'run="r",rank="0",framework="torch",execution_id="r",namespace="p-d",pod="w0"'
FOREVER = "x400"


def series(name, values, labels=RUN):
    return {"series": f"{name}{{{labels}}}", "values": values}


def pending(status, values, queue="q", role="leader"):
    return series("kueue_pending_workloads", values, f'cluster_queue="{queue}",status="{status}",replica_role="{role}"')


def run(step="0+10x400", evaluating=f"0{FOREVER}", checkpoints="0+1x400", target=f"5000{FOREVER}", **more):
    """A run that trains and saves, with what is given in place of that."""
    values = {
        "strata_step": step, "strata_target_steps": target, "strata_evaluating": evaluating,
        "strata_checkpoint_seconds_total": checkpoints, "strata_tokens_per_second": f"9000{FOREVER}",
        "strata_data_wait_seconds_total": "0+1x400", "strata_skipped_steps_total": f"0{FOREVER}",
        "strata_rollbacks_total": f"0{FOREVER}", "strata_warmup_later_misses": f"0{FOREVER}",
    } | more  # fmt: skip
    return [series(name, value) for name, value in values.items() if value is not None]


def kernels(state, number):
    return series("strata_warmup_kernels", f"{number}{FOREVER}", f'{RUN},state="{state}"')


def admitted(values, queue="q"):
    return series("kueue_admitted_active_workloads", values, f'cluster_queue="{queue}",replica_role="leader"')


def checked(values):
    """When the GPUs of a node were looked at, in seconds."""
    return series("strata_node_gpus_checked_timestamp_seconds", values, 'node="n",pod="p"')


def node(values):
    """What kube-state-metrics tells of a node."""
    return series("kube_node_info", values, 'node="n",kubelet_version="v1.34.1"')


def fault(values):
    return series("strata_node_gpu_faults", values, 'node="n",gpu="3",kind="ecc",pod="p"')


BUSY = admitted(f"1{FOREVER}")
IDLE = [pending(status, f"0{FOREVER}") for status in ("active", "inadmissible")]
HEALTHY = [*run(), *IDLE, checked("0+60x400"), kernels("hit", 8), kernels("compiled", 0), kernels("failed", 0)]
CASES = {
    "all is well": (HEALTHY, set()),
    "a run waits, and nothing runs that could make room": (
        [admitted(f"0{FOREVER}"), pending("active", f"0{FOREVER}"), pending("inadmissible", f"1{FOREVER}")],
        {"StrataQueueWaiting", "StrataQueueStuck"}),
    "another queue has runs": (
        [admitted(f"3{FOREVER}", "other"), pending("inadmissible", f"1{FOREVER}")],
        {"StrataQueueWaiting", "StrataQueueStuck"}),
    # Under BestEffortFIFO what does not fit is inadmissible, and nothing is active.
    "a run that does not fit waits": (
        [BUSY, pending("active", f"0{FOREVER}"), pending("inadmissible", f"2{FOREVER}")], {"StrataQueueWaiting"}),
    "a run is tried again and again": (
        [BUSY, pending("active", f"1{FOREVER}"), pending("inadmissible", f"0{FOREVER}")], {"StrataQueueWaiting"}),
    "it goes from one state to the other": (
        [BUSY, pending("active", "1 0 " * 200), pending("inadmissible", "0 1 " * 200)], {"StrataQueueWaiting"}),
    "the queue was emptied": ([pending("active", f"0{FOREVER}"), pending("inadmissible", "2x150 0x250")], set()),
    "a follower reports what it does not know": (
        [pending("inadmissible", f"0{FOREVER}"), pending("inadmissible", f"0{FOREVER}", role="follower")], set()),
    "a tenant's queue is held": (
        [series("kueue_local_queue_status", f"1{FOREVER}", 'exported_namespace="p-d",name="q",active="False"')],
        {"StrataQueueHeld"}),
    "a run makes no steps": (run(step="0+10x150 1500x250"), {"StrataRunStalled"}),
    "a run evaluates": (run(step="0+10x150 1500x250", evaluating="0x150 1x250"), set()),
    "a run is done": (run(step="0+10x150 1500x250", target=f"1500{FOREVER}"), set()),
    "a run never made a step": (run(step=None, checkpoints=None), {"StrataRunStalled"}),
    "a run is slower than it was": (run(strata_tokens_per_second="9000x350 4500x50"), {"StrataRunSlow"}),
    "a rank waits for data": (run(strata_data_wait_seconds_total="0+30x400"), {"StrataDataStarved"}),
    "a run saves nothing": (run(checkpoints="0+1x100 100x300"), {"StrataCheckpointTooOld"}),
    "a run never saved": (run(checkpoints=f"0{FOREVER}"), {"StrataCheckpointTooOld"}),
    "a run saves every hour": (run(checkpoints=" ".join([f"{hour}x59" for hour in range(7)])), set()),
    "a GPU has a fault": ([checked("0+60x400"), fault(f"1{FOREVER}")], {"StrataGpuFault"}),
    "a GPU had a fault": ([checked("0+60x400"), fault("1x100 stale")], set()),
    "GPUs are not looked at any more": ([checked("0+60x300 18000x100")], {"StrataGpusNotChecked"}),
    "GPUs were never looked at": ([checked(f"0{FOREVER}")], {"StrataGpusNotChecked"}),
    "a pod was started anew": ([checked("0+60x394 0")], set()),
    "a pod looks no more": ([checked("0+60x370 stale"), node(f"1{FOREVER}")], {"StrataGpusNotChecked"}),
    "a node was removed": ([checked("0+60x370 stale"), node("1x370 stale")], set()),
    "a step was skipped": (run(strata_skipped_steps_total="0x370 1x30"), {"StrataStepsSkipped"}),
    "a step was skipped long ago": (run(strata_skipped_steps_total="0x50 1x350"), set()),
    "a run returned to a checkpoint": (run(strata_rollbacks_total="0x370 1x30"), {"StrataStepsSkipped"}),
    "kernels were compiled at the start": ([*run(), kernels("compiled", 3)], {"StrataWarmupMissed"}),
    "kernels are compiled while it trains": (run(strata_warmup_later_misses=f"2{FOREVER}"), {"StrataCompiledLater"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def rules(helm, tmp_path_factory):
    """The rules as Prometheus reads them."""
    (rule,) = [item for item in helm.render("--set", "observability.enabled=true") if item["kind"] == "PrometheusRule"]
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    return file


def test_every_alert_has_a_state_in_which_it_fires(rules):
    named = {rule["alert"] for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]}
    assert set.union(*(fires for _, fires in CASES.values())) == named


@pytest.mark.parametrize("case", CASES)
def test_alerts_fire_in_their_state_alone(rules, tmp_path, case):
    given, fires = CASES[case]
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(fires)]
    at = {"expr": firing, "eval_time": "395m", "exp_samples": samples}
    test = {"interval": "1m", "input_series": given, "promql_expr_test": [at]}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    ended = subprocess.run([PROMTOOL, "test", "rules", file], text=True, capture_output=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
