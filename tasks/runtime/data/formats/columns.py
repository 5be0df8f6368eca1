"""The known columns: the formats that they form, and the meaning of columns that a format does not read.

Data is published under many names of columns, and three tables hold these: `SHAPES`, the optional columns, and
`_MEANINGS`. A column that changes what a row means and is not read is refused until it is mapped or ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.objectives import PAIRED, PROMPTED
from tasks.runtime.data.chat.template_kwargs import COLUMN as TEMPLATE_KWARGS
from tasks.runtime.data.chat.tools import COLUMN as TOOLS
from tasks.runtime.data.chat.tools import drop_nulls
from tasks.runtime.data.formats.token_rows import COLUMN as TOKENS
from tasks.runtime.data.formats.token_rows import OPTIONAL as BESIDE_TOKENS
from tasks.runtime.data.formats.token_rows import UNPACK
from tasks.runtime.data.media.kinds import MEDIA
from tasks.runtime.data.media.media_messages import media_columns
from tasks.runtime.data.reading.rows import Row, describe_type, suggestion

# Formats with the fields of `data` that name their columns. The first of a pair's, the prompt, may be missing.
_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text_column",),
    "tokens": (),
    "chat": ("messages_column",),
    "prompt_completion": ("prompt_column", "completion_column"),
    "alpaca": ("prompt_column", "completion_column"),
    "preference": ("prompt_column", "chosen_column", "rejected_column"),
    "preference_chat": ("prompt_column", "chosen_column", "rejected_column"),
    "prompt": ("prompt_column",),
    "prompt_chat": ("prompt_column",),
}
CHATS = ("chat", "alpaca", "preference_chat", "prompt_chat")
"""Formats whose rows become messages."""
PREFERENCES = ("preference", "preference_chat")
"""Formats of pairs of answers: as texts, or as chats."""
PROMPTS = ("prompt", "prompt_chat")
"""Formats of prompts without answers, which the model generates: as texts, or as chats."""


class Shape(NamedTuple):
    """Columns that make a format, in the order of its fields."""

    format: str
    columns: tuple[str, ...]


SHAPES = (
    # OpenAI, TRL; ShareGPT; ms-swift.
    Shape("chat", ("messages",)),
    Shape("chat", ("conversations",)),
    Shape("chat", ("conversation",)),
    # Texts that are continued as they are: TRL, OpenAI.
    Shape("prompt_completion", ("prompt", "completion")),
    # A question and its answer, which are two turns of a chat: Alpaca, Dolly, LLaMA-Factory, OpenOrca, and others.
    Shape("alpaca", ("instruction", "output")),
    Shape("alpaca", ("instruction", "response")),
    Shape("alpaca", ("query", "response")),
    Shape("alpaca", ("question", "answer")),
    Shape("alpaca", ("question", "response")),
    Shape("alpaca", ("problem", "solution")),
    Shape("alpaca", ("prompt", "response")),
    Shape("alpaca", ("input", "output")),
    # By `data.format` alone.
    Shape("alpaca", ("prompt", "completion")),
    # Pairs: TRL; LLaMA-Factory; orca_dpo. Answers without a prompt are whole chats: hh-rlhf, UltraFeedback.
    Shape("preference", ("prompt", "chosen", "rejected")),
    Shape("preference_chat", ("conversations", "chosen", "rejected")),
    Shape("preference_chat", ("question", "chosen", "rejected")),
    Shape("preference_chat", ("query", "chosen", "rejected")),
    Shape("preference_chat", ("instruction", "chosen", "rejected")),
    Shape("preference_chat", ("input", "chosen", "rejected")),
    Shape("preference", ("chosen", "rejected")),
    # Prompts without answers: TRL; questions with columns about their answers.
    Shape("prompt", ("prompt",)),
    Shape("prompt_chat", ("messages",)),
    Shape("prompt_chat", ("question",)),
    Shape("prompt_chat", ("problem",)),
    Shape("prompt_chat", ("instruction",)),
    Shape("text", ("text",)),
    Shape("text", ("content",)),
    # Tokenized beforehand, as `datasets` and trainers store it.
    Shape("tokens", (TOKENS,)),
)
"""What `data.format: auto` recognizes; the first that fits is taken. Under `pretrain` texts come first."""

# Columns that chats read if they are there: system messages, and for questions further text and earlier turns.
SYSTEM = ("system", "system_prompt", "system_message")
INPUTS = ("input", "context")
HISTORY = "history"

_RAW = ("prompt_completion", "preference")
_ALPACA = "set data.format to 'alpaca', or 'preference_chat' for pairs"


def _is_given(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _has_kwargs(value: Any) -> bool:
    """Whether there is a value in an object or its JSON; columnar files give every row the keys of all rows."""
    return value.strip() not in ("", "{}", "null") if isinstance(value, str) else bool(drop_nulls(value))


def _is_negative(value: Any) -> bool:
    return value == 0 or (isinstance(value, str) and value.strip().lower() in ("0", "false", "no"))


def _is_other_than_one(value: Any) -> bool:
    return value not in (1, "1", "1.0")


def _are_other_positions(value: Any) -> bool:
    return not isinstance(value, list) or value != [*range(len(value))]


def _are_several(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


class _Meaning(NamedTuple):
    """In which formats, and with which values, a column changes what a row means; its meaning; and what to do."""

    formats: tuple[str, ...]
    changes: Callable[[Any], bool]
    says: str
    way_out: str


_MEANINGS: dict[str, _Meaning] = {
    "input": _Meaning(_RAW, _is_given, "is a part of the prompt", _ALPACA),
    HISTORY: _Meaning((*_RAW, *CHATS), _is_given, "holds earlier turns of the chat", _ALPACA),
    "system": _Meaning(
        (*_RAW, *CHATS),
        _is_given,
        "holds a system message",
        "set data.system_column to it; a prompt and an answer that are texts are read as a chat by data.format "
        "'alpaca', or 'preference_chat' for pairs",
    ),
    # KTO's label of a single answer.
    "label": _Meaning(
        (*_RAW, *CHATS),
        _is_negative,
        "marks a bad answer, which would be learned as good",
        "set objective.type to 'kto', drop such rows",
    ),
    "train": _Meaning((*_RAW, *CHATS, "tokens"), _is_negative, "excludes the row from training", "drop such rows"),
    "weight": _Meaning((*_RAW, *CHATS, "tokens"), _is_other_than_one, "weighs the row", "drop the column"),
    "mask": _Meaning(
        (*_RAW, *CHATS, "tokens"),
        _is_given,
        "says which tokens carry loss",
        "give messages with weight 0, or labels of -100, instead",
    ),
    **{
        medium.columns[0]: _Meaning(
            _RAW, _is_given, f"holds {medium.several}", "give the row as a chat, by data.format 'alpaca' or messages"
        )
        for medium in MEDIA
    },
    "videos": _Meaning((*_RAW, *CHATS), _is_given, "holds videos", "only texts, images and audio are read"),
    TEMPLATE_KWARGS: _Meaning(
        (*_RAW, "prompt"),
        _has_kwargs,
        "changes how a chat is rendered",
        f"{_ALPACA}, or 'prompt_chat' for prompts",
    ),
    # Of rows that other trainers packed: a model would attend from one sample to the sample before it.
    "position_ids": _Meaning(
        ("tokens",), _are_other_positions, "gives tokens other positions than 0, 1, 2, ..., as of packed rows", UNPACK
    ),
    "seq_lengths": _Meaning(("tokens",), _are_several, "says that the row packs several samples", UNPACK),
    "functions": _Meaning(CHATS, _is_given, "holds the tools of the chat", f"rename it to {TOOLS!r}"),
}
_SYNONYMS = {
    **{synonym: medium.columns[0] for medium in MEDIA for synonym in medium.columns[1:]}, "video": "videos",
    "context": "input", "system_prompt": "system", "system_message": "system",
    "kto_tag": "label", "loss": "train",
    "masks": "mask", "loss_mask": "mask", "completion_mask": "mask", "assistant_masks": "mask",
}  # fmt: skip


def columns_of(rows: list[Row]) -> list[str]:
    """Names of the columns of rows, in the order in which they appear."""
    return list(dict.fromkeys(name for row in rows if isinstance(row.values, dict) for name in row.values))


def find_shape(data: Data, objective: str, present: list[str]) -> Shape | None:
    """The first shape that fits the columns `present`, under the names that `data` gives; None if there is none.

    Raises ValueError if the columns of `data.format`, or of `objective`, are missing.
    """
    shapes = [shape._replace(columns=_named(shape, data)) for shape in SHAPES]
    if objective in PAIRED:
        wanted = [shape for shape in shapes if shape.format in PREFERENCES]
        if data.format == "preference_chat":
            wanted = [shape._replace(format=data.format) for shape in wanted]
    elif objective in PROMPTED:
        wanted = [shape for shape in shapes if shape.format in PROMPTS]
        if data.format == "prompt_chat":
            wanted = [shape._replace(format=data.format) for shape in wanted]
    elif data.format != "auto":
        wanted = [shape for shape in shapes if shape.format == data.format]
    else:
        wanted = [shape for shape in shapes if shape.format not in (*PREFERENCES, *PROMPTS)]
        if objective == "pretrain":
            wanted.sort(key=lambda shape: shape.format != "text")
    found = next((shape for shape in wanted if set(shape.columns) <= set(present)), None)
    if found is None and (data.format != "auto" or objective in (*PAIRED, *PROMPTED)):
        raise ValueError(_missing(data, objective, wanted, present))
    return found


def known_shapes(data: Data) -> str:
    """The columns that `data.format: auto` looks for, for messages."""
    others = (*PREFERENCES, *PROMPTS)
    columns = dict.fromkeys(_named(shape, data) for shape in SHAPES if shape.format not in others)
    return ", ".join(" with ".join(map(repr, names)) for names in columns)


def _named(shape: Shape, data: Data) -> tuple[str, ...]:
    """The shape's columns, under the names that fields of `data` give them."""
    fields = _FIELDS[shape.format][-len(shape.columns) :]
    if not fields:
        return shape.columns
    return tuple(getattr(data, field) or column for field, column in zip(fields, shape.columns, strict=True))


