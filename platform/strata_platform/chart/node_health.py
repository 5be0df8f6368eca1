"""The chart's DaemonSet that watches GPUs: `python -m strata_platform.chart.node_health`.

Each round it asks NVML for the state of every GPU of the node, which uses no GPU memory and disturbs no run; XIDs
arrive between rounds. Faults become the node's condition `GpuUnhealthy`, an event, metrics, and a taint, so that no
other run starts there. Runs on the node continue. The taint is removed after RECOVERY_ROUNDS rounds without a fault.

An XID is an event, not a state: its taint stays until the node is rebooted or someone removes it with
`kubectl taint node NAME strata/gpu-unhealthy-`. The same holds for a missing GPU that does not come back, because
feature discovery soon counts one less. Without the taint, only this process knows of such faults; a new pod does not.

The chart passes the settings as JSON in the variable STRATA_NODE_HEALTH, and the node's name in NODE_NAME.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from urllib3.exceptions import HTTPError

from strata_platform.chart.value_fields import duration
from strata_platform.doctor.gpu_health import CONDITION, Fault, driver_fault, faults, xid_fault
from strata_platform.doctor.nvml import Nvml, NvmlError, NvmlMissing, Xid
from strata_platform.kubernetes_answers import condition_of
from strata_platform.kubernetes_api import Access, ApiError, KubernetesApi, Object

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

VARIABLE, NODE = "STRATA_NODE_HEALTH", "NODE_NAME"
TAINT = "strata/gpu-unhealthy"

# Rounds in a row in which a transient fault must be seen before it is reported. Other faults are reported at once.
PATIENCE = 3
MAY_PASS = ("slowdown", "pcie", "nvlink")
# Rounds without a finding after which a node is healthy again.
RECOVERY_ROUNDS = 10
# Rounds without a driver after which the process ends. A container gets the files of its devices when it starts.
BLIND_ROUNDS = 10
# The kubelet and controllers change the node, too; a change that conflicts with theirs is tried again.
_ATTEMPTS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STANDING = re.compile(r"gpu-(\d+)\.([a-z-]+?)(?:-(\d+)(?:\.boot-([0-9a-f]{8}))?)?")


class Settings(BaseModel):
    """The settings from the chart."""

    taint: bool
    interval: str
    port: int

    @property
    def seconds(self) -> float:
        """Seconds from one round to the next."""
        found = duration(self.interval)
        assert found is not None, "the schema lets no empty interval pass"
        return found.total_seconds()


class FaultTracker:
    """Decides, from the faults seen in each round, which ones to report."""

    def __init__(self) -> None:
        self._standing: list[Fault] = []
        self._xids: dict[int, Fault] = {}
        self._fresh: list[Fault] = []
        self._rounds: dict[tuple[int, str], int] = {}
        self._healthy_rounds = 0

    def resume(self, standing: Sequence[Fault]) -> None:
        """Continue with the faults for which the node is already tainted."""
        self._standing = list(standing)
        self._xids = {fault.gpu: fault for fault in standing if fault.kind == "xid"}

    def add_xid(self, fault: Fault) -> None:
        """Report an XID from now on."""
        self._fresh.append(fault)

    def clear_reported(self) -> None:
        """Drop the faults that were reported: someone removed the taint. An XID that was not reported yet stays."""
        self._xids.clear()
        self._standing.clear()

    def mark_reported(self) -> None:
        """The node's condition shows all current faults."""
        self._xids = self._all_xids()
        self._fresh.clear()

    def _all_xids(self) -> dict[int, Fault]:
        return {fault.gpu: fault for fault in self._fresh} | self._xids

    def count(self, seen: Sequence[Fault]) -> list[Fault]:
        """The faults to report after a round that found `seen`; those of XIDs first."""
        self._rounds = {(fault.gpu, fault.kind): self._rounds.get((fault.gpu, fault.kind), 0) + 1 for fault in seen}
        lasting = [
            fault
            for fault in seen
            if self._rounds[fault.gpu, fault.kind] >= (PATIENCE if fault.kind in MAY_PASS else 1)
        ]
        xids = self._all_xids()
        counted = [*xids.values(), *lasting]
        self._healthy_rounds = 0 if seen or xids else self._healthy_rounds + 1
        if counted or self._healthy_rounds >= RECOVERY_ROUNDS:
            self._standing = counted
        return self._standing


