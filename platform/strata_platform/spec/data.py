"""The section `data`: what to train on, and how rows become tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.fields import Flag, Integer, Number, Section, Sources, Text, number

BUILTIN_SOURCES = ("python-docs",)
COMPRESSIONS = (".gz", ".bz2", ".xz")
TEXT_SUFFIXES = (".txt", ".md", ".rst")
_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", *TEXT_SUFFIXES)
DATA_SUFFIXES = tuple(f"{suffix}{packed}" for suffix in _SUFFIXES for packed in ("", *COMPRESSIONS))
"""Ends of the names of data files."""


class Data(Section):
    """What to train on, and how rows become tokens."""

    source: Sources = Field(
        "python-docs",
        description="`python-docs` (built in), a Hub data set id, or files: path, folder, glob or URL of .jsonl, "
        ".json, .parquet or .csv, or of text: .txt, .md, .rst; several as a list. Credentials come from the "
        "environment.",
    )
    documents: Literal["file", "paragraph", "line"] = Field(
        "file",
        description="What a document is in a text file. Paragraphs are divided by blank lines. Documents are trained "
        "apart: none attends to another.",
    )
    document_separator: Text | None = Field(
        None, description="Text that divides the documents of a text file, such as `<|endoftext|>`."
    )
    subset: Text | None = Field(None, description="Configuration name of a Hub data set.")
    split: Text = Field(
        "train", description="Split to train on, of a Hub data set or a folder whose files name splits."
    )
    revision: Text | None = Field(None, description="Commit, tag or branch of a Hub data set.")
    format: Literal["auto", "text", "prompt_completion", "chat", "alpaca", "preference"] = Field(
        "auto", description="Format of a row. `auto` decides by the columns."
    )
    text_column: Text = Field("text", description="Column of format `text`.")
    prompt_column: Text = Field("prompt", description="Prompt column of `prompt_completion` and `preference`.")
    completion_column: Text = Field("completion", description="Completion column of `prompt_completion`.")
    messages_column: Text = Field(
        "messages",
        description="Column of format `chat`: a list of {role, content}, or of {from, value} as in ShareGPT. "
        "Assistant messages with `weight: 0` carry no loss. The chat template also gets a column `tools`, "
        "if there is one.",
    )
    system_column: Text = Field(
        "system", description="Column with the system message of a chat, if there is one; for chats of every format."
    )
    chosen_column: Text = Field("chosen", description="Column of `preference`: the better answer, text or messages.")
    rejected_column: Text = Field("rejected", description="Column of `preference`: the other answer.")
    ignore_columns: tuple[Text, ...] = Field(
        (),
        description="Columns, and keys of messages, to leave unread although they may change what a row means, such as "
        "`label`.",
    )
    chat_template: Text | None = Field(
        None, description="Named chat template (`chatml`, `llama3`), or a .jinja file; by default the tokenizer's own."
    )
    special_tokens: Literal["auto", "text", "control"] = Field(
        "auto",
        description="What special tokens mean that texts and messages contain: `control` tokens, or `text` like any "
        "other. `auto`: text, but control tokens if each of the first texts, or of the first prompts with completions, "
        "has some, as in chats that were rendered beforehand.",
    )
    sequence_length: Integer = Field(256, ge=8, le=1 << 20, description="Tokens in a row of a batch.")
    packing: Flag = Field(True, description="Put several samples into one row; none attends to another.")
    overlong: Literal["skip", "truncate", "error"] = Field(
        "skip",
        description="What to do with a sample longer than a row, or a pair of answers. Skips are counted and "
        "reported; plain text is split instead, under `pretrain` all of it.",
    )
    invalid: Literal["error", "skip"] = Field(
        "error", description="What to do with a row of the wrong type. Skips are counted and reported."
    )
    validation_fraction: Number = Field(0.05, ge=0.0, le=0.5, description="Share of samples held out for evaluation.")
    max_samples: Annotated[int, Field(ge=1, le=10**12), BeforeValidator(number)] | None = Field(
        None, description="Use only the first N samples of the source."
    )
