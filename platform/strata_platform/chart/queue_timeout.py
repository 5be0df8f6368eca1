"""The chart's CronJob that ends runs without prospect: `python -m strata_platform.chart.queue_timeout`.

`strata submit` and the first task of a run reject what no queue can admit. A run can still come to wait for ever: by
`--force`, because a quota became smaller, or because Kueue has given it up. The chart passes the tenants as JSON in the
variable STRATA_QUEUE_TIMEOUT, and Flyte's address in those of Flyte's own clients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel

from strata_platform.backends.api_errors import translated_errors
from strata_platform.backends.flyte_admin import FlyteAdmin
from strata_platform.backends.flyte_config import FlyteConfig
from strata_platform.backends.kubernetes import KubernetesBackend
from strata_platform.backends.kubernetes_objects import Namespace, is_given_up, is_over_time
from strata_platform.chart.value_fields import duration
from strata_platform.errors import BackendError, RunNotFound, StrataError
from strata_platform.kubernetes_answers import condition_of
from strata_platform.kubernetes_api import Object

VARIABLE = "STRATA_QUEUE_TIMEOUT"


class Tenant(BaseModel):
    """Where a tenant's runs are, in Kubernetes and in Flyte."""

    namespace: str
    project: str
    domain: str
    job_sets: bool
    """Whether somebody may submit runs without Flyte."""


class Settings(BaseModel):
    """What the chart says."""

    after: str
    """As in the values."""
    flyte: bool
    """Whether there is a Flyte."""
    tenants: list[Tenant]

    @property
    def longest(self) -> timedelta:
        """How long a run may wait."""
        longest = duration(self.after)
        assert longest is not None, "the chart makes no CronJob without queues.timeout.after"
        return longest


Find = Callable[[datetime], Mapping[str, Object]]
"""The workloads without prospect since a time, by execution."""
End = Callable[[str, str], object]
"""Ends an execution, with a cause."""


def end_hopeless_runs(settings: Settings, now: datetime) -> Iterator[str]:
    """End every run that has waited too long and can never be admitted; says of each what was ended and why.

    Raises BackendError, after all others, if one could not be ended or a tenant not be read.
    """
    failed: list[StrataError] = []
    before = now - settings.longest
    for namespace, find, end in _origins(settings):
        try:
            hopeless = find(before)
        except StrataError as error:
            failed.append(error)
            continue
        for execution, workload in hopeless.items():
            cause = f"{_cause(workload)}, for longer than queues.timeout.after, {settings.after}"
            try:
                with translated_errors(f"to end {execution}"):
                    end(execution, cause)
            except RunNotFound:
                # Somebody has removed it meanwhile.
                continue
            except StrataError as error:
                failed.append(error)
                continue
            yield f"{namespace}: {execution} is ended: {cause}"
    if failed:
        raise BackendError("; ".join(map(str, failed)))


def _origins(settings: Settings) -> Iterator[tuple[str, Find, End]]:
    """How runs are found and ended, for each namespace and each way that runs come to be in it."""
    config = FlyteConfig.read() if settings.flyte else None
    for tenant in settings.tenants:
        if config is not None:
            admin = FlyteAdmin(config, tenant.project, tenant.domain)
            yield tenant.namespace, Namespace(tenant.namespace).hopeless, admin.terminate
        if tenant.job_sets:
            alone = KubernetesBackend(tenant.namespace)
            yield tenant.namespace, alone.hopeless, alone.end


def _cause(workload: Object) -> str:
    """Why a run waits for ever, and the way out."""
    queue = workload["spec"].get("queueName")
    if is_given_up(workload):
        why = (condition_of(workload, "Evicted") or {}).get("message", "")
        way = "raise resources.time_limit" if is_over_time(workload) else "look at the events of its pods and nodes"
        return f"Kueue has taken the run out of queue {queue} ({why}); {way}; it has waited"
    why = (condition_of(workload, "QuotaReserved") or {}).get("message", "")
    return f"no quota of queue {queue} is large enough ({why}); ask for less, or for a larger quota; it has waited"


if __name__ == "__main__":
    for line in end_hopeless_runs(Settings.model_validate_json(os.environ[VARIABLE]), datetime.now(UTC)):
        print(line, flush=True)