@dataclass(frozen=True)
class Node:
    """The node in Kubernetes. Methods raise ApiError and urllib3's HTTPError."""

    api: KubernetesApi
    name: str
    boot: str
    """Identifies the current boot."""

    def get(self) -> Object:
        """The node."""
        return self.api.get(f"/api/v1/nodes/{self.name}")

    def standing(self, node: Object) -> list[Fault]:
        """The fault for which the node is tainted, unless it was an XID of an earlier boot."""
        value = next((taint.get("value", "") for taint in _taints(node) if taint["key"] == TAINT), None)
        match = _STANDING.fullmatch(value or "")
        if match is None:
            return []
        gpu, kind, number, boot = int(match[1]), match[2], int(match[3]) if match[3] else None, match[4]
        if kind == "xid":
            if boot != self.boot[:8] or number is None:
                return []
            known = xid_fault(Xid(gpu, number))
            return [known or Fault(gpu, "xid", f"XID {number}, as found before", "", number)]
        return [Fault(gpu, kind, f"{kind}, as found before", "", number)]  # type: ignore[arg-type]

    def report(self, found: Sequence[Fault], *, taint: bool) -> bool:
        """Set condition and taint to what is found, and send an event about a change. Returns whether it changed."""
        self._change("", lambda node: self._with_taint(node, found if taint else ()))
        changed = self._change("/status", lambda node: _with_condition(node, found))
        if changed:
            self._send_event(found)
        return changed

    def _with_taint(self, node: Object, found: Sequence[Fault]) -> Object | None:
        before = _taints(node)
        after = [taint for taint in before if taint["key"] != TAINT]
        if found:
            after.append({"key": TAINT, "value": self._value(found[0]), "effect": "NoSchedule"})
        return None if after == before else {"spec": {"taints": after or None}}

    def _value(self, fault: Fault) -> str:
        number = "" if fault.number is None else f"-{fault.number}"
        return f"gpu-{fault.gpu}.{fault.kind}{number}" + (f".boot-{self.boot[:8]}" if fault.kind == "xid" else "")

    def _change(self, part: str, change: Callable[[Object], Object | None]) -> bool:
        for attempt in range(_ATTEMPTS):
            node = self.get()
            patch = change(node)
            if patch is None:
                return False
            # A patch replaces a list as a whole, so it must not apply to a newer version of the node.
            patch["metadata"] = {"resourceVersion": node["metadata"]["resourceVersion"]}
            try:
                self.api.request("PATCH", f"/api/v1/nodes/{self.name}{part}", patch)
            except ApiError as error:
                if error.status != 409 or attempt == _ATTEMPTS - 1:
                    raise
                continue
            return True
        return False

    def _send_event(self, found: Sequence[Fault]) -> None:
        now = _now()
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self.name}.", "namespace": "default"},
            # As the kubelet's events of nodes, which is how kubectl finds them.
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": self.name, "uid": self.name},
            "type": "Warning" if found else "Normal",
            "reason": CONDITION if found else "GpuHealthy",
            "message": _message(found)[:1024],
            "source": {"component": "strata-node-health", "host": self.name},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self.api.request("POST", "/api/v1/namespaces/default/events", event)


def _taints(node: Object) -> list[Object]:
    found: list[Object] = node["spec"].get("taints") or []
    return found


def _with_condition(node: Object, found: Sequence[Fault]) -> Object | None:
    conditions = node["status"].get("conditions") or []
    before = condition_of(node, CONDITION) or {}
    status, reason = ("True", _reason(found[0])) if found else ("False", "GpusHealthy")
    now = _now()
    wanted = {"type": CONDITION, "status": status, "reason": reason, "message": _message(found)}
    if all(before.get(key) == value for key, value in wanted.items()):
        return None
    since = before["lastTransitionTime"] if before.get("status") == status else now
    wanted |= {"lastHeartbeatTime": now, "lastTransitionTime": since}
    return {"status": {"conditions": [*(each for each in conditions if each["type"] != CONDITION), wanted]}}


def _reason(fault: Fault) -> str:
    return "".join(word.capitalize() for word in fault.kind.split("-"))


def _message(found: Sequence[Fault]) -> str:
    if not found:
        return "no GPU of this node has a fault"
    way = found[0].advice
    return "; ".join(map(str, found)) + (f". {way[0].upper()}{way[1:]}" if way else "")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Metrics:
    """Prometheus metrics of this node."""

    def __init__(self, node: str, registry: CollectorRegistry) -> None:
        # What the training image has; the package itself does without.
        from prometheus_client import Counter, Gauge

        self._node = node
        self.healthy = Gauge(
            "strata_node_gpus_healthy", "1 if no GPU of the node has a fault.", ["node"], registry=registry
        )
        self.faults = Gauge(
            "strata_node_gpu_faults", "Faults of a GPU, by kind.", ["node", "gpu", "kind"], registry=registry
        )
        self.xids = Counter(
            "strata_node_gpu_xids", "XIDs of a GPU, of applications too.", ["node", "gpu", "xid"], registry=registry
        )
        self.checked = Gauge(
            "strata_node_gpus_checked_timestamp_seconds",
            "When the GPUs were last checked and the node was updated; 0 before.",
            ["node"],
            registry=registry,
        )
        self.checked.labels(node).set(0)

    def add_xid(self, xid: Xid) -> None:
        """The driver has reported an error."""
        self.xids.labels(self._node, xid.index, xid.number).inc()

    def update(self, found: Sequence[Fault]) -> None:
        """The GPUs were looked at."""
        self.healthy.labels(self._node).set(not found)
        self.faults.clear()
        for fault in found:
            self.faults.labels(self._node, fault.gpu, fault.kind).inc()

    def reported(self) -> None:
        """The node's condition is up to date."""
        self.checked.labels(self._node).set_to_current_time()


