"""Trains a spec and stops there: `python -m tests.runtime.train_only SPEC`, alone or under torchrun."""

import sys

from strata_platform.spec import DataRecipe, load_spec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.folder import data_folder
from tasks.runtime.log import configure_logging
from tasks.runtime.run import session, train

if __name__ == "__main__":
    configure_logging()
    spec = load_spec(sys.argv[1])
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    with session(spec) as run:
        train(run, prepare(recipe, data_folder(spec.output, recipe), report=print))
