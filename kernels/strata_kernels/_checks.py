"""Checks of options that several modules share."""

from __future__ import annotations


def require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless the option `name` has one of the known values."""
    if value not in known:
        raise ValueError(f"{name} {value!r} must be one of {', '.join(known)}")


def require_positive(name: str, value: float) -> None:
    """Raise ValueError unless the option `name` is positive."""
    if not value > 0.0:
        raise ValueError(f"{name} {value} must be positive")
