"""Many runs side by side: `pyflyte run workflows/sweep.py sweep --spec my.yaml --grid grid.yaml`.

# grid.yaml: every combination is a run
fields:
  optimizer.lr: [1.0e-4, 2.0e-4, 4.0e-4]
  adapter.r: [8, 16]
"""

from __future__ import annotations

from flytekit import LaunchPlan, workflow

from strata_platform.spec import RunSpec
from strata_platform.spec.grid import Grid
from tasks.runtime.record import CompletionRecord
from tasks.sweep import EachAlone, Swept, compare, expand, read_record
from workflows.finetune import finetune

DEFAULT = RunSpec(name="sweep")
LEARNING_RATES = Grid(fields={"optimizer.lr": [1e-3, 2e-3, 4e-3]})


@workflow
def one_run(spec: RunSpec) -> CompletionRecord:
    """A run of the sweep; of what it leaves, its record."""
    return read_record(record=finetune(spec=spec).record)


# A launch plan, because that is what becomes an execution of its own.
trial = LaunchPlan.get_or_create(one_run, name="workflows.sweep.trial")


@workflow
def sweep(spec: RunSpec = DEFAULT, grid: Grid = LEARNING_RATES) -> Swept:
    """Fine-tune once for each combination of the grid's values, each in an execution of its own; compare them.

    A run that fails leaves its line in the table empty; the others go on.
    """
    runs = expand(spec=spec, grid=grid)
    records = EachAlone(trial, min_successes=1, run_all_sub_nodes=True)(spec=runs)
    return compare(spec=spec, grid=grid, runs=runs, records=records)
