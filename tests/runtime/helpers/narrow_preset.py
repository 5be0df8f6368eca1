"""The preset with two narrow layers, for tests of how a run goes and not of what it learns."""

from contextlib import AbstractContextManager
from unittest import mock

from tasks.runtime.models.config import PRESETS


def narrow() -> AbstractContextManager:
    """Within the context a step of the preset takes a quarter of the time."""
    small = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
    return mock.patch.dict(PRESETS["tiny-llama"], small)
