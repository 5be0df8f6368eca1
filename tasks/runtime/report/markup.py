"""HTML that cannot be injected into: strings become markup through `element` alone, which escapes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from math import isfinite

# What no HTML text may hold: control characters other than tab and line ends, and halves of a surrogate pair, which
# cannot be written as UTF-8.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class Html(str):
    """A string that is markup already. Formatting or joining it gives a plain `str` again, which is escaped on use."""

    __slots__ = ()


def text(value: object) -> Html:
    """`value` as text of a document: escaped, with characters that HTML forbids shown as U+FFFD. `Html` stays."""
    return value if isinstance(value, Html) else Html(escape(_FORBIDDEN.sub("\ufffd", str(value))))


def join(parts: Iterable[object]) -> Html:
    """The parts one after another; `None` is left out."""
    return Html("".join(text(part) for part in parts if part is not None))


def element(name: str, *children: object, **attributes: object) -> Html:
    """`<name attributes>children</name>`.

    Underscores of attribute names become dashes and a trailing one is dropped (`class_`, `aria_label`); an attribute
    that is `None` is left out. Floats are written with at most two decimals and must be finite.

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
