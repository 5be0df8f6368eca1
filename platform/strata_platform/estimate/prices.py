"""What GPUs cost: a table of the operator's, the same in a file and in the values of charts/strata.

    currency: USD
    gpus: {h200: 3.5, h100: 2.5}     # of one GPU for an hour

There is none built in: prices are a matter of contracts and of the day.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from strata_platform.chart.value_fields import Values
from strata_platform.errors import Problem, SpecError
from strata_platform.estimate.gpus import GPUS

CONFIG_MAP, KEY = "strata-prices", "prices.yaml"
"""Where the chart puts the table, in the namespace of each tenant."""

GpuKind = Annotated[str, Field(pattern=f"^({'|'.join(GPUS)})$")]
"""A kind of GPU, as `strata estimate --gpu` takes it."""


class Prices(Values):
    """What `strata estimate` computes costs with."""

    currency: str = Field("", description="Of all prices, such as USD.")
    gpus: dict[GpuKind, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {}, description=f"Of one GPU for an hour, by its kind: {', '.join(f'`{kind}`' for kind in GPUS)}."
    )

    def of(self, kind: str) -> Price | None:
        """The price of a kind of GPU; None when the table has none."""
        return Price(self.gpus[kind], self.currency) if kind in self.gpus else None


@dataclass(frozen=True)
class Price:
    """Of one GPU for an hour."""

    amount: float
    currency: str = ""

    def __str__(self) -> str:
        return f"{self.amount:g} {self.currency}".rstrip()


def read_prices(path: Path) -> Prices:
    """The table in a file of YAML or JSON. Raises SpecError with what is wrong with it."""
    try:
        return parse_prices(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", f"cannot be read: {error}")], str(path)) from None


def parse_prices(text: str, source: str) -> Prices:
    """The table in `text`. Raises SpecError, which names `source`, with what is wrong with it."""
    try:
        return Prices.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise SpecError([Problem("", f"not valid YAML: {error}")], source) from None
    except ValidationError as error:
        raise SpecError([_problem(item) for item in error.errors(include_url=False)], source) from None


def _problem(item: ErrorDetails) -> Problem:
    path = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "string_pattern_mismatch":
        return Problem(path, "no such kind of GPU", allowed=", ".join(GPUS))
    return Problem(path, item["msg"])
