"""The section `faults`: health checks, hangs, and steps that must not be taken."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.sections.fields import Count, Flag, Integer, Section, number


class Faults(Section):
    """Health checks, hangs, and steps that must not be taken."""

    hang_timeout: Integer = Field(
        600,
        ge=0,
        le=1800,
        description="Seconds that a step may take. After that, every process writes its stacks and ends, and the run "
        "resumes from its last checkpoint. The first step, and one that waits for a checkpoint, may take "
        "three times as long. 0: no limit.",
    )
    health_check: Flag = Field(
        True,
        description="Check every GPU's memory, arithmetic and connections before anything is loaded. An unfit one "
        "ends the attempt; the error names it and its node.",
    )
    min_free_memory: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] = Field(
        0.8, description="Share of each GPU's memory that must be free at the start."
    )
    min_bandwidth: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None,
        description="Minimum bus bandwidth of an all-reduce over all processes at the start, GB/s, as nccl-tests "
        "report it. By default it is measured without a limit.",
    )
    nonfinite: Literal["skip", "rollback", "stop"] | None = Field(
        None,
        description="What to do if a step's loss or gradients are NaN or infinite; such a step is never taken. `skip` "
        "continues with the next one; `rollback` returns to the last checkpoint and skips the data since; "
        "`stop` ends the run. The default is `skip`, and `stop` with `optimizer.in_backward`.",
    )
    spike: Literal["ignore", "skip", "rollback", "stop"] = Field(
        "ignore",
        description="What to do if a step's loss is far above the losses before it; such a step is not taken either. "
        "`ignore` takes it.",
    )
    spike_deviations: Annotated[float, Field(gt=0), BeforeValidator(number)] = Field(
        6.0,
        description="Distance from the median of the losses before that makes a spike, in standard deviations "
        "estimated from the median absolute deviation.",
    )
    spike_window: Integer = Field(
        100, ge=8, le=10000, description="Number of taken steps to compare with; the first ones are never spikes."
    )
    max_skips: Count = Field(10, description="Maximum number of steps skipped in a row; one more ends the run.")
    max_rollbacks: Count = Field(3, description="Maximum number of rollbacks; one more ends the run.")
