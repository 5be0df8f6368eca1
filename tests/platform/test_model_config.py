"""Sizes in a config.json."""

import json
import os

import pytest

from strata_platform.errors import SpecError
from strata_platform.estimate import shape_of
from strata_platform.model_config import read_config_file, require_sizes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, "hidden_size is -1, not a whole number from 1 to 1000000"),
        ({"hidden_size": "8"}, 'hidden_size is "8", not a whole number'),
        ({"hidden_size": True}, "hidden_size is true, not a whole number"),
        ({"hidden_size": 8.0}, "hidden_size is 8.0, not a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not"),
        ({"vocab_size": 10**18}, "vocab_size is 1000000000000000000, not a whole number from 1 to 100000000"),
        ({"intermediate_size": [8, -8]}, "intermediate_size is -8, not"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"text_config": {"head_dim": 0}}, "config.json, text_config: head_dim is 0, not"),
    ],
)
def test_a_size_that_is_none(changes, message):
    with pytest.raises(ValueError, match=r"; correct it, or fetch the file again$") as caught:
        require_sizes({**LLAMA, **changes}, "config.json")
    assert message in str(caught.value)


def test_sizes_that_models_have():
    require_sizes(LLAMA, "config.json")
    require_sizes(
        {"hidden_size": 8, "head_dim": None, "intermediate_size": [8, 16], "text_config": LLAMA}, "config.json"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON: "),
        ("[1]", "holds a list, not an object"),
        ("[" * 100_000, "is not valid JSON: "),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        (json.dumps({**LLAMA, "num_attention_heads": 3}), "num_attention_heads 3 does not divide hidden_size 8"),
        (json.dumps({**LLAMA, "hidden_size": -8}), "hidden_size is -8"),
        ("{}", "has no 'model_type'"),
    ],
)
def test_the_estimate_of_a_wrong_file_names_it(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        shape_of(str(tmp_path))
    assert message in str(caught.value) and "model.name" in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json cannot be read: a named pipe, not a regular file"):
        read_config_file(tmp_path / "config.json")
