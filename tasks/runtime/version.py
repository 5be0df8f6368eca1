"""Versions of what the runtime stores."""

# Of prepared data. Raised when the same recipe would be prepared differently, or stored differently.
DATA = 1
