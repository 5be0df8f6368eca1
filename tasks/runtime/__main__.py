"""`python -m tasks.runtime SPEC` and `torchrun --nproc-per-node N -m tasks.runtime SPEC`: a whole run without Flyte."""

from __future__ import annotations

import argparse
import logging
import sys

from strata_platform.errors import SpecError
from strata_platform.redact import redacted
from strata_platform.runs import Stage
from strata_platform.spec import load_spec
from tasks.runtime.process.exit_codes import EXIT_PREEMPTED, EXIT_UNHEALTHY, EXIT_UNREACHABLE
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import die_with_agent

EXIT_BAD_INPUT = 2


def main() -> int:
    """Prepare, train, evaluate, export.

    Exit codes: 0, complete; 2, the spec or the data must change; 143, preempted, and 75, hung: start it again; 69, a
    GPU or a connection is not fit: start it on another machine; 68, the Hub or the store of checkpoints cannot be
    reached: start it again later.
    """
    parser = argparse.ArgumentParser(prog="python -m tasks.runtime", description=main.__doc__)
    parser.add_argument("spec", help="a run spec, YAML or JSON")
    arguments = parser.parse_args()
    # Now: an agent that is killed while torch is imported would leave processes behind that wait for it.
    die_with_agent()
    try:
        spec = load_spec(arguments.spec)
    except SpecError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT

    configure_logging()
    # Only a good spec is worth the seconds that torch takes to import.
    from torch import OutOfMemoryError

    from tasks.runtime.data import prepare, recipe_of
    from tasks.runtime.evaluation.evaluate_model import evaluate
    from tasks.runtime.export.export_model import export
    from tasks.runtime.faults.health_check import Unhealthy
    from tasks.runtime.metrics.progress import tell
    from tasks.runtime.preflight import run_checks
    from tasks.runtime.process.errors import Unreachable
    from tasks.runtime.process.signals import Preempted, raise_on_sigterm
    from tasks.runtime.run_folder.folder import RunFolder, data_folder
    from tasks.runtime.training.session import session
    from tasks.runtime.training.train import train
    from tasks.runtime.training.trained_weights import collect_weights

    log = logging.getLogger("tasks.runtime")
    try:
        with session(spec) as run:
            run.processes.on_main(lambda: run_checks("launch", "spec", spec=spec))
            recipe = run.processes.on_main(lambda: recipe_of(spec, run.folder.data_commit_for(spec)))
            folder = data_folder(spec.output, recipe)
            tell(stage=Stage.PREPARING)
            # The others take what the main process leaves; sending it would copy it.
            run.processes.on_main(lambda: prepare(recipe, folder, report=log.info).folder)
            data = prepare(recipe, folder, report=log.debug)
            record = train(run, data)
        if run.processes.is_main:
            # A second start would replace the model that is being verified.
            with raise_on_sigterm(), RunFolder.of(spec).lock():
                tell(stage=Stage.EVALUATING)
                weights = collect_weights(spec, record)
                record = evaluate(spec, record, data, weights)
                tell(stage=Stage.EXPORTING)
                export(spec, record, data, weights)
    except (ValueError, OutOfMemoryError) as error:
        print(f"error: {redacted(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except Unhealthy as error:
        print(f"error: {redacted(str(error))}", file=sys.stderr)
        return EXIT_UNHEALTHY
    except Unreachable as error:
        print(f"error: {redacted(str(error))}", file=sys.stderr)
        return EXIT_UNREACHABLE
    except Preempted as signal_name:
        print(f"stopped by {signal_name}; start it again to continue from its last checkpoint", file=sys.stderr)
        return EXIT_PREEMPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
