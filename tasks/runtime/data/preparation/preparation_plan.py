"""The plan of a preparation: all that its parts have in common, fixed before the first one is prepared."""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from strata_platform.spec.sections.data import Data
from tasks.runtime.data.chat.json_chat import forms_of_key
from tasks.runtime.data.chat.message_keys import unknown_roles, unread_keys, unread_kwargs
from tasks.runtime.data.chat.special_tokens import texts_in
from tasks.runtime.data.chat.template_kwargs import COLUMN as TEMPLATE_KWARGS
from tasks.runtime.data.chat.template_source import template_text
from tasks.runtime.data.chat.tools import COLUMN as TOOLS
from tasks.runtime.data.formats.columns import CHATS, PROMPTS, Unread, columns_of, keys_in, optional_columns
from tasks.runtime.data.formats.format_choice import choose_format
from tasks.runtime.data.formats.known_formats import Format, make_format, raw_text
from tasks.runtime.data.formats.own_format import is_own, is_own_chat, own_digest
from tasks.runtime.data.formats.row_kind import have_messages, json_read_as_text
from tasks.runtime.data.formats.scores import score_column
from tasks.runtime.data.formats.teacher_columns import teacher_columns
from tasks.runtime.data.media.media_processor import processor_of
from tasks.runtime.data.preparation.encode_rows import Report, raise_unless_skipping
from tasks.runtime.data.preparation.parts import PART_BYTES, Part, Piece, divide
from tasks.runtime.data.preparation.prepare_part import numbered_rows
from tasks.runtime.data.preparation.tokenizer import TRAINED_TEMPLATE, load_tokenizer, train_tokenizer
from tasks.runtime.data.preparation.validation import uniform
from tasks.runtime.data.prepared_manifest import PLAN_KIND
from tasks.runtime.data.reading.readers import Span
from tasks.runtime.data.reading.rows import Row, RowError
from tasks.runtime.data.reading.sources import Source, open_source
from tasks.runtime.data.reading.text_files import pieces
from tasks.runtime.data.shard_store import ShardStore
from tasks.runtime.run_folder import format_versions

# Rows that are read to choose the format.
_FORMAT_ROWS = 100
_FORMAT_CHARACTERS = 1 << 26


def package_versions(data: Data) -> dict[str, str]:
    """Versions of whatever decides how a text becomes rows; of a format of the user's, the digest of its code."""
    packages = {package: version(package) for package in ("tokenizers", "transformers", "numpy")}
    own = {data.format: own_digest(data)} if is_own(data.format) else {}
    return {"python": platform.python_version(), **packages, **own}


@dataclass(frozen=True)
class Plan:
    """What the parts of a preparation have in common, in the order in which they are prepared.

    control: whether special tokens in the data are control tokens; see `data.special_tokens`.
    url: the place of the shards in an object store, if they are not in the folder.
    score: the column with a number for each row; see `scores`.
    teacher: the columns with a teacher's log-probabilities; see `teacher_columns`.
    """

    recipe: dict[str, Any]
    recipe_hash: str
    source: str
    format: str
    columns: tuple[str, ...]
    control: bool
    parts: tuple[Part, ...]
    versions: dict[str, str]
    url: str | None = None
    score: str | None = None
    teacher: tuple[str, ...] = ()
    version: int = format_versions.DATA
    kind: str = PLAN_KIND

    def format_for(self, recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase) -> Format:
        """The format of the rows, as it was chosen by the first ones."""
        data = recipe.data.model_copy(update={"special_tokens": "control" if self.control else "text"})
        processor = processor_of(recipe, tokenizer)
        return make_format(
            self.format, self.columns, tokenizer, data, score=self.score, processor=processor, teacher=self.teacher
        )

    @property
    def divided(self) -> bool:
        """Whether the parts are prepared one by one."""
        return self.url is not None or self.parts[0].pieces is not None

    def store(self, folder: Path) -> ShardStore:
        """The place of the shards, if the plan is in `folder`."""
        return ShardStore(folder if self.url is None else self.url)

    @property
    def hash(self) -> str:
        """Digest of all that decides the rows."""
        return hashlib.sha256(self.to_json()).hexdigest()[:16]

    def to_json(self) -> bytes:
        """The contents of `plan.json`."""
        # Plans of data without scores and teachers are those of earlier versions, whose runs continue.
        values = {name: value for name, value in asdict(self).items() if name not in ("score", "teacher") or value}
        return json.dumps(values, ensure_ascii=False).encode()