def _missing(data: Data, objective: str, wanted: list[Shape], present: list[str]) -> str:
    """The message for columns of `wanted` that are missing: of the shape that lacks the fewest."""
    if objective in PAIRED:
        wanted = [shape for shape in wanted if len(shape.columns) == 2]
    near = min(wanted, key=lambda shape: len(set(shape.columns) - set(present)))
    if near.format == "tokens":
        has = f"{', '.join(map(repr, present))}{suggestion(TOKENS, present)}"
        return f"data.format 'tokens' needs the column {TOKENS!r}, but the data has {has}"
    fields = _FIELDS[near.format][-len(near.columns) :]
    field, column = next(pair for pair in zip(fields, near.columns, strict=True) if pair[1] not in present)
    has = f"{', '.join(map(repr, present))}{suggestion(column, present)}"
    if objective in PAIRED:
        return (
            f"the objective needs pairs of answers, but the data has no column {column!r}, only {has}; set data.{field}"
        )
    if objective in PROMPTED:
        return f"the objective needs prompts, but the data has no column {column!r}, only {has}; set data.{field}"
    return f"data.format {data.format!r} needs the column {column!r}, but the data has {has}; set data.{field}"


def optional_columns(name: str, columns: Iterable[str], data: Data) -> tuple[str, ...]:
    """Columns that format `name` reads if they are there, beside its `columns`."""
    if data.template == "alpaca":
        return tuple(column for column in INPUTS if column not in data.ignore_columns and column not in columns)
    if name == "tokens":
        return tuple(column for column in BESIDE_TOKENS if column not in data.ignore_columns)
    if name not in CHATS:
        return ()
    media = (column for medium in MEDIA for column in media_columns(data, medium))
    found = (*system_columns(data), TOOLS, TEMPLATE_KWARGS, *media)
    if name in ("alpaca", "prompt_chat") or (name == "preference_chat" and len(tuple(columns)) == len(_FIELDS[name])):
        found += (*INPUTS, HISTORY)
    return tuple(column for column in found if column not in data.ignore_columns and column not in columns)


