"""Formats of the report's numbers and names. A non-breaking space separates a quantity from its unit."""

from __future__ import annotations

from math import exp, floor, isfinite, isnan, log10

GIB = 1 << 30
SPACE = "\u00a0"
MINUS = "\u2212"
INFINITY = "\u221e"

# Beyond these limits an axis's arithmetic would overflow or underflow. No measured value comes near them.
HUGE, TINY = 1e100, 1e-100
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def drawable(value: float) -> bool:
    """Whether a value can be drawn on an axis: finite and not huge."""
    return isfinite(value) and abs(value) < HUGE


def scale(magnitude: float) -> tuple[float, str]:
    """Divisor and suffix for values up to `magnitude`: an SI prefix, or a power of ten where none fits.

    >>> scale(25_000), scale(0.002), scale(9.5)
    ((1000.0, '\\xa0k'), (0.001, 'e-3'), (1.0, ''))
    """
    if magnitude < TINY or 1e-2 <= magnitude < 1e4:
        return 1.0, ""
    if 1e4 <= magnitude < 1e15:
        prefix = next(prefix for least, prefix in _PREFIXES if magnitude >= least)
        return {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[prefix], SPACE + prefix
    exponent = floor(log10(magnitude))
    return 10.0**exponent, f"e{exponent}"


def number(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits and an SI prefix: 2.91, 8,266, 25.1 k, 2.00e-3."""
    if isnan(value):
        return "NaN"
    if not drawable(value):
        return INFINITY if value > 0 else MINUS + INFINITY
    if abs(value) < TINY:
        return "0"
    divisor, suffix = scale(abs(value))
    mantissa = value / divisor
    decimals = digits - 1 - floor(log10(abs(mantissa)))
    return f"{mantissa:,.{max(0, decimals)}f}{suffix}".replace("-", MINUS, 1 if value < 0 else 0)


def loss(value: float | None) -> str:
    """A loss with four significant digits."""
    return "not measured" if value is None else number(value, digits=4)


def perplexity(value: float | None) -> str:
    """Perplexity: exp of a loss in nats."""
    if value is None:
        return "not measured"
    return number(exp(value) if value < 100 else value if isnan(value) else float("inf"))


def change(before: float, after: float) -> str | None:
    """Relative change in percent, with its sign; None when it is undefined."""
    if not (drawable(before) and drawable(after)) or before == 0:
        return None
    percent = 100 * (after - before) / abs(before)
    return f"{'+' if percent > 0 else MINUS if percent < 0 else ''}{abs(percent):.1f}{SPACE}%"


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:,.2f}{SPACE}GiB"


def duration(seconds: float) -> str:
    """The two largest units: 8.4 s, 3 min 12 s, 1 h 04 min, 2 d 3 h."""
    if not drawable(seconds):
        return "unknown"
    # From 59.95 s on, one decimal would round to 60.0 s.
    if seconds < 59.95:
        return f"{seconds:.1f}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min {rest:02d}{SPACE}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}{SPACE}h {minutes:02d}{SPACE}min"
    days, hours = divmod(hours, 24)
    return f"{days}{SPACE}d {hours}{SPACE}h"


def percent(share: float) -> str:
    """A share, 0 to 1, in percent."""
    return f"{100 * share:.1f}{SPACE}%"


def grouped(value: int) -> str:
    """An integer with thousands separators."""
    return f"{value:,}"


def counted(value: int, noun: str, plural: str | None = None) -> str:
    """`1 restart`, `1,204 steps`, `2 processes`."""
    return f"{grouped(value)}{SPACE}{noun if value == 1 else plural or noun + 's'}"


def words(key: str) -> str:
    """The name of a field as words: `skipped_overlong` is `Skipped overlong`."""
    return key.replace("_", " ").capitalize()
