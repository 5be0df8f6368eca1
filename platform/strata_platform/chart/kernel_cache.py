"""Values for fast pod starts: kernels baked for a tenant's models, and images pulled in advance."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strata_platform.chart.tenants import Toleration
from strata_platform.chart.value_fields import FolderOrUrl, Labels, OptionalDnsName, Path, Quantities, Values

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$")]
"""A name or path without commas and spaces."""


class Bake(Values):
    """A Job per tenant that compiles the kernels of models that are not in the image. It needs no GPU."""

    claim: OptionalDnsName = Field(
        "", description="Claim in the tenant's namespace that stores the kernels; all pods of the tenant mount it."
    )
    path: Path = Field("/var/lib/strata/kernels", description="Mount path of the claim.")
    models: tuple[Word, ...] = Field(
        (),
        description="All models that the tenants train: presets, or paths of a config.json in the image or on the "
        "claim. Pods use these kernels instead of the image's. Empty: nothing is compiled.",
    )
    archs: Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        ("sm_90",), description="GPU architectures: sm_90 is H100 and H200, sm_100 is B200."
    )
    resources: Quantities = Field({"cpu": "8", "memory": "16Gi"}, description="Requests and limits of the Job.")


class Prepull(Values):
    """A DaemonSet that pulls the image, with its baked kernels, to every training node."""

    enabled: bool = Field(False, description="Create the DaemonSet.")
    node_selector: Labels = Field({}, description="Labels of the nodes; empty: all nodes.")
    tolerations: tuple[Toleration, ...] = Field(
        (Toleration(key="nvidia.com/gpu"),), description="Tolerations of the DaemonSet's pods."
    )
    resources: Quantities = Field({"cpu": "1m", "memory": "16Mi"}, description="Requests and limits of each pod.")


class Store(Values):
    """Compiled kernels that pods share, unless a spec sets `kernels.store`. Sign them, because pods execute them."""

    url: FolderOrUrl = Field(
        "", description="Folder that all pods mount, or an object store such as `s3://bucket/path`; empty: no store."
    )
    secret: OptionalDnsName = Field(
        "",
        description="Secret in each tenant's namespace with the key `KERNEL_STORE_KEY`, at least 32 bytes, which signs "
        "the archives. Without the Secret, pods start and do not use the store.",
    )


class Kernels(Values):
    """Fast pod starts: compiled kernels and pulled images."""

    store: Store = Field(Store(), description="Compiled kernels that pods share.")
    bake: Bake = Field(Bake(), description="Kernels of models that are not in the image.")
    prepull: Prepull = Field(Prepull(), description="Pull the image to every node before a run needs it.")
