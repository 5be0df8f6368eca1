"""Several runs, one after the other, each of which may start from the models of those before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from strata_platform.errors import Problem, SpecError
from strata_platform.spec.load import load_spec, read_values
from strata_platform.spec.run_spec import RunSpec

MODEL_OF = "run:"
"""Begins the name of a model that a stage before has trained: `run:sft` is that of the stage named `sft`."""


class Stages(BaseModel):
    """The specs of runs in the order in which they are trained.

    A model or a tokenizer that a spec names as `run:NAME` is the exported model of an earlier stage of that name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stages: tuple[RunSpec, ...] = Field(description="Specs of the stages, in order.", min_length=1)

    def require_order(self) -> None:
        """Raises SpecError if two stages have one name, or a stage uses the model of one that is not before it."""
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
        if problems:
            raise SpecError(problems, "stages")


def models_used(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """The path of each field that names the model of another stage, and that stage's name."""
    for path, holder, key in _model_fields(spec.model_dump(mode="json")):
        value = holder.get(key)
        if value is not None and value.startswith(MODEL_OF):
            yield path, value.removeprefix(MODEL_OF)


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
