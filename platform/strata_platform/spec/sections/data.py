"""The section `data`: what to train on, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from strata_platform.spec.describe import Allowed, closest_match
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
        raise ValueError(
            "neither 'alpaca', nor a .jinja file, nor a Jinja text, which contains {{ or {%; a chat template is set "
            "by data.chat_template"
        )
    return value


CHAT_TEMPLATES = ("chatml", "llama3")
"""Built-in templates of chats."""


def _chat_template(value: str) -> str:
    if value not in CHAT_TEMPLATES and not value.endswith(".jinja"):
        near = closest_match(value, CHAT_TEMPLATES)
        hint = f"did you mean {near!r}?" if near else "leave it out for the tokenizer's own template"
        raise ValueError(f"neither a built-in template nor a .jinja file; {hint}")
    return value


def _whole_split(value: str) -> str:
    if "[" in value:
        raise ValueError("a part of a split; name the split, and set max_samples to read its first rows only")
    return value


def _as_lists(roles: object) -> object:
    """A single name of a role is a list of it."""
    if not isinstance(roles, Mapping):
        return roles
    return {role: [names] if isinstance(names, str) else names for role, names in roles.items()}


def _distinct(keys: dict[str, str]) -> dict[str, str]:
    for key in keys.values():
        if len(found := [name for name, other in keys.items() if other == key]) > 1:
            raise ValueError(f"{key!r} is read as {' and '.join(map(repr, found))}; leave one out")
    # LLaMA-Factory's `tags`.
    if tags := [name for name in keys if name.endswith("_tag")]:
        raise ValueError(
            f"{', '.join(map(repr, tags))}: keys are those that templates read, such as role and content; names of "
            "roles belong to data.roles"
        )
    return keys


def _disjoint(roles: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    meant: dict[str, str] = {}
    for role, names in roles.items():
        for name in names:
            if meant.setdefault(name, role) != role:
                raise ValueError(f"{name!r} stands for {meant[name]!r} and for {role!r}; leave one out")
    return roles


Template = Annotated[Text, AfterValidator(_template), Allowed("'alpaca', a .jinja file, or a Jinja text")]
Role = Literal["system", "user", "assistant", "tool"]
_MessageKeys = Annotated[
    dict[Text, Text], AfterValidator(_distinct), Allowed("a mapping such as {role: speaker, content: text}")
]
_Names = Annotated[tuple[Text, ...], Field(min_length=1)]
# As one type: pydantic leaves the keys of a union out of the JSON Schema.
_MessageRole = Literal["system", "user", "assistant", "tool", "function_call"]
_Roles = Annotated[
    dict[_MessageRole, _Names],
    BeforeValidator(_as_lists, json_schema_input_type=dict[_MessageRole, Text | _Names]),
    AfterValidator(_disjoint),
    Allowed("a mapping of system, user, assistant, tool or function_call to lists of names"),
]
TrainOn = Literal["completions", "last_turn", "all"] | Annotated[tuple[Role, ...], Field(min_length=1)]
FormatName = Literal[
    "auto", "text", "tokens", "prompt_completion", "chat", "alpaca", "preference", "preference_chat", "prompt",
    "prompt_chat",
]  # fmt: skip

MEDIA_FIELDS = (
    "images_column", "image_folder", "image_max_pixels", "image_min_pixels",
    "audios_column", "audio_folder", "audio_max_seconds", "audio_min_seconds",
)  # fmt: skip
"""Fields of `data` for rows with images or audio."""
MAX_SOURCES = 100
SHORTEST_AUDIO = 0.1
"""Minimum seconds of an audio clip: a model has no token for a shorter one, or reads it as text without audio."""


class Reading(Section):
    """One source of rows, and how they are read."""

    source: Sources | None = Field(
        None, description="Like `data.source`. By default the same source, with its `subset`, `split` and `revision`."
    )
    documents: Literal["file", "paragraph", "line"] = Field(
        "file",
        description="What counts as one document in a text file. Paragraphs are separated by blank lines. No document "
        "attends to another.",
    )
    document_separator: Text | None = Field(
        None, description="Text that separates the documents of a text file, such as `<|endoftext|>`."
    )
    subset: Text | None = Field(
        None,
        description="Configuration of a Hub data set, or of a folder whose card (`README.md`) lists configurations.",
    )
    split: Annotated[Text, AfterValidator(_whole_split)] = Field(
        "train",
        description="Split to read: of a Hub data set, or of a folder whose file names contain splits, such as "
        "`train.jsonl`.",
    )
    revision: Text | None = Field(None, description="Commit, tag or branch of a Hub data set.")
    format: FormatName | ObjectName = Field(
        "auto",
        description="Format of a row. `auto` detects it from the columns; the page Data formats lists all forms. "
        "`alpaca`, `prompt_chat` and `preference_chat` render texts as chats: a question and its answer, a prompt, a "
        "pair of answers. `tokens`: token ids. You can also name a class of your own, such as "
        "`my_package.formats:Tickets`, that is based on one of `tasks.runtime.extensions`.",
    )
    format_arguments: Arguments = Field({}, description="Keyword arguments for the class of your own in `format`.")
    text_column: Text | None = Field(None, description="Column of format `text`; by default `text` or `content`.")
    prompt_column: Text | None = Field(
        None,
        description="Prompt column of `prompt_completion`, `alpaca`, `preference` and `prompt`; by default detected by "
        "its name, such as `prompt` or `question`.",
    )
    completion_column: Text | None = Field(
        None,
        description="Completion or answer column of `prompt_completion` and `alpaca`; by default detected by its name, "
        "such as `completion` or `answer`.",
    )
    template: Template | None = Field(
        None,
        description="Template of the prompt, for rows with one question and one answer and models without a chat "
        "template: `alpaca`, a .jinja file, or a Jinja text over the row's columns. The answer follows as the "
        "completion. See [Prompt templates](prompt-templates.md).",
    )
    messages_column: Text | None = Field(
        None,
        description="Column of format `chat`, by default `messages`, `conversations` or `conversation`: a list of "
        "{role, content}, or of {from, value} as in ShareGPT. Assistant messages with `weight: 0` carry no loss. The "
        "columns `tools` and `chat_template_kwargs` are passed to the chat template.",
    )
    message_keys: _MessageKeys = Field(
        {},
        description="Keys of messages under other names: the key that the chat template reads, and yours, such as "
        "`{role: speaker, content: text}`. `role` and `from`, `content` and `value` are read without it. See [Keys "
        "and roles](chat-templates.md#keys-and-roles-of-messages).",
    )
    roles: _Roles = Field(
        {},
        description="Further names of roles in messages, such as `{assistant: [bot], user: [customer]}`. ShareGPT's, "
        "such as `human` and `gpt`, are known. Under `function_call` a message holds calls as JSON.",
    )
    system_column: Text | None = Field(
        None,
        description="Column with the system message of a chat, in every chat format; by default `system`, "
        "`system_prompt` or `system_message`, if it exists.",
    )
    chosen_column: Text | None = Field(
        None, description="Column of `preference` with the better answer, as text or messages; by default `chosen`."
    )
    rejected_column: Text | None = Field(
        None, description="Column of `preference` with the other answer, as text or messages; by default `rejected`."
    )
    margin_column: Text | None = Field(
        None,
        description="Column with the margin of a pair, for `reward`: the chosen answer's score should exceed the other "
        "one's by this number. By default `margin`, if it exists.",
    )
    label_column: Text | None = Field(
        None,
        description="Column with true for a good answer and false for a bad one, for `kto`; by default `label` or "
        "`kto_tag`.",
    )
    images_column: Text | None = Field(
        None,
        description="Column with the images of a chat, in order: paths, URLs, or bytes; by default `images` or "
        "`image`. See [Vision-language models](vision.md).",
    )
    image_folder: FolderOrUrl | None = Field(
        None,
        description="Folder or URL to which the paths of images are relative; by default the folder of the data file.",
    )
    image_max_pixels: Count | None = Field(
        None,
        description="Maximum pixels of an image, width times height. A larger image is scaled down before the model's "
        "processor reads it. By default only the processor scales.",
    )
    image_min_pixels: Count | None = Field(
        None,
        description="Minimum pixels of an image, width times height. A row with a smaller image is skipped and "
        "counted.",
    )
    audios_column: Text | None = Field(
        None,
        description="Column with the audio clips of a chat, in order: paths, URLs, or bytes; by default `audios` or "
        "`audio`. See [Audio](audio.md).",
    )
    audio_folder: FolderOrUrl | None = Field(
        None,
        description="Folder or URL to which the paths of audio clips are relative; by default the folder of the data "
        "file.",
    )
    audio_max_seconds: Annotated[float, Field(ge=SHORTEST_AUDIO), BeforeValidator(number)] | None = Field(
        None,
        description="Maximum seconds of an audio clip; by default only the limit of the model's processor, if it has "
        "one. `overlong` decides what happens to a longer clip.",
    )
    audio_min_seconds: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None, description="Minimum seconds of an audio clip. A row with a shorter clip is skipped and counted."
    )
    ignore_columns: tuple[Text, ...] = Field(
        (),
        description="Columns, and keys of messages, that are not read. Without this field, one that may change the "
        "meaning of a row, such as `label`, is an error.",
    )
    special_tokens: Literal["auto", "text", "control"] = Field(
        "auto",
        description="How special tokens inside texts and messages are tokenized: as `control` tokens, or as `text`. "
        "`auto` is `text`, except if every one of the first texts, or of the first prompts with their completions, "
        "contains a special token, as chats do that were rendered beforehand.",
    )
    overlong: Literal["skip", "truncate", "error"] = Field(
        "skip",
        description="What happens to a sample or a pair of answers that is longer than a row, and to an audio clip "
        "that is too long. Skipped samples are counted and reported. Plain text is split into rows instead; under "
        "`pretrain`, every sample is.",
    )
    invalid: Literal["error", "skip"] = Field(
        "error", description="What happens to a row of the wrong type. Skipped rows are counted and reported."
    )
    max_samples: Annotated[int, Field(ge=1, le=10**12), BeforeValidator(number)] | None = Field(
        None, description="Use only the first N samples of the source."
    )

    @property
    def names(self) -> tuple[str, ...]:
        """`source` as a tuple; empty without one."""
        return (self.source,) if isinstance(self.source, str) else self.source or ()


class ValidationSource(Reading):
    """Separate rows for evaluation, instead of held-out samples: a source, or a section.

    A field that you leave out has the value of the source that this section belongs to.
    """


def _only_source(value: object) -> object:
    """A text or a list of texts is a section with this `source` alone."""
    return {"source": value} if isinstance(value, str | list | tuple) else value


_Validation = Annotated[
    ValidationSource | None,
    BeforeValidator(_only_source, json_schema_input_type=ValidationSource | Sources | None),
]
_VALIDATION = (
    "Separate rows for evaluation: files, a Hub data set id, or a section with `source`, `split` and other fields of "
    "`data` about reading. No samples are held out then."
)


class MixtureSource(Reading):
    """One of several sources, instead of `data.source`. A field that you leave out has the value of `data`.

    See [Mixtures](mixtures.md).
    """

    source: Sources = Field(description="Like `data.source`.")
    weight: Annotated[float, Field(gt=0, le=1e9), BeforeValidator(number)] | None = Field(
        None,
        description="Share of the run's rows that this source provides, relative to the other weights. With `packing`, "
        "rows are equally long, so it is also the share of tokens; without packing, it is the share of samples. A "
        "source smaller than its share repeats. Without weights, an epoch has each row of every source once.",
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
        description="`python-docs` (built in), a Hub data set id, or files: a path, folder, glob or URL, or a list of "
        "them; hidden files are skipped unless they are named. Rows are in .jsonl, .json, .parquet, .arrow, .csv or "
        ".tsv files, texts in .txt, .md or .rst files. Credentials come from the environment.",
    )
    sources: Annotated[
        tuple[MixtureSource, ...],
        Field(max_length=MAX_SOURCES),
        Allowed("a list of sections, each with a source"),
    ] = Field(
        (),
        description="Several sources instead of `source`. Each has a weight, its own validation rows, and the fields "
        "of `data` about reading.",
    )
    chat_template: (
        Annotated[Text, AfterValidator(_chat_template), Allowed("'chatml', 'llama3', or a .jinja file")] | None
    ) = Field(None, description="Chat template: `chatml`, `llama3`, or a .jinja file; by default the tokenizer's own.")
    train_on: Annotated[TrainOn | None, Allowed("'completions', 'last_turn', 'all', a list of roles, or null")] = Field(
        None,
        description="Which tokens carry loss: `completions` (all assistant turns), `last_turn` (the last assistant "
        "turn), `all` tokens, or the messages of a list of roles, such as `[assistant, tool]`. By default `all` under "
        "`pretrain`, `completions` under `sft` and `distill`, and whole answers for preferences. Assistant messages "
        "with `weight: 0` carry no loss.",
    )
    sequence_length: Integer = Field(256, ge=8, le=1 << 20, description="Tokens per row.")
    packing: Flag = Field(True, description="Put several samples into one row. They do not attend to each other.")
    validation_fraction: Number = Field(0.05, ge=0.0, le=0.5, description="Share of samples held out for evaluation.")
    validation_source: _Validation = Field(None, description=_VALIDATION)
    shuffle: Literal["global", "window"] = Field(
        "global",
        description="Order of the rows in an epoch. `global`: a random permutation of all rows. `window`: shards in "
        "random order, with the rows of `shuffle_window` shards permuted together, so that only these are read at a "
        "time.",
    )
    shuffle_window: Count | None = Field(
        None, description="Number of shards in a window, each of up to 16 million tokens; 8 by default."
    )
    prepared_url: ObjectStoreUrl | None = Field(
        None,
        description="Object store for prepared rows, such as `s3://bucket/path`; each machine reads them through a "
        "cache on its disk.",
    )
    cache_gib: Annotated[float, Field(gt=0, le=1e6), BeforeValidator(number)] | None = Field(
        None, description="Maximum disk space of the cache of `prepared_url`, in GiB; 32 by default."
    )
    streaming: Flag = Field(
        False,
        description="Start training while later parts of the data are still being prepared; needs `shuffle: window`.",
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
