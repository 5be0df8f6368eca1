"""The process that renders chat templates for `template_renderer`: a script that loads neither torch nor this package.

Its arguments are the number of a socket, over which it gets requests and answers each with `(kind, texts or message)`;
the bytes of memory that a template may take; and the characters that it may render.
"""

import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer requests until the other end is closed."""
    descriptor, memory, longest = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    def answer(common: dict[str, Any], chats: list[dict[str, Any]]) -> tuple[str, Any]:
        found = []
        try:
            for chat in chats:
                texts, spans = render_jinja_template(**common, **chat)
                if len(texts[0]) > longest:
                    return "limit", f"renders more than {longest:,} characters"
                found.append((texts[0], spans[0] if spans else []))
        except MemoryError:
            return "limit", f"takes more than {memory >> 20} MiB of memory"
        except TemplateSyntaxError as error:
            return "syntax", f"line {error.lineno}: {error.message}"
        # A template can raise any error.
        except Exception as error:
            return "rejected", str(error)
        return "rendered", found

    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send(answer(*request))


if __name__ == "__main__":
    main()
