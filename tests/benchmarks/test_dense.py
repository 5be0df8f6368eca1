"""The program that measures the 8B model: its runs are valid, and its peers compute transformers' own loss."""

import sys

import pytest
import torch

from benchmarks import dense
from benchmarks.training import SHAPES

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
OURS = {name: run for name, run in dense.RUNS.items() if isinstance(run, dense.Dense)}


@pytest.mark.parametrize("run", OURS.values(), ids=list(OURS))
def test_every_run_is_one_that_can_be_trained(run, tmp_path):
    spec = run.spec(tmp_path, tmp_path / "model")
    assert spec.data.sequence_length == dense.LENGTH
    # The step that is profiled, and the last, are not timed: one has to be left.
    assert spec.training.steps - 2 > run.steps[1]


def test_names_are_told_apart(tmp_path):
    assert len({run.spec(tmp_path, tmp_path).name for run in OURS.values()}) == len(OURS)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", {**SHAPES["8b"], **SMALL, "num_hidden_layers": 1, "vocab_size": 4096})
    monkeypatch.setattr(dense, "LENGTH", 16)
    monkeypatch.setattr(dense, "STEPS", (3, 1))
    monkeypatch.setattr(dense, "RECOMPUTED_STEPS", (3, 1))
    return "small"


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("peer", ["transformers", "compile", "compile, recomputed"])
def test_a_peer_is_timed(peer, small):
    assert dense.train_peer(dense.RUNS[peer], small)["tokens/s/GPU"] > 0


def test_the_loss_of_peers_is_that_of_transformers(small):
    model = dense.plain_llama(small, torch.device("cpu")).float()
    tokens = torch.randint(4096, (2, 16))
    loss = dense._loss(model.model(input_ids=tokens).last_hidden_state, model.lm_head.weight, tokens)
    torch.testing.assert_close(loss, model(input_ids=tokens, labels=tokens).loss)


def test_a_run_is_measured_taken_apart_and_kept(small, tmp_path, monkeypatch, capsys):
    fields = {**dense.RUNS["ours"].fields, "data.sequence_length": 32, "data.max_samples": 40}
    monkeypatch.setitem(dense.RUNS, "ours", dense.Dense("8b", 1, fields))
    monkeypatch.setattr(dense, "write_documents", lambda file, words: file.write_text('{"text": "a b c d"}\n' * 200))
    monkeypatch.setattr(sys, "argv", ["dense", "--only", "ours", "--shape", small, "--out", str(tmp_path)])
    dense.main()
    assert "ours: tokens/s/GPU" in capsys.readouterr().out
    assert '"tokens/s/GPU"' in (tmp_path / "dense.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "ours; thiers"], "--only has thiers; there are ours;"),
        (["--only", "Liger", "--profile", "Liger"], "--profile has Liger, which is no run of ours"),
        (["--only", "Liger", "--profile", "ours"], "--profile has ours, which is no run of ours among"),
    ],
    ids=["unknown", "peer", "not measured"],
)
def test_what_cannot_be_measured_is_rejected(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dense", *arguments])
    with pytest.raises(SystemExit):
        dense.main()
    assert message in capsys.readouterr().err
