"""Extension points: what you write beside Strata instead of changing it.

Examples are in docs/extending.md and docs/callbacks.md.

| you write | it is based on | the spec names it by |
| --- | --- | --- |
| an objective | `TokenObjective` or `BatchObjective` | `objective: {type: custom, object: "my_package.losses:Focal"}` |
| a data format | `TextFormat` or `ChatFormat` | `data: {format: "my_package.formats:Tickets"}` |
| a callback | `Callback` | `runtime: {callbacks: [{object: "my_package.callbacks:Notify"}]}` |

`test_kit` checks each of them without a training run. Names in this package, and the methods that you override, keep
their meaning between minor versions.
"""

from tasks.runtime.extensions.callback_base import Callback, EvaluationResult, RunInfo
from tasks.runtime.extensions.format_base import ChatFormat, TextFormat, TextSegment
from tasks.runtime.extensions.objective_base import BatchObjective, LossSums, ObjectiveBatch, TokenObjective

__all__ = [
    "BatchObjective",
    "Callback",
    "ChatFormat",
    "EvaluationResult",
    "LossSums",
    "ObjectiveBatch",
    "RunInfo",
    "TextFormat",
    "TextSegment",
    "TokenObjective",
]
