"""An end that is nobody's mistake: what a run needs over the network does not answer."""

from __future__ import annotations


class Unreachable(RuntimeError):
    """The Hugging Face Hub, the store of checkpoints, or the way there, is down; another attempt may find it up."""
