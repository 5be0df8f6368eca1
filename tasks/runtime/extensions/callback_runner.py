"""Calls the callbacks of the user's at the points of a run."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strata_platform.runs import MetricPoint
from strata_platform.spec.run_spec import Callback as Settings
from tasks.runtime.extensions.callback_base import Callback, EvaluationResult, RunInfo
from tasks.runtime.extensions.import_object import code_digest, make_object
from tasks.runtime.process.rng import random_states, restore_random_states

log = logging.getLogger(__name__)

_FIELD = "runtime.callbacks"


def require_callbacks(callbacks: Sequence[Settings]) -> None:
    """Raises ValueError if a callback that the spec names cannot be made here."""
    CallbackRunner(callbacks)


class CallbackRunner:
    """The callbacks of one process; none on ranks other than 0.

    Every method raises ValueError, which names the callback and the hook, if a hook raises an exception.
    """

    def __init__(self, settings: Sequence[Settings] = ()) -> None:
        self._callbacks: list[tuple[str, Callback]] = []
        for index, each in enumerate(settings):
            field = f"{_FIELD}[{index}].object"
            made = make_object(each.object, each.arguments, (Callback,), field=field, group="strata.callbacks")
            self._callbacks.append((f"{field} {each.object!r}", made))
        self.code = {
            each.object: code_digest(type(made)) for each, (_, made) in zip(settings, self._callbacks, strict=True)
        }
        self._started = False

    def train_start(self, make_info: Callable[[], RunInfo]) -> None:
        """Training begins; the second time, after a rollback, nothing happens."""
        if self._callbacks and not self._started:
            self._call("on_train_start", make_info())
        self._started = True

    def step_end(self, step: int, saved: Iterable[tuple[int, Path]]) -> None:
        """A step has ended; `saved`: checkpoints that have become complete since the last call."""
        self._call("on_step_end", step)
        self.checkpoints_saved(saved)

    def checkpoints_saved(self, saved: Iterable[tuple[int, Path]]) -> None:
        """These checkpoints are complete."""
        for checkpoint in saved:
            self._call("on_checkpoint_saved", *checkpoint)

    def metrics(self, points: Iterable[MetricPoint]) -> None:
        """The numbers of these steps are known."""
        for point in points if self._callbacks else ():
            self._call("on_metrics", point)

    def evaluation(self, step: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""
        if self._callbacks:
            self._call("on_evaluation", EvaluationResult(step, loss, dict(metrics)))

    def train_end(self, record: Mapping[str, Any]) -> None:
        """Training is done."""
        self._call("on_train_end", record)

    def _call(self, hook: str, *arguments: Any) -> None:
        for name, callback in self._callbacks:
            states = random_states()
            try:
                getattr(callback, hook)(*arguments)
            except Exception as error:
                log.exception("%s: %s failed", name, hook)
                last = traceback.extract_tb(error.__traceback__)[-1]
                raise ValueError(
                    f"{name}: {hook} raised {type(error).__name__}: {error}, in line {last.lineno} of {last.filename}; "
                    "correct it, or remove it from the spec, and start the run again: it continues from its last "
                    "checkpoint"
                ) from error
            finally:
                restore_random_states(states)
