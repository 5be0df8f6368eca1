"""The fused operators and where they come from compiled: the section `kernels`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.fields import Count, Flag, FolderOrUrl, Section, number


class KernelStore(Section):
    """Compiled kernels that pods share. What is in it is run: whoever can write there can do what the pods can."""

    url: FolderOrUrl | None = Field(
        None,
        description="Folder that all pods mount, or an object store such as `s3://bucket/path`; by default "
        "the cluster's, if it has one.",
    )
    signing_key: Annotated[str, Field(pattern=r"^(env|file):.+$")] | None = Field(
        None,
        description="Where pods find the key, of 32 bytes or more, that archives are signed with: `env:NAME` or "
        "`file:PATH`. What it has not signed is refused.",
    )
    allow_unsigned: Flag = Field(False, description="Without a signing key: use archives that nobody has signed.")
    size_limit_mb: Count = Field(10240, description="MiB; beyond them, what was not used for longest is removed.")
    timeout: Annotated[float, Field(gt=0), BeforeValidator(number)] = Field(
        60.0, description="Seconds that a pod waits for the store in all; then it compiles."
    )


class Kernels(Section):
    """The fused operators, and compiling them before training starts."""

    enabled: Flag = Field(True, description="Patch the model with the fused operators.")
    exclude: tuple[Literal["rms_norm", "rope", "swiglu", "geglu", "relu_squared", "linear_cross_entropy"], ...] = Field(
        (), description="Operators to leave as the model has them."
    )
    warmup: Flag = Field(True, description="Compile the run's kernels once per pod before its processes start.")
    warmup_timeout: Count = Field(600, description="Seconds after which the warm-up is given up and training starts.")
    store: KernelStore = Field(default_factory=KernelStore, description="Compiled kernels that pods share.")
