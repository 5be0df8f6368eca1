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
    """A store of compiled kernels that pods share. Pods execute its contents: who can write there can act as a pod."""

    url: FolderOrUrl | None = Field(
        None,
        description="Folder that all pods mount, or an object store such as `s3://bucket/path`; by default the "
        "cluster's store, if it has one.",
    )
    signing_key: Annotated[str, Field(pattern=r"^(env|file):.+$")] | None = Field(
        None,
        description="Key that signs archives, 32 bytes or more: `env:NAME` or `file:PATH` in the pods. Archives "
        "without its signature are refused.",
    )
    allow_unsigned: Flag = Field(False, description="Use archives without a signature, if there is no signing key.")
    size_limit_mb: Count = Field(10240, description="MiB; above it, the least recently used archives are removed.")
    timeout: Annotated[float, Field(gt=0), BeforeValidator(number)] = Field(
        60.0, description="Total seconds that a pod waits for the store before it compiles."
    )


class Kernels(Section):
    """The fused operators, and compiling them before training starts."""

    enabled: Literal["auto"] | Flag = Field(
        "auto",
        description="Replace the model's modules with the fused operators: `auto` where they are proven equal, with "
        "the model's own code elsewhere; `true` refuses a model that cannot use all of them; `false` replaces nothing.",
    )
    exclude: tuple[Operator, ...] = Field((), description="Operators not to replace.")
    warmup: Flag = Field(True, description="Compile the run's kernels once per pod before its processes start.")
    warmup_timeout: Count = Field(
        600, description="Seconds after which training starts without the rest of the warm-up."
    )
    store: KernelStore = Field(default_factory=KernelStore, description="Store of compiled kernels that pods share.")
