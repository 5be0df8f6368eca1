"""The program that measures LoRA: its runs are valid, and its peers are PEFT's own."""

import pytest

from benchmarks import lora
from benchmarks.training import SHAPES


@pytest.mark.parametrize("run", lora.OURS.values(), ids=list(lora.OURS))
def test_every_run_is_one_that_can_be_trained(run, tmp_path):
    spec = run.spec(tmp_path, tmp_path / "model")
    assert (spec.adapter.type, spec.adapter.r, spec.data.sequence_length) == ("lora", 16, lora.LENGTH)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("name", ["PEFT", "PEFT, compiled"])
def test_a_peer_is_timed(name, monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    monkeypatch.setitem(SHAPES, "8b", {**SHAPES["8b"], **small, "num_hidden_layers": 1, "vocab_size": 4096})
    monkeypatch.setattr(lora, "LENGTH", 16)
    monkeypatch.setattr(lora, "STEPS", 4)
    assert lora.peer(name)["tokens/s/GPU"] > 0


def test_an_unknown_name_is_rejected(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lora", "--only", "ours, 8b; thiers"])
    with pytest.raises(SystemExit):
        lora.main()
    assert "--only has thiers; there are ours, 8b;" in capsys.readouterr().err
