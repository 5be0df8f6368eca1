"""Reads a cluster for the doctor's checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from strata_platform.kubernetes_api import KubernetesApi

TENANT = "strata/tenant"
"""The chart's label of a tenant's namespace."""


class ClusterReader:
    """Reads a cluster through its API server, each object once. `with_flyte`: whether runs are to be Flyte's."""

    def __init__(self, with_flyte: bool) -> None:
        self.with_flyte = with_flyte

    @cached_property
    def api(self) -> KubernetesApi:
        """A client of the kubeconfig's current context, or of the pod's own cluster.

        Raises ImportError if this package was installed without its extra `cluster`.
        """
        from strata_platform.kubernetes_api import Access, KubernetesApi

        return KubernetesApi(Access.of_environment())

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """The object at `path`."""
        found: dict[str, Any] = self.api.get(path, **query)
        return found

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """The items of the list at `path`."""
        found: list[dict[str, Any]] = self.get(path, **query)["items"]
        return found

    @cached_property
    def deployments(self) -> list[dict[str, Any]]:
        """All deployments."""
        return self.items("/apis/apps/v1/deployments")

    def deployments_running(self, name: str) -> list[dict[str, Any]]:
        """Deployments with `name` in the name of one of their images."""
        return [d for d in self.deployments if any(name in image for image in images_of(d))]

    def configurations(self, name: str) -> Iterator[dict[str, Any]]:
        """The YAML mappings in the config maps of the namespaces that have deployments of `name`."""
        for namespace in {d["metadata"]["namespace"]: None for d in self.deployments_running(name)}:
            for config_map in self.items(f"/api/v1/namespaces/{namespace}/configmaps"):
                for text in (config_map.get("data") or {}).values():
                    if isinstance(found := _yaml(text), dict):
                        yield found

    @cached_property
    def flyte(self) -> Mapping[str, Any]:
        """Flyte's configuration, merged from all of its files."""
        merged: dict[str, Any] = {}
        for part in self.configurations("flyte"):
            merged = _merged(merged, part)
        return merged

    @cached_property
    def kubernetes_plugin(self) -> Mapping[str, Any]:
        """The part of Flyte's configuration that says how it makes pods."""
        found: Mapping[str, Any] = (self.flyte.get("plugins") or {}).get("k8s") or {}
        return found

    @cached_property
    def tenants(self) -> dict[str, dict[str, str]]:
        """The namespaces that the chart labels as a tenant's, with their labels."""
        found = self.items("/api/v1/namespaces", labelSelector=TENANT)
        return {item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in found}


def images_of(deployment: Mapping[str, Any]) -> list[str]:
    """The images of a deployment's containers."""
    return [container["image"] for container in deployment["spec"]["template"]["spec"]["containers"]]


def _merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(left)
    for key, value in right.items():
        mine = both.get(key)
        both[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return both


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None
