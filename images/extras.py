"""The packages of extras, pinned, for the image: `python extras.py deepspeed,wandb` prints a line for each.

pyproject.toml says what an extra is, extras.lock which version of it the image takes; both lie beside this file there.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def pins(extras: str, project: str, lock: str) -> list[str]:
    """`NAME==VERSION`, with its marker, of what `extras` ask for, by pyproject.toml's text and that of the lock.

    Raises ValueError when there is no such extra.
    """
    known = tomllib.loads(project)["project"]["optional-dependencies"]
    asked = [name for name in extras.split(",") if name]
    if wrong := [name for name in asked if name not in known]:
        raise ValueError(f"EXTRAS has {', '.join(wrong)}; there are {', '.join(known)}, divided by commas")
    return [pin for name in asked for requirement in known[name] for pin in _pins(requirement, lock)]


def _pins(requirement: str, lock: str) -> list[str]:
    """One, or one for each of several Pythons."""
    name = re.split(r"[^\w.-]", requirement)[0]
    found = re.findall(rf"^{re.escape(name)}==[^\\\n]+", lock, re.MULTILINE)
    if not found:
        raise ValueError(f"{requirement} is not in extras.lock; make lock")
    return [pin.strip() for pin in found]


if __name__ == "__main__":
    try:
        print(*pins(sys.argv[1], Path("pyproject.toml").read_text(), Path("extras.lock").read_text()), sep="\n")
    except ValueError as error:
        sys.exit(f"error: {error}")
