"""A task with exact answers, from the docstrings of Python's standard library: say as JSON where a function is."""

import importlib
import inspect
import json
from collections.abc import Iterator

MODULES = (
    "ast", "base64", "bisect", "calendar", "colorsys", "copy", "difflib", "dis", "fnmatch", "functools", "gettext",
    "glob", "gzip", "heapq", "html", "inspect", "json", "keyword", "linecache", "locale", "mimetypes", "pickletools",
    "platform", "pprint", "random", "shlex", "shutil", "statistics", "stat", "sysconfig", "tarfile", "tempfile",
    "textwrap", "timeit", "tokenize", "traceback", "urllib.parse", "uuid", "warnings", "webbrowser", "zipfile",
)  # fmt: skip


def chats() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Rows of a question, a function with its parameters and the first line about it, and the exact answer."""
    for module in MODULES:
        for name, function in sorted(vars(importlib.import_module(module)).items()):
            known = inspect.isfunction(function) and function.__module__ == module and not name.startswith("_")
            about = (inspect.getdoc(function) or "").partition("\n")[0] if known else ""
            parameters = ", ".join(inspect.signature(function).parameters) if about else ""
            if about and len(about) + len(parameters) < 100:
                question = f"{module}.{name}({parameters}): {about}"
                answer = json.dumps({"module": module, "function": name})
                yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
