"""The exported folder appears whole, and a killed export leaves nothing that stays."""

import pytest
from transformers import GenerationConfig

from strata_platform.spec import RunSpec
from tasks.runtime.export import _replace, _stop_at, model_card
from tests.runtime.test_report import RECORD


def test_the_new_folder_takes_the_place_and_leftovers_go(tmp_path):
    new, old, left = (tmp_path / name for name in (".model.tmp", "model", ".model.old"))
    for folder in (new, old, left):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    _replace(new, old)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (old / "config.json").read_text() == ".model.tmp"


@pytest.mark.parametrize(
    ("makers", "learned", "ends"),
    [(2, (2, 4), [2, 4]), ([5, 2], (4,), [2, 4, 5]), (2, (2,), 2), (None, (), None), (None, (4,), 4)],
)
def test_what_the_model_writes_ends_where_it_learned_to(makers, learned, ends):
    config = GenerationConfig(eos_token_id=makers)
    _stop_at(config, learned)
    assert config.eos_token_id == ends


def test_the_card_does_not_say_what_opens_the_data():
    spec = RunSpec.model_validate({"data": {"source": "https://host/rows.jsonl?X-Signature=hidden"}})
    assert "on `https://host/rows.jsonl?...`" in model_card(spec, RECORD)
