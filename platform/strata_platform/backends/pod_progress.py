"""What the objects, the logs and the record of a run on Kubernetes say of its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strata_platform import progress_line
from strata_platform.backends.api_errors import translated_errors
from strata_platform.backends.backend import eval_loss, parse_points, with_progress
from strata_platform.backends.kubernetes_objects import Namespace, RunStatus
from strata_platform.backends.pod_logs import line_of, main_pods, read_log
from strata_platform.kubernetes_api import Object
from strata_platform.runs import MetricPoint, Phase, Run, Stage


class PodProgress:
    """The progress that rank 0 reported; values that it reports only once are remembered."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def read(self, run: Run, namespace: Namespace, pods: Sequence[Object], execution: str) -> Run:
        """The run with the progress in the log of its main pod."""
        known = self._known.setdefault(execution, {})
        last: list[MetricPoint] = []
        for pod in main_pods(pods):
            seen = known.get("pod") == pod["metadata"]["uid"]
            values = reported(namespace, pod, last=200 if seen else None)
            if not seen:
                known |= {"pod": pod["metadata"]["uid"], "stage": run.stage or Stage.STARTING}
            for value in values:
                known |= {key: value[key] for key in ("stage", "steps", "attempt", "stopped_early") if key in value}
                known |= {"eval_loss": eval_loss(value["evaluation"])} if "evaluation" in value else {}
            last = list(parse_points(value["point"] for value in values if "point" in value))
            if run.stage in (Stage.STARTING, Stage.EVALUATING):
                run = replace(run, stage=Stage(known["stage"]))
        run = replace(
            run,
            steps=known.get("steps"),
            restarts=known.get("attempt", run.restarts),
            eval_loss=known.get("eval_loss"),
            stopped_early=known.get("stopped_early"),
        )
        return with_progress(run, last)


def reported(namespace: Namespace, pod: Object, last: int | None = None) -> list[dict[str, Any]]:
    """The values of the progress lines in a pod's log; with `last`, of that many lines of its end."""
    with translated_errors(f"to read the log of {pod['metadata']['name']}"):
        raws = read_log(namespace, pod, follow=False, last=last)
        lines = [found[1].text for raw in raws if (found := line_of(pod, raw))]
    return [value for value in map(progress_line.decode, lines) if value is not None]


def with_status(run: Run, status: RunStatus) -> Run:
    """A run that has not ended, as its objects show it."""
    return replace(
        run,
        phase=Phase.QUEUED if status.stage is Stage.WAITING else run.phase,
        stage=status.stage,
        message=status.message,
        queue=status.queue,
        position=status.position,
    )


def with_record(run: Run, record: Mapping[str, Any]) -> Run:
    """A run that succeeded, with its completion record."""
    return replace(
        run,
        step=record["steps"],
        steps=record["steps_asked"],
        loss=record["train_loss"],
        eval_loss=record["eval_loss_after"],
        # Records of earlier versions do not have it.
        stopped_early=record["steps"] if record.get("stopped_early") else None,
        tokens_per_second=record["tokens_per_second"],
        restarts=record["restarts"],
    )
