"""The section `kernels`: the fused operators, their warm-up and the store of compiled kernels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.sections.fields import Count, Flag, FolderOrUrl, Section, number

Operator = Literal[
    "rms_norm",
    "layer_norm",
    "rope",
    "swiglu",
    "geglu",
    "relu_squared",
    "gelu",
    "silu",
    "experts",
    "linear_cross_entropy",
]


class KernelStore(Section):
    """A store of compiled kernels that pods share. Pods execute its contents: anyone with write access can run code."""

    url: FolderOrUrl | None = Field(
        None,
        description="Folder that all pods mount, or an object store such as `s3://bucket/path`; by default the "
        "cluster's store, if it has one.",
    )
    signing_key: Annotated[str, Field(pattern=r"^(env|file):.+$")] | None = Field(
        None,
        description="Key that signs archives: `env:NAME` or `file:PATH` in the pods, at least 32 bytes. Archives "
        "without this key's signature are rejected.",
    )
    allow_unsigned: Flag = Field(
        False, description="Without a signing key, use archives although they have no signature."
    )
    size_limit_mb: Count = Field(
        10240, description="Maximum size in MiB. Above it, the least recently used archives are removed."
    )
    timeout: Annotated[float, Field(gt=0), BeforeValidator(number)] = Field(
        60.0,
        description="Total seconds that a pod may wait for the store. After that, it compiles the remaining kernels.",
    )


class Kernels(Section):
    """The fused operators, and compiling them before training starts."""

    enabled: Literal["auto"] | Flag = Field(
        "auto",
        description="Replace the model's modules with fused operators. `auto`: those that are proven equal; other "
        "modules keep the model's own code. `true`: a model that cannot use all operators is rejected. `false`: no "
        "module.",
    )
    exclude: tuple[Operator, ...] = Field((), description="Operators that do not replace the model's modules.")
    warmup: Flag = Field(True, description="Compile the run's kernels once per pod, before its processes start.")
    warmup_timeout: Count = Field(
        600, description="Maximum seconds of the warm-up. After that, training starts without the remaining kernels."
    )
    store: KernelStore = Field(default_factory=KernelStore, description="Store of compiled kernels that pods share.")
