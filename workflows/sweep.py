"""Many runs side by side: `pyflyte run workflows/sweep.py sweep --spec my.yaml --grid grid.yaml`.

# grid.yaml: every combination is a run
fields:
  optimizer.lr: [1.0e-4, 2.0e-4, 4.0e-4]
  adapter.r: [8, 16]
"""

from __future__ import annotations

from functools import partial
from typing import Optional

from flytekit import LaunchPlan, WorkflowFailurePolicy, dynamic, workflow

from strata_platform.spec import RunSpec
from strata_platform.spec.grid import Grid
from tasks.resources import CONTROL_TASK
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.sweep import Swept, compare, expand, name_failures, outcome, read_record
from workflows.finetune import finetune

DEFAULT = RunSpec(name="sweep")
LEARNING_RATES = Grid(fields={"optimizer.lr": [1e-3, 2e-3, 4e-3]})


@workflow
def one_run(spec: RunSpec) -> CompletionRecord:
    """A run of the sweep, which returns its completion record."""
    return read_record(record=finetune(spec=spec).record)


# A launch plan, because Flyte starts one as an execution of its own.
trial = LaunchPlan.get_or_create(one_run, name="workflows.sweep.trial")


# Dynamic: the grid decides the number of runs. Flyte registers the launch plans in the hints with the workflow.
@dynamic(**CONTROL_TASK, node_dependency_hints=[trial])
def run_all(runs: list[RunSpec]) -> list[Optional[CompletionRecord]]:  # noqa: UP045  # as Flyte reads types
    """Start all runs, each as an execution; on one machine one after the other."""
    return [outcome(partial(trial, spec=run)) for run in runs]


@workflow(failure_policy=WorkflowFailurePolicy.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE, on_failure=name_failures)
def sweep(spec: RunSpec = DEFAULT, grid: Grid = LEARNING_RATES) -> Swept:
    """Fine-tune once for each combination of the grid's values, and compare the results.

    A failed run does not stop the others. On one machine its row in the table is empty; on a cluster the sweep fails
    after all other runs are done, and its last task names the failed ones and writes the table of the others.
    """
    runs = expand(spec=spec, grid=grid)
    return compare(spec=spec, grid=grid, runs=runs, records=run_all(runs=runs))
