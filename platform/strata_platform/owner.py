"""Who submits runs."""

from __future__ import annotations

import getpass
import os
import re


def this_user() -> str:
    """The owner of runs that this process submits, as the value of a label."""
    try:
        name = os.environ.get("STRATA_OWNER") or getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        name = str(os.getuid())
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:63].strip("-_.")
