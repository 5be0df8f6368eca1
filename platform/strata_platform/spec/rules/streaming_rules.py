"""Rules for the fields of `data` that say how prepared rows are stored and read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import RunSpec
    from strata_platform.spec.sections.data import Data


def streaming_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Rules for `data.shuffle`, `data.prepared_url` and `data.streaming`."""
    data = spec.data
    yield Contradiction(
        data.shuffle != "window" and data.shuffle_window is not None,
        ("data.shuffle_window", "data.shuffle"),
        f"set, but data.shuffle '{data.shuffle}' has no windows; set data.shuffle to 'window', or leave "
        "data.shuffle_window out",
    )
    yield Contradiction(
        data.prepared_url is None and data.cache_gib is not None,
        ("data.cache_gib", "data.prepared_url"),
        "set, but without data.prepared_url the prepared rows are in a folder on disk; set "
        "data.prepared_url, or leave data.cache_gib out",
    )
    yield Contradiction(
        data.streaming and data.shuffle != "window",
        ("data.streaming", "data.shuffle"),
        "begins before all rows are prepared, but data.shuffle 'global' permutes all rows; set data.shuffle to "
        "'window', or data.streaming to false",
    )
    yield Contradiction(
        data.streaming and spec.training.steps is None,
        ("data.streaming", "training.steps"),
        "begins before the rows are counted, so epochs cannot be converted to steps; set training.steps, or "
        "data.streaming to false",
    )
    yield from (
        Contradiction(
            data.streaming and value is not None,
            (f"{section}.per_epoch", "data.streaming"),
            "set, but data.streaming begins before the rows are counted, so the steps of an epoch are not known; set "
            f"{section}.every instead, or data.streaming to false",
        )
        for section, value in (("checkpoint", spec.checkpoint.per_epoch), ("evaluation", spec.evaluation.per_epoch))
    )
    holding = [field for field, fraction in _held_out(data) if fraction > 0]
    yield Contradiction(
        data.streaming and spec.evaluation.every is not None and bool(holding),
        ("data.streaming", "evaluation.every", *holding),
        "begins before all rows are prepared, but evaluation.every reads the rows that "
        f"{holding[0] if holding else 'data.validation_fraction'} holds out of all parts; set that to 0 and name rows "
        "for evaluation in data.validation_source, which are prepared first, or set data.streaming to false",
    )
    yield Contradiction(
        data.streaming and len(data.sources) > 1 and None in data.weights,
        ("data.streaming", "data.sources"),
        "begins before the rows are counted, but the sources of data.sources are drawn by their numbers of rows; give "
        "each a weight, or set data.streaming to false",
    )


def _held_out(data: Data) -> Iterator[tuple[str, float]]:
    """The share that each source holds out, by its field."""
    if not data.sources:
        yield "data.validation_fraction", data.validation_fraction
    for number, source in enumerate(data.sources):
        yield f"data.sources[{number}].validation_fraction", source.validation_fraction
