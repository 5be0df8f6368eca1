"""For tests that prepare data."""

import pytest

from tests.runtime.helpers.byte_tokenizer import save_byte_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with a token per byte and per special token."""
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
