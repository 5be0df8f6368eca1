"""Metrics of each process for Prometheus: that of local rank i serves them on `tracking.prometheus_port` + i."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from strata_platform.spec import RunSpec
from tasks.runtime.metrics import Point
from tasks.runtime.processes import Processes

log = logging.getLogger(__name__)

# What is served of the last step on record, by its name there. All processes serve the same.
_OF_A_STEP = {
    "step": ("strata_step", "Optimizer steps done."),
    "loss": ("strata_loss", "Mean loss of the last step: of its target tokens, in nats, or of what it counts."),
    "learning_rate": ("strata_learning_rate", "Learning rate of the last step."),
    "grad_norm": ("strata_grad_norm", "Global gradient norm of the last step, before clipping."),
    "tokens": ("strata_tokens", "Tokens since the run's first step, padding included."),
    "tokens_per_second": ("strata_tokens_per_second", "Tokens that all processes train on in a second."),
    "step_seconds": ("strata_step_seconds", "Seconds that a step takes."),
    "mfu": ("strata_mfu_ratio", "Model FLOPs utilization of all devices, 0 to 1."),
}


class Prometheus:
    """The values, and the endpoint that serves them."""

    def __init__(self, spec: RunSpec, processes: Processes, warmup: Mapping[str, Any]) -> None:
        """A port that is taken costs the endpoint and a warning. `warmup` is the report of this pod's warm-up."""
        assert spec.tracking.prometheus_port is not None
        self._registry = CollectorRegistry()
        self._labels = {"run": spec.name, "rank": str(processes.rank), "framework": spec.runtime.framework}
        self._of_a_step = {field: self._gauge(*told) for field, told in _OF_A_STEP.items()}
        self._target = self._gauge("strata_target_steps", "Optimizer steps that the run is to do.")
        self._memory = self._gauge(
            "strata_memory_peak_bytes",
            "Peak so far of this process: allocated on the GPU, resident on the CPU.",
        )
        self._data_wait = self._counter("strata_data_wait_seconds", "Seconds that this process waited for its data.")
        self._saving = self._counter("strata_checkpoint_seconds", "Seconds that training stood still for checkpoints.")
        kernels = self._gauge(
            "strata_warmup_kernels", "Kernels of this pod's warm-up, by what became of them.", "state"
        )
        for state, number in _kernels(warmup).items():
            kernels.labels(**self._labels, state=state).set(number)
        self._serve(spec.tracking.prometheus_port + processes.local_rank)

    def begin(self, steps: int) -> None:
        """The run is to do so many steps."""
        self._target.labels(**self._labels).set(steps)

    def report(self, point: Point, *, memory_bytes: int, data_wait_seconds: float) -> None:
        """A step is on record; the memory, and the wait since the last report, are this process's own."""
        for field, gauge in self._of_a_step.items():
            value = getattr(point, field)
            if value is not None:
                gauge.labels(**self._labels).set(value)
        self._memory.labels(**self._labels).set(memory_bytes)
        self._data_wait.labels(**self._labels).inc(data_wait_seconds)

    def saved(self, seconds: float) -> None:
        """Training stood still for so long."""
        self._saving.labels(**self._labels).inc(seconds)

    def close(self) -> None:
        """Serve no longer."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _serve(self, port: int) -> None:
        self._server: Any = None
        try:
            self._server, self._thread = start_http_server(port, registry=self._registry)
        except OSError as error:
            log.warning(
                "tracking.prometheus_port: no metrics are served by this process, because it cannot listen on port %d "
                "(%s); choose another port, of which a pod takes one for each of its processes",
                port,
                error,
            )

    def _gauge(self, name: str, said: str, *labels: str) -> Gauge:
        return Gauge(name, said, (*self._labels, *labels), registry=self._registry)

    def _counter(self, name: str, said: str) -> Counter:
        return Counter(name, said, tuple(self._labels), registry=self._registry)


def _kernels(warmup: Mapping[str, Any]) -> dict[str, int]:
    """Counts of a warm-up report; none where nothing was warmed up, or by another process of the pod."""
    if "planned" not in warmup:
        return {}
    hits = sum(kernel["hit"] for kernel in warmup["compiled"])
    return {
        "planned": warmup["planned"],
        "compiled": len(warmup["compiled"]) - hits,
        "hit": hits,
        "failed": len(warmup["failed"]),
    }