class Watch:
    """Checks the GPUs in rounds, and waits for XIDs in between."""

    def __init__(
        self, connect: Callable[[], Node], open_nvml: Callable[[], Nvml], settings: Settings, metrics: Metrics
    ) -> None:
        """`connect` reads the credentials again: Kubernetes replaces them while the pod runs."""
        self._connect, self._open, self._settings, self._metrics = connect, open_nvml, settings, metrics
        self._nvml: Nvml | None = None
        self._tracker = FaultTracker()
        self._resumed = self._tainted = False
        self._expected = 0
        self.blind_rounds = 0
        """Rounds in a row in which the driver did not work."""

    def round(self) -> list[Fault]:
        """Check the GPUs and report. Returns the faults that were reported.

        Raises ApiError and urllib3's HTTPError if the node cannot be read or changed; metrics show the faults then.
        """
        try:
            kubernetes = self._read_node()
        finally:
            found = self._tracker.count(self._look())
            self._metrics.update(found)
        if kubernetes.report(found, taint=self._settings.taint):
            print(_message(found), flush=True)
        self._tracker.mark_reported()
        self._tainted = bool(found) and self._settings.taint
        self._metrics.reported()
        return found

    def _read_node(self) -> Node:
        """Read the node: faults reported earlier, whether its taint was removed, and its number of GPUs."""
        kubernetes = self._connect()
        node = kubernetes.get()
        if not self._resumed:
            standing = kubernetes.standing(node)
            self._tracker.resume(standing)
            self._expected = max((fault.number or 0 for fault in standing if fault.kind == "missing"), default=0)
            self._resumed = True
        if self._tainted and not any(taint["key"] == TAINT for taint in _taints(node)):
            print("the taint was removed by hand: faults that were reported before are dropped", flush=True)
            self._tracker.clear_reported()
            self._expected = 0
        # Feature discovery counts only the GPUs that are present, so a missing GPU would soon look normal.
        self._expected = max(self._expected, _counted(node))
        return kubernetes

    def _look(self) -> list[Fault]:
        """The faults of this moment. Raises NvmlMissing."""
        try:
            if self._nvml is None:
                self._nvml = self._open()
                for index, why in self._nvml.register().items():
                    print(f"GPU {index}: XIDs are not seen: {why}", flush=True)
        except NvmlError as error:
            self._close()
            self.blind_rounds += 1
            return [driver_fault(error)]
        self.blind_rounds = 0
        return faults(self._nvml.gpus(), self._expected or None)

    def _close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def wait(self, seconds: float) -> None:
        """Wait for XIDs; return at once after one that means a fault."""
        end = time.monotonic() + seconds
        # In short waits: while the library waits, no signal is handled.
        while (left := end - time.monotonic()) > 0:
            began = time.monotonic()
            try:
                for xid in self._nvml.xids(min(left, 1.0)) if self._nvml is not None else ():
                    print(f"GPU {xid.index}: XID {xid.number}", flush=True)
                    self._metrics.add_xid(xid)
                    fault = xid_fault(xid)
                    if fault is not None:
                        self._tracker.add_xid(fault)
                        return
            except NvmlError as error:
                # The next round opens NVML again, and reports a failure.
                print(f"XIDs cannot be waited for: {error}", flush=True)
                self._close()
            # A lost GPU ends a wait at once.
            time.sleep(max(0.0, min(left, 1.0) - (time.monotonic() - began)))


def _counted(node: Object) -> int:
    """How many GPUs feature discovery has counted; 0 if it has not. With MIG's single strategy it counts slices."""
    labels: dict[str, Any] = node["metadata"].get("labels") or {}
    count = labels.get("nvidia.com/gpu.count", "")
    return int(count) if count.isdigit() and labels.get("nvidia.com/mig.strategy") != "single" else 0


def main() -> None:
    """Watch until SIGTERM."""
    from prometheus_client import CollectorRegistry, start_http_server

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = Settings.model_validate_json(os.environ[VARIABLE])
    name, boot = os.environ[NODE], _BOOT.read_text(encoding="ascii").strip()

    def connect() -> Node:
        return Node(KubernetesApi(Access.of_environment()), name, boot)

    # Before the first round, so that metrics also show a process whose rounds fail.
    registry = CollectorRegistry()
    watch = Watch(connect, Nvml, settings, Metrics(name, registry))
    start_http_server(settings.port, registry=registry)
    while True:
        try:
            watch.round()
        except NvmlMissing as error:
            # Not a fault of the node: its state is unknown.
            sys.exit(
                f"NVML cannot be loaded: {error}; set nodeHealth.runtimeClass, or nodeHealth.nodeSelector to GPU nodes"
            )
        except (ApiError, HTTPError) as error:
            # XIDs are kept until the next round. The metric's timestamp shows that the node was not updated.
            print(f"the node cannot be changed: {error}", flush=True)
        if watch.blind_rounds >= BLIND_ROUNDS:
            sys.exit(
                f"the driver has not worked in {BLIND_ROUNDS} rounds: exiting, so that the container is started again"
            )
        watch.wait(settings.seconds)


if __name__ == "__main__":
    main()
