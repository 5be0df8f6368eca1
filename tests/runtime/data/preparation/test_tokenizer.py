"""The tokenizer that is trained, and those that are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data.preparation.tokenizer import (
    BOS,
    EOS,
    PAD,
    _first,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

TEXTS = [f"def module_{i}.name(self, value={i})\nReturn the value of number {i * 7919 % 101}." for i in range(300)]
HARD = ["", " ", "\n\n\t x", "日本語 🙂 \x00 é", f"a{EOS}b", "  def f(x):  return 1e-5"]


def _recipe(tokenizer: Path) -> DataRecipe:
    return DataRecipe.from_spec(RunSpec.model_validate({"model": {"tokenizer": str(tokenizer)}}))


def test_training_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_tokenizer(train_tokenizer(iter(TEXTS)), tmp_path / name)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_saved_tokenizer_is_loaded_by_its_folder_alone(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS)
    save_tokenizer(trained, tmp_path)
    # Beside a model's configuration its class must still be the tokenizer's own, not the model type's usual one.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    for text in [*HARD, *TEXTS[:20]]:
        assert loaded(text)["input_ids"] == trained(text)["input_ids"]
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert loaded.decode(ids) == text
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == (PAD, BOS, EOS)
    assert loaded("a")["input_ids"][0] == loaded.bos_token_id
    assert len(loaded) <= 4096
    chat = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_only_so_many_characters_are_read() -> None:
    assert list(_first(["abc", "def", "ghi"], 5)) == ["abc", "de"]


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS)
    trained.pad_token = None
    save_tokenizer(trained, tmp_path)
    assert load_tokenizer(_recipe(tmp_path)).pad_token == EOS


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS)
    trained.eos_token = None
    save_tokenizer(trained, tmp_path)
    with pytest.raises(ValueError, match=f"model.tokenizer '{tmp_path}': its tokenizer has no end-of-sequence token"):
        load_tokenizer(_recipe(tmp_path))


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model.tokenizer '{tmp_path}/none': cannot load its tokenizer"):
        load_tokenizer(_recipe(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"model.name 'someone/none': cannot load its tokenizer"):
        load_tokenizer(DataRecipe.from_spec(RunSpec.model_validate({"model": {"name": "someone/none"}})))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda whole: json.dumps({key: value for key, value in whole.items() if key != "added_tokens"}),
            "KeyError: 'add",
        ),
        (lambda whole: json.dumps({**whole, "model": {"type": "none"}}), "Exception: data did not match"),
        (lambda whole: json.dumps([]), "TypeError: "),
        (lambda whole: "[" * 100_000, "RecursionError: maximum recursion depth"),
    ],
    ids=["no-added-tokens", "unknown-model", "list", "nested"],
)
def test_a_tokenizer_that_is_not_whole(change: Callable[[dict[str, Any]], str], reason: str, tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(TEXTS[:2]), tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(change(json.loads(file.read_text())))
    with pytest.raises(ValueError, match=rf"model.tokenizer '{tmp_path}': cannot load its tokenizer: .*\({reason}"):
        load_tokenizer(_recipe(tmp_path))
