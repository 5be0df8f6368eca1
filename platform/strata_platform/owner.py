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


def owner_of_account(username: str) -> str:
    """The owner of runs that an account of Kubernetes submits, as the chart's policy of owners computes it.

    >>> owner_of_account("oidc:ada@example.com")
    'oidc-ada-example.com'
    """
    words = "-".join(re.findall(r"[A-Za-z0-9_.]+", username))[:63]
    found = re.search(r"[A-Za-z0-9].*[A-Za-z0-9]|[A-Za-z0-9]", words)
    return found[0] if found else ""
