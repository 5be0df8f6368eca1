"""Weights & Biases: one run of the project `tracking.project` for all attempts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import uuid4

import wandb

from strata_platform.spec import RunSpec
from tasks.runtime.metrics.trackers.tracker import Values, identity, settings_of
from tasks.runtime.run_folder.folder import RunFolder

log = logging.getLogger(__name__)


class Wandb:
    """Plots over `train/step`: W&B's own step cannot go back, which a resumed run needs."""

    def __init__(self, spec: RunSpec, folder: RunFolder, done: int) -> None:
        known = identity(folder, "wandb")
        if not known.exists():
            known.write_text(uuid4().hex)
        self._run = wandb.init(
            project=spec.tracking.project,
            name=spec.name,
            id=known.read_text(),
            resume="allow",
            dir=str(folder.root),
            config=settings_of(spec),
            # The run has its own console output.
            settings=wandb.Settings(console="off", silent=True),
        )
        for names in ("train/*", "eval/*"):
            self._run.define_metric(names, step_metric="train/step")
        log.info("tracking: wandb %s", f"offline, in {folder.root}/wandb" if self._run.offline else self._run.url)

    def log(self, values: Sequence[Values]) -> None:
        """Pass the values to the client, which sends them."""
        for step, _, named in values:
            self._run.log({"train/step": step, **named})

    def close(self, *, complete: bool) -> None:
        """Wait until everything is sent, and end the run."""
        self._run.finish(exit_code=0 if complete else 1)


begin = Wandb
