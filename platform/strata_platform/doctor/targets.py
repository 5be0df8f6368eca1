"""The targets of the doctor and their checks."""

from __future__ import annotations

from collections.abc import Iterator

from strata_platform.doctor.finding import Check

TARGETS = {
    "laptop": "the machine that submits runs",
    "image": "inside a container of the training image",
    "node": "a machine or a pod that will train",
    "cluster": "the cluster of the current kubeconfig context, or of this pod",
}


def checks_of(target: str, *, with_flyte: bool = True) -> Iterator[Check]:
    """The checks of one of `TARGETS`; without Flyte, none of its parts is missed."""
    if target == "cluster":
        # Imported here: the kubernetes client is an extra of this package.
        from strata_platform.doctor import cluster_checks

        return cluster_checks.checks(with_flyte=with_flyte)
    # Imported here: every command loads this module for the names of the targets.
    from strata_platform.doctor import machine_checks

    here = machine_checks.Machine.here()
    found = [each for each in machine_checks.CHECKS[target] if with_flyte or each[1] not in machine_checks.OF_FLYTE]
    return iter([(name, lambda look=look: look(here)) for name, look in found])
