"""Prices of GPUs: a table that the cluster's operator writes, in a file or in the values of charts/strata.

    currency: USD
    gpus: {h200: 3.5, h100: 2.5}     # one GPU for an hour

There are no built-in prices: they depend on contracts and change daily.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from strata_platform.chart.value_fields import Values
from strata_platform.errors import Problem, SpecError
from strata_platform.estimate.gpus import GPUS
from strata_platform.spec.reading.load import parse_values, read_values

CONFIG_MAP, KEY = "strata-prices", "prices.yaml"
"""Config map and key of the table, in the namespace of each tenant."""

GpuKind = Annotated[str, Field(pattern=f"^({'|'.join(GPUS)})$")]
"""A GPU model, as `strata estimate --gpu` takes it."""


class Prices(Values):
    """The prices that `strata estimate` computes costs with."""

    currency: str = Field("", description="Currency of all prices, such as USD.")
    gpus: dict[GpuKind, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {}, description=f"Price of one GPU for an hour, by GPU model: {', '.join(f'`{kind}`' for kind in GPUS)}."
    )

    def of(self, kind: str) -> Price | None:
        """The price of a GPU model; None if the table has none."""
        return Price(self.gpus[kind], self.currency) if kind in self.gpus else None


@dataclass(frozen=True)
class Price:
    """Price of one GPU for an hour."""

    amount: float
    currency: str = ""

    def __str__(self) -> str:
        return f"{self.amount:g} {self.currency}".rstrip()


def read_prices(path: Path) -> Prices:
    """Read the table in a YAML or JSON file. Raises SpecError with its problems."""
    return _prices(read_values(path), str(path))


def parse_prices(text: str, source: str) -> Prices:
    """Read the table in `text`. Raises SpecError with its problems; `source` names the text."""
    return _prices(parse_values(text, source), source)


def _prices(values: Any, source: str) -> Prices:
    try:
        return Prices.model_validate(values)
    except ValidationError as error:
        raise SpecError([_problem(item) for item in error.errors(include_url=False)], source) from None


def _problem(item: ErrorDetails) -> Problem:
    path = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "string_pattern_mismatch":
        return Problem(path, "not a known GPU", allowed=", ".join(GPUS))
    return Problem(path, item["msg"])
