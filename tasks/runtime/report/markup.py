"""HTML builder without injection: only `element` makes markup from strings, and it escapes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from math import isfinite

# Characters that HTML forbids: control characters other than tab and line ends, and unpaired surrogates, which UTF-8
# cannot encode.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class Html(str):
    """A string that is markup. Formatting or joining it gives a plain `str`, which is escaped again when used."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escape `value` for HTML; forbidden characters become U+FFFD. `Html` is returned unchanged."""
    return value if isinstance(value, Html) else Html(escape(_FORBIDDEN.sub("\ufffd", str(value))))


def join(parts: Iterable[object]) -> Html:
    """Concatenate the parts; `None` is omitted."""
    return Html("".join(text(part) for part in parts if part is not None))


def element(name: str, *children: object, **attributes: object) -> Html:
    """`<name attributes>children</name>`.

    Underscores in attribute names become dashes, and a trailing one is dropped (`class_`, `aria_label`). An attribute
    that is `None` is omitted. Floats must be finite and are written with at most two decimals.

    >>> element("td", "a < b", class_="number")
    '<td class="number">a &lt; b</td>'
    """
    written = "".join(
        f' {key.removesuffix("_").replace("_", "-")}="{text(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(value: object) -> object:
    if not isinstance(value, float):
        return value
    assert isfinite(value), value
    return f"{value:.2f}".rstrip("0").rstrip(".")
