"""Prepare the parts of a source in a process beside training.

It is `python -m tasks.runtime.data.preparation.background_preparation`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from strata_platform.spec import DataRecipe
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import die_with_parent

# Training goes first where both want a processor.
_NICENESS = 10


class BackgroundPreparation:
    """A process that prepares data. It ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, recipe: DataRecipe, out: Path, url: str | None, weights: Sequence[float | None]) -> None:
        """Start to prepare; see `prepare`."""
        how = json.dumps({"url": url, "weights": weights})
        self._process = subprocess.Popen([sys.executable, "-m", __name__, recipe.model_dump_json(), str(out), how])

    def require_alive(self) -> None:
        """Raises ValueError when the preparation has failed."""
        if self._process is not None and (code := self._process.poll()):
            raise ValueError(
                f"the preparation of the data ended with exit code {code}; its error is in the log, above. Start "
                "again to continue with the parts that are left"
            )

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def main() -> None:
    """Prepare the data of a recipe: arguments are the recipe as JSON, the folder, and options of `prepare` as JSON."""
    die_with_parent()
    os.nice(_NICENESS)
    configure_logging()
    import logging

    from tasks.runtime.data import prepare

    recipe, out, how = sys.argv[1:]
    log = logging.getLogger("tasks.runtime.data")
    try:
        prepare(DataRecipe.model_validate_json(recipe), Path(out), report=log.info, **json.loads(how))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
