"""`python -m tasks.runtime SPEC` and `torchrun --nproc-per-node N -m tasks.runtime SPEC`: a whole run without Flyte."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from strata_platform.errors import SpecError
from strata_platform.outcomes import BAD_INPUT, COMPLETE, LOST, PREEMPTED, Outcome, RunError
from strata_platform.redact import redacted
from strata_platform.runs import Stage
from strata_platform.spec import load_spec
from tasks.runtime.metrics import startup
from tasks.runtime.process.imports import uncollected
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import die_with_agent

if TYPE_CHECKING:
    from tasks.runtime.data.preparation.background_preparation import BackgroundPreparation
    from tasks.runtime.training.session import Session

log = logging.getLogger("tasks.runtime")


def main() -> int:
    """Prepare, train, evaluate, export.

    The exit code says how the run ended; `strata_platform.outcomes` lists them. Codes 68, 69, 74, 75 and 143 mean that
    the same command may succeed later or on another machine: it continues from the last checkpoint.
    """
    parser = argparse.ArgumentParser(prog="python -m tasks.runtime", description=main.__doc__)
    parser.add_argument("spec", help="a run spec, YAML or JSON")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field of the spec")
    arguments = parser.parse_args()
    # Before torch is imported: an agent that is killed meanwhile would leave this process behind, waiting for it.
    die_with_agent()
    startup.mark_process()
    try:
        spec = load_spec(arguments.spec, arguments.set)
    except SpecError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT.exit_code

    configure_logging()
    # Torch takes seconds to import: refuse a wrong spec first.
    with uncollected():
        from torch import OutOfMemoryError

        from tasks.runtime.data import open_prepared
        from tasks.runtime.data.preparation.background_preparation import BackgroundPreparation
        from tasks.runtime.evaluation.evaluate_model import evaluate
        from tasks.runtime.export.export_model import export
        from tasks.runtime.metrics.progress import report_progress
        from tasks.runtime.models.trained_weights import collect_weights
        from tasks.runtime.process.error_explanations import reason_to_retry
        from tasks.runtime.process.signals import Preempted, raise_on_sigterm
        from tasks.runtime.training.session import session
        from tasks.runtime.training.train import train

    try:
        with session(spec) as run, closing(BackgroundPreparation()) as preparation:
            folder = run.processes.on_main(lambda: _prepare(run, preparation))
            startup.mark("data")
            # Every process reads the folder that rank 0 wrote; sending the data would copy it.
            data = open_prepared(folder, spec.data, preparation.require_alive)
            record = train(run, data)
            data = data.completed()
        if run.processes.is_main:
            # The lock keeps a second start from replacing the model while it is verified.
            with raise_on_sigterm(), run.folder.lock():
                report_progress(stage=Stage.EVALUATING)
                weights = collect_weights(run.folder, spec.adapter, record)
                record = evaluate(spec, record, data, weights)
                report_progress(stage=Stage.EXPORTING)
                export(spec, record, data, weights)
                report_progress(record=json.loads(run.folder.record.read_text(encoding="utf-8")))
    except (ValueError, OutOfMemoryError) as error:
        return _failed(error, BAD_INPUT)
    except RunError as error:
        return _failed(error, error.outcome)
    except (RuntimeError, OSError) as error:
        meaning = reason_to_retry(error, spec.topology.world_size)
        if meaning is None:
            raise
        traceback.print_exc()
        return _failed(RuntimeError(f"{meaning}: {error}"), LOST)
    except Preempted as signal_name:
        print(f"stopped by {signal_name}; start it again to continue from its last checkpoint", file=sys.stderr)
        return PREEMPTED.exit_code
    return COMPLETE.exit_code


def _prepare(run: Session, preparation: BackgroundPreparation) -> Path:
    """Check the run and prepare its data, or begin to. Returns the folder of the data. Runs on rank 0."""
    from tasks.runtime.data import prepare, recipe_of
    from tasks.runtime.data.preparation.pipeline import begin
    from tasks.runtime.metrics.progress import report_progress
    from tasks.runtime.preflight import run_checks
    from tasks.runtime.run_folder.folder import data_folder

    run_checks("launch", "spec", spec=run.spec)
    recipe = recipe_of(run.spec, run.folder.data_commits_for(run.spec))
    folder = data_folder(run.spec.output, recipe)
    report_progress(stage=Stage.PREPARING)
    url = run.spec.data.prepared_url
    if not run.spec.data.streaming:
        prepare(recipe, folder, report=log.info, url=url)
    elif begin(recipe, folder, report=log.info, url=url):
        preparation.start(recipe, folder, url, run.spec.data.weights)
    return folder


def _failed(error: Exception, outcome: Outcome) -> int:
    """Print the error for the person who started the run."""
    print(f"error: {redacted(str(error))}", file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
