"""Several runs, one after the other, each of which may start from the models of those before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from strata_platform.errors import Problem, SpecError
from strata_platform.spec.reading.load import load_spec, read_values
from strata_platform.spec.run_spec import Objective, RunSpec
from strata_platform.spec.sections.objectives import Grpo

MODEL_OF = "run:"
"""Begins the name of a model that a stage before has trained: `run:sft` is that of the stage named `sft`."""


class Stages(BaseModel):
    """The specs of runs in the order in which they are trained.

    A model or a tokenizer that a spec names as `run:NAME` is the exported model of an earlier stage of that name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stages: tuple[RunSpec, ...] = Field(description="Specs of the stages, in order.", min_length=1)

    def require_order(self) -> None:
        """Raises SpecError if two stages have one name, or a stage uses the model of one that is not before it, or that
        scores texts where answers are asked for, or the other way round.
        """
        problems: list[Problem] = []
        known: dict[str, int] = {}
        for number, spec in enumerate(self.stages):
            if (first := known.setdefault(spec.name, number)) != number:
                problems.append(
                    Problem(f"stages[{number}].name", f"is that of stages[{first}]; give each its own", spec.name)
                )
            before = [stage.name for stage in self.stages[:number]]
            problems += [
                Problem(
                    f"stages[{number}].{path}",
                    f"no stage before this one has the name {name!r}; there are {', '.join(before) or 'none'}",
                    MODEL_OF + name,
                )
                for path, name in models_used(spec)
                if name not in before
            ]
            problems += [
                Problem(f"stages[{number}].{path}", message, MODEL_OF + name)
                for path, name in models_used(spec)
                if name in before
                and (message := _misused(path, spec.objective, self.stages[before.index(name)].objective))
            ]
        if problems:
            raise SpecError(problems, "stages")


def models_used(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """The path of each field that names the model of another stage, and that stage's name."""
    for path, holder, key in _model_fields(spec.model_dump(mode="json")):
        value = holder.get(key)
        if value is not None and value.startswith(MODEL_OF):
            yield path, value.removeprefix(MODEL_OF)


def _misused(path: str, objective: Objective, stage: Objective) -> str | None:
    """Why a field of a spec with this objective cannot name the model of a stage with that one; None if it can."""
    scores = stage.type == "reward"
    if path.startswith("objective.rewards") and not scores:
        return (
            f"is a model of objective.type '{stage.type}', which scores no answers; name a stage of "
            "objective.type 'reward'"
        )
    wanted = path == "objective.teacher" or (path == "model.name" and objective.type != "reward")
    if scores and wanted:
        return "is a reward model, which scores texts and writes none; name a stage of another objective.type"
    return None


def require_no_stages(spec: RunSpec) -> None:
    """Raises SpecError if a spec that is no stage uses the model of one."""
    if problems := list(stage_problems(spec)):
        raise SpecError(problems)


def stage_problems(spec: RunSpec) -> Iterator[Problem]:
    """A problem for each field of a spec that names the model of a stage."""
    for path, name in models_used(spec):
        yield Problem(
            path,
            "is the model of another stage, which workflows/align.py alone puts here; start the stages by it, or give "
            "the folder that the run has exported its model to",
            MODEL_OF + name,
        )


def before_its_stages(spec: RunSpec, bases: Mapping[str, str]) -> RunSpec:
    """The spec of a stage as far as it can be checked before those that it uses: with the models that these begin with,
    by their names, and without their reward models, which nothing can stand for.
    """
    found = with_models(spec, bases)
    if not isinstance(spec.objective, Grpo):
        return found
    known = tuple(term for term in spec.objective.rewards if not (term.model or "").startswith(MODEL_OF))
    return found.model_copy(update={"objective": found.objective.model_copy(update={"rewards": known})})


def with_models(spec: RunSpec, models: Mapping[str, str]) -> RunSpec:
    """The spec with the models of other stages, by their names, in the place of `run:NAME`."""
    named = {MODEL_OF + name: model for name, model in models.items()}
    values = spec.model_dump(mode="json")
    for _, holder, key in _model_fields(values):
        if (value := holder.get(key)) is not None:
            holder[key] = named.get(value, value)
    return RunSpec.model_validate(values)


def load_stages(path: str | Path) -> Stages:
    """Read a file whose `stages` are files of specs, relative to its folder. Raises SpecError with every problem."""
    values = read_values(path)
    files = values.get("stages") if isinstance(values, dict) and values.keys() == {"stages"} else None
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        raise SpecError([Problem("stages", "must be a list of files, each with the spec of a stage")], str(path))
    problems: list[Problem] = []
    specs: list[RunSpec] = []
    for number, file in enumerate(files):
        try:
            specs.append(load_spec(Path(path).parent / file))
        except SpecError as error:
            problems += [
                replace(problem, path=f"stages[{number}]{'.' * bool(problem.path)}{problem.path}", origin=file)
                for problem in error.problems
            ]
    if problems:
        raise SpecError(problems, str(path))
    stages = Stages(stages=tuple(specs))
    stages.require_order()
    return stages


def _model_fields(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The fields of a dumped spec that name a model or a tokenizer: the path of each, and where its value is."""
    model, objective = values["model"], values["objective"]
    yield "model.name", model, "name"
    yield "model.tokenizer", model, "tokenizer"
    yield "objective.teacher", objective, "teacher"
    for number, term in enumerate(objective.get("rewards", ())):
        yield f"objective.rewards[{number}].model", term, "model"