def system_columns(data: Data) -> tuple[str, ...]:
    """Columns that may hold the system message of a chat."""
    return SYSTEM if data.system_column is None else (data.system_column,)


class Unread:
    """The columns that a format leaves unread.

    read: the columns that the format needs, and those that it reads if they are there.
    score: the column with a number for each row, if the objective reads one.
    teacher: the columns with a teacher's log-probabilities, if it reads these.
    """

    def __init__(
        self,
        name: str,
        columns: tuple[str, ...],
        data: Data,
        score: str | None = None,
        teacher: tuple[str, ...] = (),
    ) -> None:
        self.read = {*columns, *optional_columns(name, columns, data), *((score,) if score else ()), *teacher}
        meanings = {**_MEANINGS, **{synonym: _MEANINGS[known] for synonym, known in _SYNONYMS.items()}}
        if data.system_column is not None:
            meanings[data.system_column] = _MEANINGS["system"]
        self._meanings = {
            column: meaning
            for column, meaning in meanings.items()
            if name in meaning.formats and column not in self.read and column not in data.ignore_columns
        }
        self._format = name
        self._data = data

    def without_effect(self) -> list[str]:
        """Fields of `data` that name a column which the format does not read."""
        fields = [field for field in Data.model_fields if field.endswith("_column")]
        given = {field: getattr(self._data, field) for field in fields if getattr(self._data, field) is not None}
        unread = {*given.values()} - self.read - {*self._data.ignore_columns}
        return [f"{field} {value!r}" for field, value in given.items() if value in unread]

    def require_harmless(self, row: Row) -> None:
        """Raise ValueError if a column that is not read changes what the row means."""
        if not isinstance(row.values, dict):
            return
        for column in self._meanings.keys() & row.values.keys():
            meaning, value = self._meanings[column], row.values[column]
            if value is not None and meaning.changes(value):
                reader, way_out = f"format {self._format}", meaning.way_out
                if self._data.template is not None:
                    reader, way_out = "data.template", "read it in a template of your own"
                raise ValueError(
                    f"{row.where}: column {column!r} holds {describe_type(value)}; it {meaning.says}, and {reader} "
                    f"does not read it: {way_out}, or name {column!r} in data.ignore_columns"
                )


def keys_in(value: Any) -> set[str]:
    """Keys of all mappings in a value, at any depth."""
    keys: set[str] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            keys |= item.keys()
            left += item.values()
        elif isinstance(item, list):
            left += item
    return keys
