"""The section `faults`: health checks, hangs, and non-finite or spiking steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.sections.fields import Count, Flag, Integer, Section, number


class Faults(Section):
    """Health checks, hangs, and steps with a non-finite or spiking loss."""

    hang_timeout: Integer = Field(
        600,
        ge=0,
        le=1800,
        description="Maximum seconds of a step. After that, every process writes its stacks and exits, and the run "
        "resumes from its last checkpoint. The first step, each batch of an evaluation, a checkpoint and a rollback "
        "may take three times as long. 0: no limit.",
    )
    health_check: Flag = Field(
        True,
        description="Check the memory, arithmetic and connections of every GPU before anything is loaded. If a check "
        "fails, the attempt ends, and the error names the GPU and its node.",
    )
    min_free_memory: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] = Field(
        0.8, description="Minimum share of each GPU's memory that must be free at the start."
    )
    min_bandwidth: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None,
        description="Minimum bus bandwidth, in GB/s, of an all-reduce over all processes at the start, computed as "
        "nccl-tests does. By default the bandwidth is only measured.",
    )
    nonfinite: Literal["skip", "rollback", "stop"] | None = Field(
        None,
        description="What happens if a step's loss or gradients are NaN or infinite. `skip` drops the update and "
        "continues with the next step; `rollback` returns to the last checkpoint and skips the data since, or acts as "
        "`skip` before the first checkpoint; `stop` ends the run. The default is `skip`, or `stop` with "
        "`optimizer.in_backward`.",
    )
    spike: Literal["ignore", "skip", "rollback", "stop"] = Field(
        "ignore",
        description="What happens if a step's loss is far above the losses before it. `ignore`: nothing. The other "
        "values drop the update and act as in `nonfinite`.",
    )
    spike_deviations: Annotated[float, Field(gt=0), BeforeValidator(number)] = Field(
        6.0,
        description="A loss is a spike if it exceeds the median of the losses before it by more than this many "
        "standard deviations, estimated from the median absolute deviation.",
    )
    spike_window: Integer = Field(
        100,
        ge=8,
        le=10000,
        description="Number of earlier steps, without skipped ones, whose losses are compared. The first steps of a "
        "run, up to this number, are never spikes.",
    )
    max_skips: Count = Field(10, description="Maximum number of consecutive skipped steps; one more ends the run.")
    max_rollbacks: Count = Field(3, description="Maximum number of rollbacks; one more ends the run.")