def parse_plan(content: bytes | None) -> Plan | None:
    """The plan in the contents of `plan.json`; None when they are not a plan of this version of Strata."""
    try:
        values = json.loads(content or b"null")
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("kind") != PLAN_KIND or values.get("version") != format_versions.DATA:
        return None
    values["columns"] = tuple(values["columns"])
    values["teacher"] = tuple(values.get("teacher", ()))
    values["parts"] = tuple(_part(*part) for part in values["parts"])
    return Plan(**values)


def _part(place: int, pieces: list[Any] | None) -> Part:
    if pieces is None:
        return Part(place, None)
    return Part(place, tuple(Piece(file, Span(*span) if span else None) for file, span in pieces))


def make_plan(
    recipe: DataRecipe, source: Source, parts: list[Part], url: str | None, report: Report
) -> tuple[Plan, PreTrainedTokenizerBase, Format]:
    """Choose the format by the first rows, and load or train the tokenizer; its chat template is that of the data.

    Raises ValueError: there are no rows, no format fits them, a column is missing, or the tokenizer cannot be loaded.
    """
    first = _first(row for _, row in _rows(parts, source, recipe))
    if not first:
        raise ValueError(f"data.source {source.name!r} has no rows")
    name, columns = choose_format(recipe, first)
    score = score_column(recipe, columns_of(first))
    extra = [column for column in optional_columns(name, columns, recipe.data) if column in columns_of(first)]
    teacher = teacher_columns(recipe, columns_of(first))
    extra += [*([] if score is None else [score]), *teacher]
    by = "" if recipe.data.template is None else f", prompts by data.template {recipe.data.template[:60]!r}"
    report(f"{source.name}: format {name}, from {', '.join((*columns, *extra))}{by}")
    # They are passed to the template with the messages that a class of the user's makes.
    passed = (TOOLS, TEMPLATE_KWARGS) if is_own_chat(recipe.data) else ()
    _report_unread(recipe, Unread(name, (*columns, *passed), recipe.data, score, teacher), name, first, report)
    tokenizer = _tokenizer(recipe, source, parts, name, columns, first, report)
    processor = processor_of(recipe, tokenizer)
    row_format = make_format(name, columns, tokenizer, recipe.data, first, score, processor, teacher)
    if recipe.data.chat_template and row_format.templates is None:
        warnings.warn(f"data.chat_template has no effect on {source.name}, whose format is {name}", stacklevel=4)
    if recipe.data.format == "alpaca" and have_messages(columns, first, recipe.data):
        report(f"{source.name}: messages as JSON are read as text, by data.format 'alpaca'")
    for read_as_text in json_read_as_text(name, columns, first, recipe.data):
        warnings.warn(read_as_text, stacklevel=4)
    _report_mapping(recipe, source, name, columns, first)
    if not recipe.trains_tokenizer:
        _require_roles(recipe, row_format.templates, name, columns, first)
    if left := unread_keys(row_format, columns, tokenizer, recipe.data, first):
        report(f"keys of messages that the chat template does not read: {', '.join(left)}")
    if left := unread_kwargs(row_format, recipe.data, first):
        named = ", ".join(map(repr, left))
        report(f"keys of column {TEMPLATE_KWARGS!r} that the chat template does not read: {named}")
    if row_format.templates is not None:
        tokenizer.chat_template = row_format.templates
    plan = Plan(
        recipe=recipe.model_dump(mode="json"),
        recipe_hash=recipe.hash(),
        source=source.name,
        format=name,
        columns=columns,
        control=row_format.special_tokens.control,
        parts=tuple(parts),
        versions=package_versions(recipe.data),
        url=url,
        score=score,
        teacher=teacher,
    )
    return plan, tokenizer, row_format


