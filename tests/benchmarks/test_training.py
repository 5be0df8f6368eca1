"""The program that measures training: its specs are valid, and what it times is the runtime's own loop."""

import importlib.util
import json

import pytest
import torch

from benchmarks import training
from tasks.runtime.models.float8 import Float8FrozenLinear

needed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.mark.parametrize("run", training.RUNS, ids=training.Run.label)
def test_every_run_is_one_that_can_be_trained_and_estimated(run, tmp_path):
    spec = run.spec(tmp_path, tmp_path / "model")
    assert spec.topology.world_size == run.processes
    assert (spec.parallel.type == "single") == (run.processes == 1)


def test_names_are_told_apart(tmp_path):
    assert len({run.spec(tmp_path, tmp_path).name for run in training.RUNS}) == len(training.RUNS)


def test_documents_have_about_so_many_words(tmp_path):
    file = tmp_path / "documents.jsonl"
    training.write_documents(file, 50)
    texts = [json.loads(line)["text"].split() for line in file.read_text(encoding="utf-8").splitlines()]
    # The last is what is left.
    assert {25 <= len(words) <= 75 for words in texts[:-1]} == {True} and len(set(map(len, texts))) > 1
    assert list(tmp_path.iterdir()) == [file]
    fields = {"data.source": str(file), "objective.type": "pretrain"}
    plain, other = training.Run("1b"), training.Run("1b", fields=fields)
    assert plain.label() == other.label()
    assert plain.spec(tmp_path, tmp_path).name != other.spec(tmp_path, tmp_path).name


@pytest.mark.parametrize("quantization", ["none", "float8", pytest.param("nf4", marks=needed)])
def test_a_run_is_trained_and_timed(tmp_path, monkeypatch, quantization):
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    # Of 128,256 tokens, as in the shape that is made small, the head would take nine tenths of the time.
    small["vocab_size"] = 4096
    monkeypatch.setitem(training.SHAPES, "small", {**training.SHAPES["1b"], **small, "num_hidden_layers": 1})
    adapter = {"adapter.type": "lora", "adapter.quantization": "nf4" if quantization == "nf4" else "none"}
    adapter["training.float8"] = "tensorwise" if quantization == "float8" else "none"
    run = training.Run("small", 1, {"data.sequence_length": 64, "data.max_samples": 200, **adapter})
    jobs, build = [], training.build_job
    monkeypatch.setattr(training, "build_job", lambda *a, **options: jobs.append(build(*a, **options)) or jobs[-1])
    row = training.train_and_compare(run, tmp_path)
    assert row["tokens/s/GPU"] > 0 and row["GiB"] == 0
    assert row["estimated tokens/s/GPU"] > 0 and row["estimated GiB"] > 0
    packed = [parameter for parameter in jobs[0].unwrapped_model.parameters() if hasattr(parameter, "quant_state")]
    assert len(packed) == (7 if quantization == "nf4" else 0)
    in_fp8 = [module for module in jobs[0].unwrapped_model.modules() if isinstance(module, Float8FrozenLinear)]
    assert len(in_fp8) == (7 if quantization == "float8" else 0)
    # All of them are random, and none is left as memory was.
    assert all(layer.weight.view(torch.float8_e4m3fn).float().std() > 1 for layer in in_fp8)
    assert not list((tmp_path / run.spec(tmp_path, tmp_path).name).glob("checkpoints/*"))


@pytest.mark.parametrize("words", [None, 50])
def test_a_line_of_each_run_is_told_and_kept(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setattr(training, "train_and_compare", lambda run, folder: {"run": run.label(), "tokens/s/GPU": 1.25})
    given = ["--words", str(words)] if words else []
    monkeypatch.setattr("sys.argv", ["training", "--only", "1b, 1 GPU", "--out", str(tmp_path / "out"), *given])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "out").mkdir()
    training.main()
    told = capsys.readouterr().out.splitlines()
    kept = (tmp_path / "out" / ("training-1-50.csv" if words else "training-1.csv")).read_text().splitlines()
    runs = [run for run in training.RUNS if run.label().startswith("1b, 1 GPU")]
    assert len(told) == len(kept) - 1 == len(runs) > 1
    assert told[0] == f"{runs[0].label()}; tokens/s/GPU: 1.2; {words or 'built-in'}"
