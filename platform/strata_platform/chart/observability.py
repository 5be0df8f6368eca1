"""Values for monitoring: metrics, alerts and dashboards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strata_platform.chart.value_fields import DnsName, Duration, Labels, Values

Share = Annotated[float, Field(gt=0, lt=1)]


class Alerts(Values):
    """Thresholds of the alerts. Each alert says what to look at."""

    enabled: bool = Field(True, description="Create the PrometheusRule.")
    labels: Labels = Field({}, description="Additional labels of every alert, for routing.")
    stalled_after: Duration = Field("15m", description="Time without a step after which a run counts as stalled.")
    slow_below: Share = Field(
        0.7, description="A run counts as slow below this share of its median speed over `speedOver`."
    )
    slow_after: Duration = Field(
        "15m", description="Window over which the speed is averaged, and time for which it must stay that low."
    )
    speed_over: Duration = Field("6h", description="Window over which a run's median speed is computed.")
    data_wait: Share = Field(0.2, description="Maximum share of the time that a process may wait for data.")
    checkpoint_after: Duration = Field("2h", description="Maximum time that a run may train without a checkpoint.")
    queued_after: Duration = Field("1h", description="Maximum time that a queue may have waiting runs.")
    stuck_after: Duration = Field("15m", description="Maximum time that a queue may have waiting runs and admit none.")


class Dashboards(Values):
    """Grafana dashboards, as ConfigMaps that Grafana's sidecar finds."""

    enabled: bool = Field(True, description="Create the ConfigMaps.")
    labels: Labels = Field(
        {"grafana_dashboard": "1"}, description="Labels by which Grafana's sidecar finds dashboards."
    )


class Observability(Values):
    """Objects for the Prometheus Operator and Grafana. Runs serve metrics if `tracking.prometheus_port` is set."""

    enabled: bool = Field(
        False, description="Create the objects of this section. They need the Prometheus Operator's custom resources."
    )
    namespace: DnsName = Field(
        "monitoring", description="Prometheus's namespace. Its pods may connect to the metrics ports."
    )
    labels: Labels = Field(
        {},
        description="Labels by which Prometheus selects PodMonitors and rules. Not those of `app.kubernetes.io/` and "
        "`helm.sh/`.",
    )
    # The bounds of that field, which leave a port for each of the 64 processes.
    port: Annotated[int, Field(ge=1024, le=65472)] = Field(
        9400,
        description="Port of the first process of a pod. Set `tracking.prometheus_port` in runs to the same number.",
    )
    processes: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Maximum number of processes per pod; each has its own port."
    )
    interval: Duration = Field("30s", description="Scrape interval.")
    alerts: Alerts = Field(Alerts(), description="Thresholds of the alerts.")
    dashboards: Dashboards = Field(Dashboards(), description="Grafana dashboards.")
