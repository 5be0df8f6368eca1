"""Output of `python -m strata_kernels models`: the table of families, or the operators of given model types."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .engine import patch_model
from .table import ROWS, Mlp, Row

_HEADINGS = ("type", "norm", "rotation", "feed-forward layer", "head")


def families() -> str:
    """The table of families with a row, as text."""
    lines = [_HEADINGS, *(_cells(row) for row in ROWS.values())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.append("\nOther families are patched by structure, experts too: python -m strata_kernels models TYPE")
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    norm = f"RMSNorm{', 1 + weight' * bool(row.norm.offset)}{', rounded once' * (row.norm.cast == 'gemma')}"
    scaled = [f"/ {row.divisor}" if row.divisor else "", f"* {row.multiplier}" if row.multiplier else ""]
    capped = f"capped at {row.softcap}" if row.softcap else ""
    head = " ".join(filter(None, ["linear_cross_entropy", *scaled, capped]))
    return row.model_type, norm, "neighbors" if row.interleaved else "halves", _feed_forward(row.mlp), head


def _feed_forward(mlp: Mlp | None) -> str:
    if mlp is None:
        return "its own"
    return f"{mlp.operator}{', packed' * mlp.packed}{', scaled' * bool(mlp.gate_multiplier)}"


def fused_in(model_type: str) -> str:
    """The operators of a model with the default configuration of `model_type`, built on meta.

    Raises:
        ValueError: transformers has no such model type, or no causal model of it.
        ImportError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this command needs transformers: pip install 'transformers>=5.17,<5.25'") from error
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(model_type)
    except ValueError:
        raise ValueError(f"transformers {transformers.__version__} has no model type {model_type!r}") from None
    automatic = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")
    auto: Any = next(
        (a for a in (getattr(transformers, n) for n in automatic) if type(config) in a._model_mapping), None
    )
    if auto is None:
        raise ValueError(f"transformers {transformers.__version__} has no model of type {model_type!r} to build")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(config)
    return patch_model(model).summary()
