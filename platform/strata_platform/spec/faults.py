"""What is watched for while a run trains, and what follows: the section `faults`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.fields import Count, Flag, Integer, Section, number


class Faults(Section):
    """What is watched for while a run trains, and what then follows."""

    hang_timeout: Integer = Field(
        600,
        ge=0,
        le=1800,
        description="Seconds that a step may take; then every process leaves its stacks and ends, and the run is "
        "continued from its last checkpoint. The first step, and one that waits for a checkpoint, may take three "
        "times as long. 0: no limit.",
    )
    health_check: Flag = Field(
        True,
        description="Look at every GPU's memory, arithmetic and connections before anything is loaded; one that is "
        "unfit ends the attempt, and is named with its node.",
    )
    min_free_memory: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] = Field(
        0.8, description="Share of a GPU's memory that must be free at the start."
    )
    min_bandwidth: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None,
        description="GB/s that an all-reduce over all processes must reach at the start: bus bandwidth, as NCCL's "
        "tests tell it. By default it is measured and not judged.",
    )
    nonfinite: Literal["skip", "rollback", "stop"] | None = Field(
        None,
        description="What follows a step whose loss or gradients are NaN or infinite. It is never taken. `skip` goes "
        "on with the next one; `rollback` goes back to the last checkpoint and passes over the data since; `stop` "
        "ends the run. By default `skip`, and `stop` under `optimizer.in_backward`.",
    )
    spike: Literal["ignore", "skip", "rollback", "stop"] = Field(
        "ignore",
        description="What follows a step whose loss is far above those before, which is not taken either; `ignore` "
        "takes it.",
    )
    spike_deviations: Annotated[float, Field(gt=0), BeforeValidator(number)] = Field(
        6.0,
        description="How far above is a spike: in standard deviations of the losses before, from their median, as "
        "told by the median distance from it.",
    )
    spike_window: Integer = Field(
        100, ge=8, le=10000, description="Losses of taken steps that are compared with; the first so many are no spike."
    )
    max_skips: Count = Field(10, description="Steps in a row that may be skipped; one more ends the run.")
    max_rollbacks: Count = Field(3, description="How often a run may go back; once more ends it.")
