"""What the pods of the steps that do not train request; those that train request the spec's `resources`."""

from __future__ import annotations

from typing import NamedTuple


class PodSize(NamedTuple):
    """Request and limit of a pod, as quantities of Kubernetes."""

    cpu: tuple[str, str]
    memory: tuple[str, str]


# Tasks that only check and wire.
CONTROL = PodSize(cpu=("500m", "2"), memory=("1Gi", "4Gi"))
# Tokenizing: fits on a small node and uses what a large one has.
PREPARE = PodSize(cpu=("1", "8"), memory=("2Gi", "32Gi"))