def _in_order(parts: list[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: part.place)


def _first(rows: Iterator[Row]) -> list[Row]:
    """The rows that choose the format: fewer if they are long."""
    first: list[Row] = []
    characters = 0
    for row in islice(rows, _FORMAT_ROWS):
        first.append(row)
        characters += sum(map(len, texts_in(row.values)))
        if characters > _FORMAT_CHARACTERS:
            break
    return first


def _report_unread(recipe: DataRecipe, unread: Unread, name: str, first: list[Row], report: Report) -> None:
    """Report the columns of the first rows that are not read. Raises ValueError if one changes what a row means.

    Warns of fields of `data` that name a column in vain.
    """
    for field in unread.without_effect():
        warnings.warn(f"data.{field} has no effect: the data's format is {name}", stacklevel=5)
    for row in first:
        unread.require_harmless(row)
    # Rewards may read any column of a prompt.
    if name not in PROMPTS and (left := [column for column in columns_of(first) if column not in unread.read]):
        report(f"columns not used: {', '.join(map(repr, left))}")
    # It names keys of messages, too.
    known = keys_in([row.values for row in first])
    if missing := [column for column in recipe.data.ignore_columns if column not in known]:
        found = f"none of the first {len(first)} rows has {', '.join(map(repr, missing))}"
        warnings.warn(f"data.ignore_columns: {found}", stacklevel=5)


def _report_mapping(recipe: DataRecipe, source: Source, name: str, columns: tuple[str, ...], first: list[Row]) -> None:
    """Warn of keys and roles of messages that are mapped for nothing in the first rows."""
    data = recipe.data
    if name not in CHATS or name == "alpaca" or not have_messages(columns, first, data):
        for field in ("message_keys", "roles"):
            if getattr(data, field):
                found = f"has no effect on {source.name}: its rows, of format {name}, have no messages with keys"
                warnings.warn(f"data.{field} {found}", stacklevel=5)
    elif missing := _missing_keys(data, first):
        found = f"no message of the first {len(first)} rows has {', '.join(map(repr, missing))}"
        warnings.warn(f"data.message_keys: {found}", stacklevel=5)


def _require_roles(
    recipe: DataRecipe, templates: str | dict[str, str] | None, name: str, columns: tuple[str, ...], first: list[Row]
) -> None:
    """Raise ValueError with all unknown roles of the first rows, or warn of them if such rows are skipped."""
    # In format alpaca, messages as JSON are text.
    mapped = name in CHATS and name != "alpaca"
    if mapped and (problem := unknown_roles(templates, columns, recipe.data, first)):
        raise_unless_skipping(recipe, RowError(problem))
        warnings.warn(problem, stacklevel=5)


def _missing_keys(data: Data, first: list[Row]) -> list[str]:
    """Keys of `data.message_keys` that no message has, be it one of a JSON text."""
    known = keys_in([row.values for row in first])
    texts = [text for row in first for text in texts_in(row.values)]
    mapped = [key for key in data.message_keys.values() if key not in known]
    return [key for key in mapped if not any(form in text for form in forms_of_key(key) for text in texts)]


def _tokenizer(
    recipe: DataRecipe,
    source: Source,
    parts: list[Part],
    name: str,
    columns: tuple[str, ...],
    first: list[Row],
    report: Report,
) -> PreTrainedTokenizerBase:
    if not recipe.trains_tokenizer:
        return load_tokenizer(recipe)
    report("training a tokenizer on the data")
    if not recipe.tokenizer_data:
        return train_tokenizer(_training_texts(recipe, _rows(parts, source, recipe), name, columns, first))
    texts = [_texts_of(recipe.model_copy(update={"data": data})) for data in recipe.tokenizer_data]
    # In turns: the first source may have more text than is read.
    return train_tokenizer(text for turn in zip_longest(*texts) for text in turn if text is not None)


def _rows(parts: list[Part], source: Source, recipe: DataRecipe) -> Iterator[tuple[int, Row]]:
    return (row for part in _in_order(parts) for row in numbered_rows(part, source, recipe))


def _texts_of(recipe: DataRecipe) -> Iterator[str]:
    """Texts of the training split of a recipe's source."""
    source = open_source(recipe)
    parts = divide(source, max_samples=recipe.data.max_samples, seed=recipe.seed, part_bytes=PART_BYTES)
    first = _first(row for _, row in _rows(parts, source, recipe))
    name, columns = choose_format(recipe, first)
    return _training_texts(recipe, _rows(parts, source, recipe), name, columns, first)


def _training_texts(
    recipe: DataRecipe, rows: Iterator[tuple[int, Row]], name: str, columns: tuple[str, ...], first: list[Row]
) -> Iterator[str]:
    """Texts of the training split. Skips invalid rows without counting them, which happens later.

    Plain texts are all taken: what is held out of them is known only when they are tokenized.
    """
    if name in CHATS:
        # Or the first row with an unknown role would end it.
        _require_roles(recipe, template_text(recipe.data.chat_template or TRAINED_TEMPLATE), name, columns, first)
    for number, row in rows:
        if name != "text" and uniform(recipe.seed, number) < recipe.data.validation_fraction:
            continue
        try:
            yield from pieces(raw_text(name, columns, row, recipe.data))
        except RowError as error:
            raise_unless_skipping(recipe, error)
