"""Estimates memory, time and cost of a run from its spec and its model's shape, without torch and without a GPU.

Names are imported when they are first used: they need the spec's models, which take longer to import than most commands
of `strata` take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_platform.lazy_names import lazy_names

if TYPE_CHECKING:
    from strata_platform.estimate.config_shapes import shape_of
    from strata_platform.estimate.gpus import GPUS, Gpu
    from strata_platform.estimate.layout_search import cheapest, layouts
    from strata_platform.estimate.prices import Price, Prices, parse_prices, read_prices
    from strata_platform.estimate.run_estimate import Estimate, estimate
    from strata_platform.estimate.shapes import ModelShape

__all__ = [
    "GPUS",
    "Estimate",
    "Gpu",
    "ModelShape",
    "Price",
    "Prices",
    "cheapest",
    "estimate",
    "layouts",
    "parse_prices",
    "read_prices",
    "shape_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "config_shapes": ("shape_of",),
        "gpus": ("GPUS", "Gpu"),
        "layout_search": ("cheapest", "layouts"),
        "prices": ("Price", "Prices", "parse_prices", "read_prices"),
        "run_estimate": ("Estimate", "estimate"),
        "shapes": ("ModelShape",),
    },
)
