"""Prometheus metrics of each process: local rank i serves them on port `tracking.prometheus_port` + i."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# Metrics of the last recorded step, by its field. All processes serve the same values.
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

# Metrics of the warm-up: name, help text, label, and the label's values with their names in the metadata.
_OF_WARMUP = (
    (
        "strata_warmup_kernels",
        "Kernels of this pod's warm-up, by what became of them.",
        "state",
        {
            "planned": "planned",
            "cache": "cache_hits",
            "image": "image_hits",
            "store": "store_hits",
            "compiled": "compiled",
            "failed": "failed",
        },
    ),
    (
        "strata_warmup_seconds",
        "Seconds before training: planning, making kernels ready, of that waiting for the store, loading modules.",
        "part",
        {"plan": "plan_seconds", "kernels": "seconds", "store": "store_seconds", "modules": "module_wait_seconds"},
    ),
    (
        "strata_warmup_graphs",
        "Graphs of torch.compile, by whether this process found or compiled them.",
        "state",
        {"found": "graphs_found", "compiled": "graphs_compiled", "not_kept": "graphs_not_kept"},
    ),
)


class Prometheus:
    """The metrics, and the endpoint that serves them."""

    def __init__(self, spec: RunSpec, processes: Processes, warmup: Callable[[], Mapping[str, Any]]) -> None:
        """If the port is taken, there is a warning and no endpoint. `warmup` returns the current metadata at each
        scrape.
        """
        assert spec.tracking.prometheus_port is not None
        self._registry = CollectorRegistry()
        self._labels = {"run": spec.name, "rank": str(processes.rank), "framework": spec.runtime.framework}
        self._of_a_step = {field: self._gauge(*named) for field, named in _OF_A_STEP.items()}
        self._target = self._gauge("strata_target_steps", "Optimizer steps that the run is to do.")
        self._memory = self._gauge(
            "strata_memory_peak_bytes",
            "Peak so far of this process: allocated on the GPU, resident on the CPU.",
        )
        self._data_wait = self._counter("strata_data_wait_seconds", "Seconds that this process waited for its data.")
        self._saving = self._counter("strata_checkpoint_seconds", "Seconds that training stood still for checkpoints.")
        self._evaluating_now = self._gauge("strata_evaluating", "1 during an evaluation, when no step is made.")
        self._eval_loss = self._gauge("strata_eval_loss", "Validation loss of the last evaluation during training.")
        self._evaluating = self._counter("strata_eval_seconds", "Seconds that training stood still for evaluations.")
        self._skipped = self._counter("strata_skipped_steps", "Steps not taken, for their loss or gradients.")
        self._rollbacks = self._counter("strata_rollbacks", "Returns to a checkpoint, to pass over data.")
        self._registry.register(_Warmup(self._labels, warmup))
        self._serve(spec.tracking.prometheus_port + processes.local_rank)

    def begin(self, steps: int) -> None:
        """Set the number of steps of the run."""
        self._target.labels(**self._labels).set(steps)
        # Without a 0 first, Prometheus would not see the increase to 1, nor that nothing has been saved yet.
        for counter in (self._skipped, self._rollbacks, self._saving):
            counter.labels(**self._labels)

    def report(self, points: Sequence[MetricPoint], *, memory_bytes: int, data_wait_seconds: float) -> None:
        """Update to recorded steps; memory and data wait, since the last report, are those of this process."""
        self._skipped.labels(**self._labels).inc(sum(point.skipped for point in points))
        for field, gauge in self._of_a_step.items():
            value = getattr(points[-1], field)
            if value is not None:
                gauge.labels(**self._labels).set(value)
        self._memory.labels(**self._labels).set(memory_bytes)
        self._data_wait.labels(**self._labels).inc(data_wait_seconds)

    def rolled_back(self) -> None:
        """Count a rollback."""
        self._rollbacks.labels(**self._labels).inc()

    def evaluating(self) -> None:
        """An evaluation begins."""
        self._evaluating_now.labels(**self._labels).set(1)

    def evaluated(self, loss: float, seconds: float) -> None:
        """Set the validation loss, and add seconds in which training stood still for it."""
        self._evaluating_now.labels(**self._labels).set(0)
        self._eval_loss.labels(**self._labels).set(loss)
        self._evaluating.labels(**self._labels).inc(seconds)

    def saved(self, seconds: float) -> None:
        """Add seconds in which training stood still for a checkpoint."""
        self._saving.labels(**self._labels).inc(seconds)

    def close(self) -> None:
        """Stop the endpoint."""
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
                "tracking.prometheus_port: this process serves no metrics, because it cannot listen on port %d (%s); "
                "choose another port, the first of one for each process of a pod",
                port,
                error,
            )

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, tuple(self._labels), registry=self._registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, tuple(self._labels), registry=self._registry)


class _Warmup(Collector):
    """Collects the warm-up's metadata at each scrape. Only the pod's first process has those of the pod."""

    def __init__(self, labels: Mapping[str, str], report: Callable[[], Mapping[str, Any]]) -> None:
        self._labels, self._report = labels, report

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One metric family for each row of the table, and late compiles."""
        report = {**self._report()}
        for name in ("compiled", "failed"):
            if name in report:
                report[name] = sum(not kernel.get("hit") for kernel in report[name])
        for name, help_text, label, keys in _OF_WARMUP:
            family = GaugeMetricFamily(name, help_text, labels=(*self._labels, label))
            for value, key in keys.items():
                if key in report:
                    family.add_metric((*self._labels.values(), value), report[key])
            yield family
        missed = GaugeMetricFamily(
            "strata_warmup_later_misses",
            "Kernels that this process had to compile during training.",
            labels=tuple(self._labels),
        )
        missed.add_metric(tuple(self._labels.values()), report["later_compiles"])
        yield missed
