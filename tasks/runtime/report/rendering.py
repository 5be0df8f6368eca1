"""Rendering of the templates in `templates/` by Jinja2, which escapes every value that it puts into a page."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.runtime.report import numbers

# Characters that HTML forbids: control characters other than tab and line ends, and unpaired surrogates, which UTF-8
# cannot encode. Jinja2 leaves them.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "counted": numbers.counted,
    "duration": numbers.duration,
    "gib": numbers.gib,
    "grouped": numbers.grouped,
    "loss": numbers.loss,
    "number": numbers.number,
    "percent": numbers.percent,
    "perplexity": numbers.perplexity,
    "words": numbers.words,
}


def render(template: str, **values: object) -> str:
    """The page of a template. Characters that HTML forbids become U+FFFD; a name without a value raises."""
    return _FORBIDDEN.sub("\ufffd", _ENVIRONMENT.get_template(template).render(values))
