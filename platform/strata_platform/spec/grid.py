"""Several runs from one spec: every combination of the values of some of its fields."""

from __future__ import annotations

from itertools import product
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from strata_platform.errors import Problem, SpecError
from strata_platform.spec.run_spec import RunSpec

# The largest sweep; more combinations are probably a mistake.
_MOST = 256
_ACCUMULATION = "gradient_accumulation_steps"


class Grid(BaseModel):
    """Fields of a spec, by path, and the values of each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fields: dict[str, list[Any]] = Field(description="A path and its values: `optimizer.lr: [1.0e-4, 2.0e-4]`.")

    def runs(self, base: RunSpec) -> list[RunSpec]:
        """A spec for each combination, named `<name>-001` and so on, in the order of the fields and their values.

        If a section's `type` changes, its other fields take their defaults.

        Raises SpecError with every problem of any combination, each once.

        >>> runs = Grid(fields={"optimizer.lr": [1e-4, 2e-4], "seed": [0, 1]}).runs(RunSpec())
        >>> [(run.name, run.optimizer.lr, run.seed) for run in runs][1]
        ('finetune-002', 0.0001, 1)
        """
        problems = dict.fromkeys(self._problems())
        found = []
        combinations = [] if problems else list(product(*self.fields.values()))
        for number, values in enumerate(combinations, start=1):
            changes = dict(zip(self.fields, values, strict=True))
            try:
                found.append(_changed(base, {"name": f"{base.name}-{number:03d}", **changes}))
            except SpecError as error:
                problems |= dict.fromkeys(error.problems)
        if problems:
            raise SpecError(list(problems), "grid")
        return found

    def _problems(self) -> list[Problem]:
        problems = []
        if not self.fields:
            problems = [Problem("fields", "empty; give a field and its values, such as optimizer.lr: [1.0e-4, 2.0e-4]")]
        runs = 1
        for path, values in self.fields.items():
            if path in ("name", "output"):
                problems.append(Problem(f"fields.{path}", "every run has its own name in the one output; leave it out"))
            if not all(path.split(".")):
                problems.append(Problem(f"fields.{path}", "has an empty part; write a path such as optimizer.lr"))
            if not values:
                problems.append(Problem(f"fields.{path}", "has no values; give some, or leave it out"))
            runs *= len(values)
        if runs > _MOST:
            problems.append(Problem("fields", f"{runs} combinations, more than {_MOST}; sweep fewer fields at a time"))
        return problems


def _changed(base: RunSpec, changes: dict[str, Any]) -> RunSpec:
    values = base.model_dump()
    # A section's type first, since it decides which other fields exist.
    for path, value in sorted(changes.items(), key=lambda change: not change[0].endswith(".type")):
        section, _, field = path.rpartition(".")
        at = values
        for name in section.split(".") if section else ():
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise SpecError([Problem(f"fields.{path}", f"{name} has a value and no fields; sweep {section}")])
        if field == "type" and at.get("type") != value:
            at.clear()
        at[field] = value
    # Accumulation steps of the base are a default or derived; other rows derive others.
    training = values["training"]
    derived = base.training.tokens_per_step is not None or training[_ACCUMULATION] == 1
    if training["tokens_per_step"] is not None and derived and f"training.{_ACCUMULATION}" not in changes:
        del training[_ACCUMULATION]
    return RunSpec.model_validate(values)
