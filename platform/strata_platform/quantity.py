"""Kubernetes quantities."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_SUFFIXES |= {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([a-zA-Z]*)")


def parse_quantity(text: str | int | float) -> Decimal:
    """The number that a quantity stands for. Raises ValueError.

    >>> parse_quantity("500m"), parse_quantity("2Gi"), parse_quantity("1e3")
    (Decimal('0.500'), Decimal('2147483648'), Decimal('1E+3'))
    """
    found = _QUANTITY.fullmatch(str(text))
    if found is None or found[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity of Kubernetes, such as 2, 500m or 8Gi")
    return Decimal(found[1]) * _SUFFIXES[found[2]]
