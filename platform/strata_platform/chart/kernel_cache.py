"""Values of what makes pods start warm: kernels baked for a tenant's models, and images that nodes have already."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strata_platform.chart.tenants import Toleration
from strata_platform.chart.value_fields import Labels, OptionalDnsName, Path, Quantities, Values

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$")]
"""A name or a path without commas and spaces."""


class Bake(Values):
    """A Job per tenant that compiles the kernels of models that are not baked into the image. It needs no GPU."""

    claim: OptionalDnsName = Field("", description="Claim of the tenant that keeps them; all its pods mount it.")
    path: Path = Field("/var/lib/strata/kernels", description="Where it is mounted.")
    models: tuple[Word, ...] = Field(
        (),
        description="All that the tenants train: presets, or paths of a config.json in the image or on the claim. "
        "Pods use these in place of the image's own; empty bakes none.",
    )
    archs: Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        ("sm_90",), description="Architectures: sm_90 is H100 and H200, sm_100 B200."
    )
    resources: Quantities = Field({"cpu": "8", "memory": "16Gi"}, description="Requests and limits of the Job.")


class Prepull(Values):
    """A DaemonSet that does nothing but have the image, with the kernels baked into it, on every node that trains."""

    enabled: bool = Field(False, description="Create it.")
    node_selector: Labels = Field({}, description="Labels of the nodes; empty for all.")
    tolerations: tuple[Toleration, ...] = Field(
        (Toleration(key="nvidia.com/gpu"),), description="Taints of those nodes."
    )
    resources: Quantities = Field({"cpu": "1m", "memory": "16Mi"}, description="Requests and limits of each pod.")


class Store(Values):
    """Compiled kernels that pods share, for runs whose spec names no `kernels.store`. It is run: so it is signed."""

    url: str = Field(
        "", description="Folder that all pods mount, or an object store such as `s3://bucket/path`; empty for none."
    )
    secret: OptionalDnsName = Field(
        "",
        description="Secret of each tenant whose `KERNEL_STORE_KEY`, 32 bytes or more, signs the archives. Pods start "
        "without it, too, and leave the store alone then.",
    )


class Kernels(Values):
    """Pods that start warm."""

    store: Store = Field(Store(), description="Compiled kernels that pods share.")
    bake: Bake = Field(Bake(), description="Kernels for models that are not in the image.")
    prepull: Prepull = Field(Prepull(), description="The image on every node before a run needs it.")
