"""Estimates memory, time and cost of a run from its spec and its model's shape, without torch and without a GPU.

Names are imported when they are first used: they need the spec's models, which take longer to import than most commands
of `strata` take.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_MODULES = {
    "config_shapes": ("shape_of",),
    "gpus": ("GPUS", "Gpu"),
    # No module has the name of a function: importing the module would put it in the function's place.
    "layout_search": ("cheapest", "layouts"),
    "prices": ("Price", "Prices", "parse_prices", "read_prices"),
    "run_estimate": ("Estimate", "estimate"),
    "shapes": ("ModelShape",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
