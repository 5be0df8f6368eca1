"""Prompts without a chat template: `data.template` renders the columns of a row, and the answer follows as it is.

The template runs in the process that renders chat templates, with its limits. It gets the columns that it names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata_platform.spec.sections.data import Data, is_template_file
from tasks.runtime.data.chat.special_tokens import SpecialTokens
from tasks.runtime.data.chat.template_renderer import TemplateLimit, TemplateRejection, render_prompt, template_columns
from tasks.runtime.data.chat.template_source import read_template, readable_template
from tasks.runtime.data.formats.columns import INPUTS, Shape, find_shape, known_shapes
from tasks.runtime.data.reading.rows import Row, RowError, require_valid_unicode

_ALPACA = Path(__file__).parent / "templates" / "alpaca.jinja"


class PromptTemplate:
    """The template that `data.template` names, for rows with these columns, of which the last is the completion."""

    def __init__(self, data: Data, columns: tuple[str, ...]) -> None:
        assert data.template is not None
        self._name = data.template
        self._source = template_source(data.template)
        self._columns = columns
        self._ignored = data.ignore_columns

    def render(self, row: Row, special: SpecialTokens) -> tuple[str, str, list[str]]:
        """The prompt, the completion, and the special tokens that are hidden in them; see `SpecialTokens.hide`.

        Raises:
            RowError: the completion is no text, or the template reads a column that the row lacks or that is null.
            ValueError: the template takes too long or too much memory.
        """
        completion = row.text(self._columns[-1])
        values = self._values(row)
        # As a list: texts in a column of any name are hidden.
        (completion, *found), hidden = special.hide([completion, *values.values()], row.where)
        try:
            prompt = render_prompt(self._source, dict(zip(values, found, strict=True)))
        except TemplateRejection as error:
            raise RowError(
                f"{row.where}: data.template: {self._shown()}: {error}; the row has the columns "
                f"{', '.join(repr(name) for name in row.fields() if name not in self._ignored)}"
            ) from error
        except TemplateLimit as error:
            raise ValueError(f"data.template: {self._shown()} {error} ({row.where}); correct it") from error
        require_valid_unicode(prompt, f"{row.where}: the prompt of data.template")
        return prompt, completion, hidden

    def _values(self, row: Row) -> dict[str, Any]:
        fields = {name: value for name, value in row.fields().items() if name not in self._ignored}
        if self._name != "alpaca":
            return {name: fields[name] for name in self._columns[:-1] if name in fields}
        question = self._columns[0]
        given = [row.text(name) for name in INPUTS if name not in self._columns and fields.get(name) is not None]
        return {"instruction": row.text(question), "input": "\n".join(text for text in given if text.strip())}

    def _shown(self) -> str:
        return repr(self._name) if len(self._name) <= 60 else f"{self._name[:60]!r}..."


def template_source(name: str) -> str:
    """The Jinja source that `data.template` names. Raises ValueError when its file does not exist or is not UTF-8."""
    if name == "alpaca":
        return _ALPACA.read_text(encoding="utf-8")
    if not is_template_file(name):
        return name
    return read_template(template_file(name), name, "data.template")


def template_file(name: str) -> Path:
    """The .jinja file that `data.template` names. Raises ValueError if there is none, or if it cannot be read."""
    return readable_template(name, "data.template", ("alpaca",))


def prompt_shape(data: Data, present: list[str]) -> Shape:
    """The columns that `data.template` reads, and the completion as the last one.

    Raises:
        ValueError: no column is the completion, the template reads it, the rows have another form, or the template
            is not one.
    """
    assert data.template is not None
    if data.template != "alpaca" and data.completion_column is not None:
        shape = Shape("prompt_completion", (data.completion_column,))
    else:
        # Not as under `pretrain`, where a column of texts comes first.
        found = find_shape(data, "sft", present)
        if found is None:
            raise ValueError(
                f"data.template needs the column of the completion, and none is known of {', '.join(present)}; known "
                f"are {known_shapes(data)}; set data.completion_column"
            )
        shape = found
    if shape.format not in ("prompt_completion", "alpaca"):
        raise ValueError(
            f"data.template renders rows with one question and one answer, but the data's format is {shape.format} "
            f"(column {shape.columns[0]!r}); leave data.template out, or set data.completion_column"
        )
    if data.template == "alpaca":
        return shape._replace(format="prompt_completion")
    try:
        read = template_columns(template_source(data.template))
    except TemplateLimit as error:
        raise ValueError(f"data.template {error}") from error
    answer = shape.columns[-1]
    if answer in read:
        raise ValueError(
            f"data.template reads the column {answer!r}, which is the completion and follows the prompt; take it out "
            "of the template, or set data.completion_column to another"
        )
    return Shape("prompt_completion", (*read, answer))
