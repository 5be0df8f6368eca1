"""Select weights by name: the patterns of `model.freeze`, `model.trainable` and `optimizer.groups`.

A pattern is one or more whole parts of a dotted name, next to each other. `layers.1` matches
`model.layers.1.mlp.up_proj.weight`, but not `model.layers.11.mlp.up_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

# Parts of names that an error lists.
_SHOWN = 20


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches consecutive parts of `name`.

    >>> matches("mlp.*_proj", "model.layers.1.mlp.up_proj.weight"), matches("layers.1", "model.layers.11.weight")
    (True, False)
    """
    wanted, parts = pattern.split("."), name.split(".")
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in range(len(parts) - len(wanted) + 1))


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with its names; tied ones have several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def select(field: str, patterns: Iterable[str], names: dict[nn.Parameter, list[str]]) -> list[set[nn.Parameter]]:
    """The parameters that each pattern matches by any of their names.

    Raises ValueError, which names the spec's `field`, if a pattern matches none.
    """
    found = []
    for pattern in patterns:
        selected = {parameter for parameter, own in names.items() if any(matches(pattern, name) for name in own)}
        if not selected:
            raise ValueError(_no_match(field, pattern, [name for own in names.values() for name in own]))
        found.append(selected)
    return found


def _no_match(field: str, pattern: str, names: list[str]) -> str:
    known = list(dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit()))
    unknown = [part for part in pattern.split(".") if not any(fnmatchcase(name, part) for name in known)]
    close = [match for part in unknown for match in get_close_matches(part, known, n=1)]
    meant = f"; did you mean {close[0]!r}?" if close else "."
    more = ", ..." if len(known) > _SHOWN else ""
    return (
        f"{field}: {pattern!r} matches no weight of the model{meant} A pattern is one or more whole parts of a "
        f"weight's name, such as {names[0]!r}; the parts of all names: {', '.join(known[:_SHOWN])}{more}"
    )
