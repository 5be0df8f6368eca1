"""Weights that a spec names are found, and a name that is none is told."""

import pytest
from torch import nn

from tasks.runtime.optim.parameter_names import matches, names_of, select

NAME = "model.layers.11.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("mlp", True),
        ("layers.11", True),
        ("layers.1?", True),
        ("layers.1[0-3]", True),
        ("layers.*.mlp", True),
        ("mlp.*_proj", True),
        ("*", True),
        (NAME, True),
        # Parts are whole, and next to each other: layer 1 is not layer 11.
        ("layers.1", False),
        ("proj", False),
        ("layers.mlp", False),
        ("11.layers", False),
        (f"{NAME}.more", False),
        ("^model", False),
        ("", False),
    ],
)
def test_a_pattern_is_whole_parts_of_a_name(pattern, found):
    assert matches(pattern, NAME) is found


def test_a_tied_weight_is_found_by_each_of_its_names():
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(3, 2), "lm_head": nn.Linear(2, 3, bias=False)})
    model["lm_head"].weight = model["embed_tokens"].weight
    names = names_of(model)
    assert list(names.values()) == [["embed_tokens.weight", "lm_head.weight"]]
    assert select("model.freeze", ["lm_head", "embed_tokens"], names) == [set(names), set(names)]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "embed_token",
            r"model\.freeze: 'embed_token' matches no weight .*; did you mean 'embed_tokens'\? A pattern is",
        ),
        ("embed_tokens.bias", "such as 'embed_tokens.weight'; the parts of all names: embed_tokens, weight$"),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_the_names_there_are(pattern, said):
    with pytest.raises(ValueError, match=said):
        select("model.freeze", ["weight", pattern], names_of(nn.ModuleDict({"embed_tokens": nn.Embedding(3, 2)})))
