"""Versions of what the runtime stores."""

# Of prepared data. Raised when the same recipe would be prepared differently, or stored differently.
DATA = 4
# Of checkpoints. Raised when those of the version before can no longer be read.
CHECKPOINT = 2
