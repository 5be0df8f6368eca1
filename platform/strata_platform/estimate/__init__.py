"""Estimates memory, time and cost of a run from its spec and its model's shape, without torch and without a GPU."""

from strata_platform.estimate.config_shapes import shape_of
from strata_platform.estimate.gpus import GPUS, Gpu
from strata_platform.estimate.layouts import cheapest, layouts
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
