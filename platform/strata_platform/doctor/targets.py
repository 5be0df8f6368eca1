"""Where the doctor looks, and at what."""

from __future__ import annotations

from collections.abc import Iterator

from strata_platform.doctor import machine_checks
from strata_platform.doctor.finding import Check

TARGETS = {
    "laptop": "where runs are submitted from",
    "image": "inside a container of the image that trains",
    "node": "on a machine, or in a pod, that is to train",
    "cluster": "the cluster of the current kubeconfig context, or the one this pod is in",
}


def checks_of(target: str) -> Iterator[Check]:
    """What is looked at in one of `TARGETS`."""
    if target == "cluster":
        # Loaded where it is wanted: the kubernetes client is an extra of this package.
        from strata_platform.doctor import cluster_checks

        return cluster_checks.checks()
    here = machine_checks.Machine.here()
    return iter([(name, lambda look=look: look(here)) for name, look in machine_checks.CHECKS[target]])
