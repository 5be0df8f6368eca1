"""Which chat template renders the chats: the tokenizer's own, a built-in one, or a .jinja file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strata_platform.file_io import require_regular_file
from tasks.runtime.data.reading.rows import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Built-in templates by name, with the special tokens that each needs.
NAMED_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
_FOLDER = Path(__file__).parent / "templates"


def resolve_template(name: str | None, tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> str:
    """The Jinja source that `data.chat_template` names; None is the tokenizer's own template.

    tools: whether the chat offers tools; a tokenizer may have a separate template for these.

    Raises:
        ValueError: the name or file does not exist, the file is not UTF-8, the tokenizer has no template, or it lacks
            special tokens that the template needs.
    """
    if name is None:
        own = tokenizer.chat_template
        if not own:
            raise ValueError(
                f"the tokenizer has no chat template; set data.chat_template to {_choices()} or a .jinja file"
            )
        return str(tokenizer.get_chat_template(tools=[] if tools else None))
    if name in NAMED_TEMPLATES:
        missing_tokens = [token for token in NAMED_TEMPLATES[name] if token not in tokenizer.get_added_vocab()]
        if missing_tokens:
            raise ValueError(
                f"data.chat_template {name!r} needs the special tokens {', '.join(missing_tokens)}, which the "
                "tokenizer lacks; leave it out to use the tokenizer's own template, or give a .jinja file"
            )
    return template_text(name)


def template_text(name: str) -> str:
    """The Jinja source of a built-in template or of a .jinja file. Raises ValueError if the file cannot be read."""
    if name in NAMED_TEMPLATES:
        return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return read_template(readable_template(name), name)


def read_template(path: Path, name: str, field: str = "data.chat_template") -> str:
    """The text of a template file, which `field` names. Raises ValueError if it cannot be read."""
    try:
        # Without the byte order mark that some editors write, which would start every rendered text.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field} {name!r} cannot be read: {error}; save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{field} {name!r} cannot be read: {error.strerror}") from error


def readable_template(
    name: str, field: str = "data.chat_template", choices: Sequence[str] = tuple(NAMED_TEMPLATES)
) -> Path:
    """The .jinja file that `field` names. Raises ValueError if there is none, or if it cannot be read."""
    near = suggestion(name, choices)
    if not name.endswith(".jinja"):
        raise ValueError(f"{field} {name!r}: neither {' or '.join(map(repr, choices))} nor a .jinja file{near}")
    path = Path(name)
    try:
        require_regular_file(path)
    except FileNotFoundError:
        raise ValueError(f"{field} {name!r}: there is no file {path.absolute()}{near}") from None
    except OSError as error:
        raise ValueError(f"{field} {name!r} cannot be read: {error.strerror}") from error
    return path


def templates_to_save(name: str | None, tokenizer: PreTrainedTokenizerBase) -> str | dict[str, str]:
    """Chat templates of the tokenizer that is saved with the data.

    A template from `data.chat_template` replaces the tokenizer's templates for chats with and without tools, because it
    renders both kinds in training. Further templates are kept.
    """
    own = tokenizer.chat_template
    if name is None:
        return own
    source = resolve_template(name, tokenizer)
    others = {key: own[key] for key in own if key not in ("default", "tool_use")} if isinstance(own, dict) else {}
    return {"default": source, **others} if others else source


def _choices() -> str:
    return " or ".join(map(repr, NAMED_TEMPLATES))
