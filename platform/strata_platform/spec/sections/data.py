"""The section `data`: what to train on, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from strata_platform.spec.describe import Allowed
from strata_platform.spec.sections.fields import (
    Arguments,
    Count,
    Flag,
    FolderOrUrl,
    Integer,
    Number,
    ObjectName,
    ObjectStoreUrl,
    Section,
    Sources,
    Text,
    number,
)

BUILTIN_SOURCES = ("python-docs",)
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ROW_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv")
"""Ends of the names of files of rows with columns."""
TEXT_SUFFIXES = (".txt", ".md", ".rst")
EXTENSIONS = (*ROW_SUFFIXES, *TEXT_SUFFIXES)
"""Ends of the names of the files that can be read, without the compression."""
DATA_SUFFIXES = tuple(f"{suffix}{packed}" for suffix in EXTENSIONS for packed in ("", *COMPRESSIONS))
"""Ends of the names of data files."""


def is_template_file(template: str) -> bool:
    """Whether a value of `data.template` names a file, rather than a built-in template or being one itself."""
    return template.endswith(".jinja") and not _is_jinja(template)


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def _template(value: str) -> str:
    if value != "alpaca" and not _is_jinja(value) and not is_template_file(value):
        raise ValueError("neither 'alpaca', nor a .jinja file, nor a Jinja text, which contains {{ or {%")
    return value


Template = Annotated[Text, AfterValidator(_template), Allowed("'alpaca', a .jinja file, or a Jinja text")]
Role = Literal["system", "user", "assistant", "tool"]
TrainOn = Literal["completions", "last_turn", "all"] | Annotated[tuple[Role, ...], Field(min_length=1)]
FormatName = Literal[
    "auto", "text", "tokens", "prompt_completion", "chat", "alpaca", "preference", "preference_chat", "prompt",
    "prompt_chat",
]  # fmt: skip

MEDIA_FIELDS = (
    "images_column", "image_folder", "image_max_pixels", "image_min_pixels",
    "audios_column", "audio_folder", "audio_max_seconds", "audio_min_seconds",
)  # fmt: skip
"""Fields of `data` that say that rows have images or audio."""
MAX_SOURCES = 100
SHORTEST_AUDIO = 0.1
"""Seconds of an audio at least: models of less have no token for it, or take it for a text without one."""


class Reading(Section):
    """One source of rows, and how they are read."""

    source: Sources | None = Field(
        None, description="As `data.source`; by default the same, whose `subset` and `revision` then count, too."
    )
    documents: Literal["file", "paragraph", "line"] = Field(
        "file",
        description="What counts as one document in a text file. Paragraphs are separated by blank lines. No document "
        "attends to another.",
    )
    document_separator: Text | None = Field(
        None, description="Text that divides the documents of a text file, such as `<|endoftext|>`."
    )
    subset: Text | None = Field(
        None, description="Configuration of a Hub data set, or of a folder whose card lists some."
    )
    split: Text = Field(
        "train", description="Split to train on, of a Hub data set or a folder whose files name splits."
    )
    revision: Text | None = Field(None, description="Commit, tag or branch of a Hub data set.")
    format: FormatName | ObjectName = Field(
        "auto",
        description="Format of a row. `auto` decides by the columns; the page Data formats has all forms. `alpaca` is "
        "a question and its answer, as a chat. `preference_chat` reads pairs of texts as chats, `tokens` ids, "
        "`prompt_chat` prompts as chats. A class of your own, such as `my_package.formats:Tickets`, is based on one of "
        "`tasks.runtime.extensions`.",
    )
    format_arguments: Arguments = Field({}, description="What a `format` of your own is called with, by name.")
    text_column: Text | None = Field(None, description="Column of format `text`; by default `text` or `content`.")
    prompt_column: Text | None = Field(
        None,
        description="Column of prompts, of `prompt_completion`, `alpaca`, `preference` and `prompt`; by default a "
        "known name.",
    )
    completion_column: Text | None = Field(
        None, description="Completion or answer column of `prompt_completion` and `alpaca`; by default a known name."
    )
    template: Template | None = Field(
        None,
        description="What renders the prompt of a row with one question and one answer, for models without a chat "
        "template: `alpaca`, a .jinja file, or a Jinja text over the row's columns. The answer follows as the "
        "completion. See [Prompt templates](prompt-templates.md).",
    )
    messages_column: Text | None = Field(
        None,
        description="Column of format `chat`; by default `messages`, `conversations` or `conversation`: a list of "
        "{role, content}, or of {from, value} as in ShareGPT. Assistant messages with `weight: 0` carry no loss. The "
        "chat template also gets a column `tools`, if there is one.",
    )
    system_column: Text | None = Field(
        None,
        description="Column with the system message of a chat, for chats of every format; by default `system`, "
        "`system_prompt` or `system_message`, if there is one.",
    )
    chosen_column: Text | None = Field(
        None, description="Column of `preference`: the better answer, text or messages; by default `chosen`."
    )
    rejected_column: Text | None = Field(
        None, description="Column of `preference`: the other answer; by default `rejected`."
    )
    margin_column: Text | None = Field(
        None,
        description="Column with a number by which the score of the chosen answer should be larger, for `reward`; by "
        "default `margin`, if there is one.",
    )
    label_column: Text | None = Field(
        None,
        description="Column that says whether an answer is good, for `kto`: true or false; by default `label` or "
        "`kto_tag`.",
    )
    images_column: Text | None = Field(
        None,
        description="Column with the images of a chat, in order: paths, URLs, or bytes; by default `images` or "
        "`image`. See [Vision-language models](vision.md).",
    )
    image_folder: FolderOrUrl | None = Field(
        None, description="Folder or URL that relative paths of images start from; by default that of the data file."
    )
    image_max_pixels: Count | None = Field(
        None,
        description="Maximum pixels of an image, width times height: a larger one is scaled down before the model's "
        "own processor. By default the processor alone decides.",
    )
    image_min_pixels: Count | None = Field(
        None, description="Minimum pixels of an image: a row with a smaller one is skipped and counted."
    )
    audios_column: Text | None = Field(
        None,
        description="Column with the audio of a chat, in order: paths, URLs, or bytes; by default `audios` or `audio`. "
        "See [Audio](audio.md).",
    )
    audio_folder: FolderOrUrl | None = Field(
        None, description="Folder or URL that relative paths of audio start from; by default that of the data file."
    )
    audio_max_seconds: Annotated[float, Field(ge=SHORTEST_AUDIO), BeforeValidator(number)] | None = Field(
        None,
        description="Maximum seconds of an audio; a processor that truncates audio has a limit of its own. `overlong` "
        "decides what happens to a longer one.",
    )
    audio_min_seconds: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None, description="Minimum seconds of an audio: a row with a shorter one is skipped and counted."
    )
    ignore_columns: tuple[Text, ...] = Field(
        (),
        description="Columns, and keys of messages, to leave unread although they may change what a row means, such as "
        "`label`.",
    )
    special_tokens: Literal["auto", "text", "control"] = Field(
        "auto",
        description="What special tokens mean that texts and messages contain: `control` tokens, or `text` like any "
        "other. `auto`: text, but control tokens if each of the first texts, or of the first prompts with completions, "
        "has some, as in chats that were rendered beforehand.",
    )
    overlong: Literal["skip", "truncate", "error"] = Field(
        "skip",
        description="What to do with a sample longer than a row, or a pair of answers, and with an audio that is too "
        "long. Skips are counted and reported; plain text is split instead, under `pretrain` all of it.",
    )
    invalid: Literal["error", "skip"] = Field(
        "error", description="What to do with a row of the wrong type. Skips are counted and reported."
    )
    max_samples: Annotated[int, Field(ge=1, le=10**12), BeforeValidator(number)] | None = Field(
        None, description="Use only the first N samples of the source."
    )

    @property
    def names(self) -> tuple[str, ...]:
        """`source` as a tuple; empty without one."""
        return (self.source,) if isinstance(self.source, str) else self.source or ()


class ValidationSource(Reading):
    """Rows for evaluation that come from elsewhere, instead of samples that are held out: a source, or a section.

    Fields that a section leaves out are those of the source that it belongs to.
    """


def _only_source(value: object) -> object:
    """A text or a list of texts is a section with this `source` alone."""
    return {"source": value} if isinstance(value, str | list | tuple) else value


_Validation = Annotated[
    ValidationSource | None,
    BeforeValidator(_only_source, json_schema_input_type=ValidationSource | Sources | None),
]
_VALIDATION = (
    "Rows for evaluation that come from elsewhere: files or a Hub data set id, or a section with `source`, `split` and "
    "other fields of `data` about reading. Then no samples are held out."
)


class MixtureSource(Reading):
    """One of several sources, instead of `data.source`. Fields that it leaves out are those of `data`.

    See [Mixtures](mixtures.md).
    """

    source: Sources = Field(description="As `data.source`.")
    weight: Annotated[float, Field(gt=0, le=1e9), BeforeValidator(number)] | None = Field(
        None,
        description="Share of the rows of a run that come from this source, relative to the other weights. With "
        "`packing`, rows are equally long, so it is the share of tokens, too; without, it is the share of samples. "
        "Sources smaller than their share repeat. Without weights, an epoch has each row of every source once.",
    )
    validation_fraction: Number = Field(
        0.05, ge=0.0, le=0.5, description="Share of samples held out for evaluation; by default that of `data`."
    )
    validation_source: _Validation = Field(None, description=_VALIDATION)


class SingleSource(NamedTuple):
    """A single source of the data: its own section, and whether it has rows for evaluation alone."""

    data: Data
    validation_only: bool = False


class Data(Reading):
    """What to train on, and how rows become tokens."""

    source: Sources | None = Field(
        "python-docs",
        description="`python-docs` (built in), a Hub data set id, or files: path, folder, glob or URL of .jsonl, "
        ".json, .parquet, .arrow, .csv or .tsv, or of text: .txt, .md, .rst; several as a list. Credentials come from "
        "the environment.",
    )
    sources: Annotated[
        tuple[MixtureSource, ...],
        Field(max_length=MAX_SOURCES),
        Allowed("a list of sections, each with a source"),
    ] = Field(
        (),
        description="Several sources instead of `source`, each with a weight, fields of `data` about reading, and a "
        "validation part of its own.",
    )
    chat_template: Text | None = Field(
        None, description="Named chat template (`chatml`, `llama3`), or a .jinja file; by default the tokenizer's own."
    )
    train_on: Annotated[TrainOn | None, Allowed("'completions', 'last_turn', 'all', a list of roles, or null")] = Field(
        None,
        description="Which tokens carry loss: `completions` (all turns of the assistant), `last_turn` (its last one), "
        "`all` tokens, or the messages of a list of roles, such as `[assistant, tool]`. By default `all` under "
        "`pretrain`, `completions` under `sft` and `distill`, whole answers for preferences. The assistant's messages "
        "with `weight: 0` carry none.",
    )
    sequence_length: Integer = Field(256, ge=8, le=1 << 20, description="Tokens in a row of a batch.")
    packing: Flag = Field(True, description="Put several samples into one row; none attends to another.")
    validation_fraction: Number = Field(0.05, ge=0.0, le=0.5, description="Share of samples held out for evaluation.")
    validation_source: _Validation = Field(None, description=_VALIDATION)
    shuffle: Literal["global", "window"] = Field(
        "global",
        description="Order of the rows in an epoch: a permutation of all, or shards in random order, the rows of "
        "`shuffle_window` of them permuted together, so that only these are read at a time.",
    )
    shuffle_window: Count | None = Field(
        None, description="Shards of a window, each of up to 16 million tokens; 8 by default."
    )
    prepared_url: ObjectStoreUrl | None = Field(
        None, description="Object store for prepared rows (`s3://...`), read through a cache on each machine's disk."
    )
    cache_gib: Annotated[float, Field(gt=0, le=1e6), BeforeValidator(number)] | None = Field(
        None, description="Disk that the cache of `prepared_url` takes at most, in GiB; 32 by default."
    )
    streaming: Flag = Field(
        False, description="Begin to train while later parts are still being prepared; needs `shuffle: window`."
    )

    @model_validator(mode="after")
    def _inherit(self) -> Self:
        """Fill in what sources leave out, so that each says by itself what it reads."""
        # The model is frozen, but this validator is a part of its construction.
        if self.sources and "source" not in self.model_fields_set:
            object.__setattr__(self, "source", None)
        if self.validation_source is not None:
            if "validation_fraction" not in self.model_fields_set:
                object.__setattr__(self, "validation_fraction", 0.0)
            object.__setattr__(self, "validation_source", _for_validation(self.validation_source, self))
        object.__setattr__(self, "sources", tuple(self._inherited(source) for source in self.sources))
        return self

    def _inherited(self, source: MixtureSource) -> MixtureSource:
        given = source.model_fields_set
        source = _inheriting(source, self, leave=frozenset({"subset", "revision"}))
        validation = source.validation_source
        changes: dict[str, Any] = {}
        if "validation_fraction" not in given:
            changes["validation_fraction"] = self.validation_fraction if validation is None else 0.0
        if validation is not None:
            changes["validation_source"] = _for_validation(validation, source)
        return source.model_copy(update=changes)

    @property
    def weights(self) -> tuple[float | None, ...]:
        """The weights of `sources`."""
        return tuple(source.weight for source in self.sources)

    def single_sources(self) -> tuple[SingleSource, ...]:
        """The single sources, each with a section as if the run had no other; one after those that it validates."""
        return tuple(self._single_sources())

    def _single_sources(self) -> Iterator[SingleSource]:
        for source in self.sources or (self,):
            yield SingleSource(self._alone(source, source.validation_fraction))
            if source.validation_source is not None:
                yield SingleSource(self._alone(source.validation_source, 0.0), validation_only=True)
        if self.sources and self.validation_source is not None:
            yield SingleSource(self._alone(self.validation_source, 0.0), validation_only=True)

    def _alone(self, source: Reading, fraction: float) -> Data:
        reading = {name: getattr(source, name) for name in Reading.model_fields}
        own = {"sources": (), "validation_fraction": fraction, "validation_source": None}
        return self.model_copy(update=reading | own)

    def with_revisions(self, revisions: Sequence[str | None]) -> Data:
        """The section with the `revision` of each of its `single_sources`; None leaves it."""
        left = iter(revisions)
        sources = tuple(_with_revisions(source, left) for source in self.sources)
        return _with_revisions(self.model_copy(update={"sources": sources}), left, own=not sources)

    def without_weights(self) -> Data:
        """The section without the weights of its sources, which do not change how these are prepared."""
        sources = tuple(source.model_copy(update={"weight": None}) for source in self.sources)
        return self.model_copy(update={"sources": sources})

    @property
    def window(self) -> int:
        """`shuffle_window`, or its default."""
        return self.shuffle_window or 8

    @property
    def cache_bytes(self) -> int:
        """`cache_gib`, or its default, in bytes."""
        return int((self.cache_gib or 32) * 2**30)

    def for_preparation(self) -> Data:
        """The section with the defaults of fields that only training reads: the prepared rows do not depend on them."""
        defaults = {name: type(self).model_fields[name].default for name in _READ_IN_TRAINING}
        return self.model_copy(update=defaults)


_READ_IN_TRAINING = ("shuffle", "shuffle_window", "prepared_url", "cache_gib", "streaming")


_Inheriting = TypeVar("_Inheriting", bound=Reading)
_Pinned = TypeVar("_Pinned", MixtureSource, Data)


def _inheriting(section: _Inheriting, other: Reading, *, leave: frozenset[str]) -> _Inheriting:
    """The section, with the fields about reading that it leaves out taken from the other one."""
    names = Reading.model_fields.keys() - section.model_fields_set - leave
    return section.model_copy(update={name: getattr(other, name) for name in names})


def _for_validation(section: ValidationSource, trained: Reading) -> ValidationSource:
    own = {"max_samples"}
    if "source" in section.model_fields_set:
        # They name parts of the other data set.
        own |= {"subset", "split", "revision"}
    return _inheriting(section, trained, leave=frozenset(own))


def _with_revisions(section: _Pinned, left: Iterator[str | None], *, own: bool = True) -> _Pinned:
    changes: dict[str, Any] = {}
    if own and (revision := next(left)) is not None:
        changes["revision"] = revision
    if section.validation_source is not None and (revision := next(left)) is not None:
        changes["validation_source"] = section.validation_source.model_copy(update={"revision": revision})
    return section.model_copy(update=changes)
