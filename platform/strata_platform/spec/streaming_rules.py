"""Rules for the fields of `data` that say how prepared rows are stored and read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.data import Data
    from strata_platform.spec.run_spec import Evaluation
    from strata_platform.spec.training import Training


def streaming_rules(data: Data, training: Training, evaluation: Evaluation) -> Iterator[Contradiction]:
    """Rules for `data.shuffle`, `data.prepared_url` and `data.streaming`."""
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
        data.streaming and training.steps is None,
        ("data.streaming", "training.steps"),
        "begins before the rows are counted, so epochs cannot be converted to steps; set training.steps, or "
        "data.streaming to false",
    )
    yield Contradiction(
        data.streaming and evaluation.every is not None,
        ("data.streaming", "evaluation.every"),
        "begins before all rows are prepared, but evaluation.every reads the validation rows of all parts; set "
        "data.streaming to false, or leave evaluation.every out",
    )
    one = len(data.single_sources()) == 1
    for field, given in (("prepared_url", data.prepared_url is not None), ("streaming", data.streaming)):
        yield Contradiction(
            given and not one,
            (f"data.{field}", "data.sources", "data.validation_source"),
            "is for one source, and data.sources or data.validation_source names others; leave one of them out",
        )
