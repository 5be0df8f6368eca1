"""What a chat template does not read: keys of messages and of `chat_template_kwargs`, which are told, not refused; and
roles, which are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.chat.json_chat import ROLES, role_name
from tasks.runtime.data.chat.message_check import names_role
from tasks.runtime.data.chat.messages import REASONING, Messages, known_roles, roles_in
from tasks.runtime.data.chat.row_chats import chats_in
from tasks.runtime.data.chat.template_kwargs import template_kwargs_of
from tasks.runtime.data.chat.template_renderer import TemplateLimit, chat_variables
from tasks.runtime.data.chat.tools import COLUMN, tools_of
from tasks.runtime.data.formats.known_formats import Format
from tasks.runtime.data.formats.row_documents import chat_templates
from tasks.runtime.data.media.media_messages import without_media
from tasks.runtime.data.reading.rows import Row, RowError

# Read by every template, by Strata itself, or required of the template for each row.
_READ = {"role", "content", "weight", "tool_calls", *REASONING}

_LIKELY = {**ROLES, "developer": "system"}
_MOST_ROLES = 8


def unread_keys(
    row_format: Format, columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, data: Data, rows: Sequence[Row]
) -> list[str]:
    """The keys of messages in `rows` that change nothing of what is rendered, each with the role: `'name' of 'user'`.

    Rows that cannot be read are left out. Raises ValueError if the template cannot be used.
    """
    if row_format.templates is None or row_format.media is None:
        return []
    templates = chat_templates(tokenizer, data, multimodal=row_format.media.multimodal)
    # By key and role, whether a row was rendered that differs without it.
    read: dict[tuple[str, str], bool] = {}
    for row in rows:
        try:
            tools = None if COLUMN in data.ignore_columns else tools_of(row)
            kwargs = template_kwargs_of(row, data)
            for chat in chats_in(row_format.name, columns, row, data):
                messages = without_media(chat)
                open_keys = [pair for pair in _keys_of(messages) if not read.get(pair)]
                if open_keys:
                    found = templates[bool(tools)].reads(messages, open_keys, row.where, tools, kwargs)
                    read |= zip(open_keys, found, strict=True)
        except RowError:
            continue
    return [f"{data.message_keys.get(key, key)!r} of {role!r}" for (key, role), is_read in read.items() if not is_read]


def unread_kwargs(row_format: Format, data: Data, rows: Sequence[Row]) -> list[str]:
    """The keys of `chat_template_kwargs` in `rows` that are variables of no chat template of the format.

    Rows that cannot be read are left out.
    """
    templates = row_format.templates or {}
    sources = [templates] if isinstance(templates, str) else list(templates.values())
    found: dict[str, None] = {}
    for row in rows if sources else ():
        try:
            found |= dict.fromkeys(template_kwargs_of(row, data))
        except RowError:
            continue
    if not found:
        return []
    try:
        read = frozenset().union(*map(chat_variables, sources))
    except TemplateLimit:  # Rows that are rendered by it name it and what is wrong.
        return []
    return [name for name in found if name not in read]


def unknown_roles(
    templates: str | dict[str, str] | None, columns: tuple[str, ...], data: Data, rows: Sequence[Row]
) -> str:
    """The error message of the roles in `rows` that neither `data.roles` nor a chat template knows; empty without."""
    sources = [templates] if isinstance(templates, str) else (templates or {}).values()
    known, seen = known_roles(data), set[str]()
    # By name, how and where it is written first.
    unknown: dict[str, str] = {}
    for row in rows:
        for where, key, value in roles_in(row, columns, data):
            name = role_name(value)
            if name is None:
                continue
            seen.add(known.get(name, name))
            is_named = isinstance(value, str) and any(names_role(source, value) for source in sources)
            if name not in known and not is_named:
                unknown.setdefault(name, f"{where}: {key} is {value!r}")
    if not unknown:
        return ""
    first, *others = [*unknown][:_MOST_ROLES]
    shown = ", ".join(map(repr, others)) + (", ..." if len(unknown) > _MOST_ROLES else "")
    more = f"; the first {len(rows)} rows also have {shown}" if others else ""
    # An example: known names in other letters, and else in turns of the roles that no message has yet.
    free = [role for role in ("user", "assistant") if role not in seen] or ["user", "assistant"]
    mapped: dict[str, list[str]] = {role: [*names] for role, names in data.roles.items()}
    for number, name in enumerate((first, *others)):
        mapped.setdefault(_LIKELY.get(name.lower(), free[number % len(free)]), []).append(name)
    line = ", ".join(f"{role}: {names}" for role, names in mapped.items())
    them = "them" if others else "it"
    return (
        f"{unknown[first]}, which neither data.roles nor the chat template knows{more}; map {them} by data.roles, such "
        f"as {{{line}}}, or set data.chat_template to a template that names {them}"
    )


def _keys_of(messages: Messages) -> list[tuple[str, str]]:
    pairs = ((key, message["role"]) for message in messages for key in message if key not in _READ)
    return list(dict.fromkeys(pairs))
