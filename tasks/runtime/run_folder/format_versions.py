"""Version numbers of the formats that the runtime writes."""

# Prepared data. Raise it when the same recipe gives other rows, or stores them differently.
DATA = 8
# Checkpoints. Raise it when this version can no longer read those of the version before.
CHECKPOINT = 2
