"""Values of what is watched: which metrics are read, what people are told of, and where they look."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strata_platform.chart.value_fields import DnsName, Labels, Values

Duration = Annotated[str, Field(pattern=r"^[1-9][0-9]*(s|m|h|d)$")]
"""A duration as Prometheus writes it, such as 15m."""
Share = Annotated[float, Field(gt=0, lt=1)]


class Alerts(Values):
    """When people are told. Each alert says what to look at."""

    enabled: bool = Field(True, description="Create the PrometheusRule.")
    labels: Labels = Field({}, description="Further labels of every alert, for its routing.")
    stalled_after: Duration = Field("15m", description="A run that makes no step for so long has stalled.")
    low_utilization: Share = Field(0.7, description="Share of its own median of six hours below which a run is slow.")
    data_wait: Share = Field(0.2, description="Share of the time that a process may wait for its data.")
    checkpoint_after: Duration = Field("2h", description="A run that trains on for so long has to have saved.")
    queued_after: Duration = Field("1h", description="A queue may have runs waiting for so long.")


class Dashboards(Values):
    """Grafana's dashboards, as ConfigMaps that its sidecar finds."""

    enabled: bool = Field(True, description="Create them.")
    labels: Labels = Field({"grafana_dashboard": "1"}, description="Labels that the sidecar looks for.")


class Observability(Values):
    """What the Prometheus Operator and Grafana read. Runs serve metrics where `tracking.prometheus_port` is set."""

    enabled: bool = Field(
        False, description="Create the objects of this section; needs the Prometheus Operator's kinds."
    )
    namespace: DnsName = Field("monitoring", description="Where Prometheus runs; its pods may connect to the ports.")
    labels: Labels = Field({}, description="Labels that Prometheus selects PodMonitors and rules by.")
    # The bounds of that field, which leave a port for each of the most processes.
    port: Annotated[int, Field(ge=1024, le=65472)] = Field(9400, description="`tracking.prometheus_port` of the runs.")
    processes: Annotated[int, Field(ge=1, le=64)] = Field(8, description="Most processes of a pod; each has a port.")
    interval: Duration = Field("30s", description="How often metrics are read.")
    alerts: Alerts = Field(Alerts(), description="When people are told.")
    dashboards: Dashboards = Field(Dashboards(), description="Where people look.")
