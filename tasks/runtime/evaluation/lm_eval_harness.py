"""Score a model in memory with EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from strata_platform.spec.run_spec import Evaluation

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Bootstrap samples, for standard errors without a formula.
_DRAWS = 100


class Score(NamedTuple):
    """A model's result in a task, by one metric."""

    value: float
    error: float | None
    """Standard error, if the harness computes one."""
    higher_is_better: bool | None


def require_tasks(tasks: tuple[str, ...]) -> None:
    """Raises ValueError if the harness is not installed, or does not know a name in `evaluation.tasks`."""
    if not tasks:
        return
    if find_spec("lm_eval") is None:
        raise ValueError(
            "evaluation.tasks needs the package lm_eval, which is not installed; install strata[lm-eval], or remove "
            "evaluation.tasks"
        )
    known = set(_task_manager(tasks).all_tasks)
    for task in tasks:
        if _is_file(task):
            if not Path(task).is_file():
                raise ValueError(f"evaluation.tasks: there is no file {task!r} in {Path.cwd()}")
        elif task not in known:
            close = get_close_matches(task, known, n=3)
            meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            raise ValueError(
                f"evaluation.tasks: {task!r} is not a task, group or tag of lm-evaluation-harness; {meant}'lm-eval ls "
                "tasks' shows all of them; for a task of your own, give its YAML file"
            )


def task_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, evaluation: Evaluation, *, batch_size: int
) -> dict[tuple[str, str], Score]:
    """Scores by task and metric. A group with its own scores replaces those of its tasks.

    Raises:
        ValueError: a task cannot be loaded, which may need the Hub.
    """
    if not evaluation.tasks:
        return {}
    # Otherwise the harness forks a process per core for bootstrap samples.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    # Hides a warning that a loaded model is used as it is, which is intended.
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager = _task_manager(evaluation.tasks)
    loaded = [part for task in dict.fromkeys(evaluation.tasks) for part in _load(manager, task)]
    results = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=loaded,
        task_manager=manager,
        num_fewshot=evaluation.few_shot,
        limit=evaluation.task_limit,
        bootstrap_iters=_DRAWS,
        log_samples=False,
    )
    for task, shown in results["n-shot"].items():
        if evaluation.few_shot not in (None, shown):
            log.warning(
                "evaluation.few_shot %d: task %s sets the number itself, to %d", evaluation.few_shot, task, shown
            )
    return scores_of(results)


def scores_of(results: Mapping[str, Any]) -> dict[tuple[str, str], Score]:
    """Scores by task and metric, from the result of `simple_evaluate`."""
    found = {task: _numbers(values) for task, values in results["results"].items()}
    inside = {part for group, parts in results["group_subtasks"].items() if found.get(group) for part in parts}
    scores = {}
    for task, values in found.items():
        if task in inside:
            continue
        better = results["higher_is_better"].get(task, {})
        for (metric, filtered), value in values.items():
            if not metric.endswith("_stderr"):
                name = metric if filtered == "none" else f"{metric} ({filtered})"
                scores[task, name] = Score(value, values.get((f"{metric}_stderr", filtered)), better.get(metric))
    return scores


def _numbers(values: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Numbers by metric and filter. The harness joins the two with a comma; its other keys have none."""
    split = {tuple(name.split(",", 1)): value for name, value in values.items() if "," in name}
    return {
        (metric, filtered): float(value)
        for (metric, filtered), value in split.items()
        if isinstance(value, int | float)
    }


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _task_manager(tasks: tuple[str, ...]) -> TaskManager:
    """A task manager. Indexing the harness's own tasks takes many seconds, so it is skipped if every task is a file."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=not all(map(_is_file, tasks)))


def _load(manager: TaskManager, task: str) -> list[Any]:
    """Load a task, the tasks of a tag, or a group, with their data."""
    try:
        loaded = manager.load([task])
    # Errors of the Hub's client, of `datasets` and of a task's own code have no common base class.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"evaluation.tasks: {task!r} could not be loaded: {type(error).__name__}: {reason}. The trained model is "
            "saved. Fix the cause or remove the task, and start the run again, which evaluates it"
        ) from error
    children = {child for names in loaded["group_map"].values() for child in names}
    groups = [group for name, group in loaded["groups"].items() if name not in children]
    inside = {part.task_name for group in groups for part in group.get_all_tasks()}
    return [*groups, *(part for name, part in loaded["tasks"].items() if name not in inside)]
