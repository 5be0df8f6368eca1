"""Errors that are nobody's mistake: a service that a run needs does not answer."""

from __future__ import annotations

from strata_platform.outcomes import UNREACHABLE, RunError


class Unreachable(RunError):
    """The Hugging Face Hub, the object store, or the network to them, is down; another attempt may find it up."""

    outcome = UNREACHABLE
