"""Rules of the section `adapter`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Adapter, Objective


def adapter_rules(adapter: Adapter, objective: Objective) -> Iterator[Contradiction]:
    """Every rule, broken or not."""
    yield from _quantization(adapter)
    yield from _pissa(adapter, objective)
    yield from _experts(adapter)


def _quantization(adapter: Adapter) -> Iterator[Contradiction]:
    if adapter.type != "lora" or adapter.quantization == "none":
        return
    yield Contradiction(
        adapter.use_dora,
        ("adapter.quantization", "adapter.use_dora"),
        f"'{adapter.quantization}' stores no norms of weight vectors, which adapter.use_dora starts from; set "
        "adapter.use_dora to false, or adapter.quantization to 'none'",
    )


def _pissa(adapter: Adapter, objective: Objective) -> Iterator[Contradiction]:
    if adapter.type != "lora":
        return
    field, value = "adapter.init_lora_weights", f"'{adapter.init_lora_weights}'"
    yield Contradiction(
        adapter.is_pissa and adapter.use_dora,
        (field, "adapter.use_dora"),
        f"{value} takes the adapter out of the weights, whose norms adapter.use_dora trains; leave one of them out",
    )
    yield Contradiction(
        adapter.is_pissa and adapter.init_from is not None,
        (field, "adapter.init_from"),
        f"{value}, but adapter.init_from gives the matrices to start from; leave one of them out",
    )
    yield Contradiction(
        adapter.is_pissa and getattr(objective, "reference", None) == "adapter",
        ("objective.reference", field),
        f"'adapter' takes the model without its adapter for the reference, but {field} {value} takes a part of the "
        "weights out of it; set objective.reference to 'precomputed'",
    )


def _experts(adapter: Adapter) -> Iterator[Contradiction]:
    if adapter.type != "lora":
        return
    for field, off, used in (
        ("use_dora", "false", adapter.use_dora),
        ("lora_dropout", "0", adapter.lora_dropout > 0),
        ("init_lora_weights", "'default'", adapter.is_pissa),
    ):
        yield Contradiction(
            bool(adapter.target_parameters) and used,
            ("adapter.target_parameters", f"adapter.{field}"),
            f"adapts experts, and PEFT has no adapter.{field} for them; set adapter.{field} to {off}, or leave "
            "adapter.target_parameters out",
        )
