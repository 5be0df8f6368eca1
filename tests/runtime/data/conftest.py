"""For tests that prepare data."""

import pytest

from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with a token per byte and per special token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([""]), folder)
    return str(folder)
