"""The command of the README, from the spec's file to the exported model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.runtime.run_folder.record import CompletionRecord
from tests.workflows.helpers import forked_flyte

ROOT = Path(__file__).parents[2]
PYFLYTE = Path(sys.executable).with_name("pyflyte")
FLYTE_2 = Path(sys.executable).with_name("flyte")

SMALL = {
    "name": "small",
    "data": {"sequence_length": 64, "max_samples": 300},
    "training": {"steps": 6},
    "checkpoint": {"every": 4},
    "evaluation": {"samples": 1, "max_new_tokens": 4, "max_batches": 2},
}

LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("def sum(iterable)", return_tensors="pt").input_ids
torch.save(AutoModelForCausalLM.from_pretrained(sys.argv[1])(ids).logits, sys.argv[2])
"""


def pyflyte(spec: Path):
    return subprocess.run(
        [PYFLYTE, "run", "workflows/finetune.py", "finetune", "--spec", str(spec)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        text=True,
        capture_output=True,
        timeout=300,
    )


def flyte_2(spec: Path, *arguments: str):
    return subprocess.run(
        [FLYTE_2, "run", "--local", "workflows/flyte2/finetune.py", "finetune", "--spec", str(spec), *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "COLUMNS": "200"},
        text=True,
        capture_output=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "output": str(folder / "out")}))
    return folder / "out" / "small", pyflyte(file)


# Of a record and of a step's metrics: what the clock, the memory and the folder decide.
MEASURED = {
    *("seconds", "tokens_per_second", "data_wait_seconds", "peak_memory_bytes", "begun", "startup", "warmup"),
    *("time", "step_seconds", "memory_bytes", "checkpoint"),
}


def decided(values):
    return {name: value for name, value in values.items() if name not in MEASURED}


def test_flyte_2_gives_the_same_model_record_and_losses(finished, tmp_path):
    before, _ = finished
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "training": {"steps": 9}, "output": str(tmp_path / "out")}))
    ended = flyte_2(file, "--set", "training.steps=6")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    after = tmp_path / "out" / "small"
    for name in ("model", "report.html", "record.json"):
        assert str(after / name) in ended.stdout
    records = [json.loads((folder / "record.json").read_text()) for folder in (before, after)]
    # The output folder is part of the spec.
    assert records[0].pop("spec_hash") != records[1].pop("spec_hash")
    assert decided(records[0]) == decided(records[1])
    losses = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (before, after)]
    assert len(losses[0]) >= 6
    for one, other in zip(*losses, strict=True):
        assert decided(json.loads(one)) == decided(json.loads(other))
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (before, after)]
    assert weights[0] == weights[1]


def test_flyte_2_tells_mistakes_as_flyte_1_does(tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text(f"optimizer: {{lr: -1}}\noutput: {tmp_path / 'out'}\nseed: 1:30\n")
    ended = flyte_2(file, "--set", "training.stpes=3")
    said = ended.stdout + ended.stderr
    # All that its command line ends badly with is 1.
    assert ended.returncode == 1
    for words in ("training.stpes (--set training.stpes=3)", "'steps'", "optimizer.lr (line 1)", "seed (line 3)"):
        assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_it_leaves_the_model_the_report_and_the_record_and_says_so(finished):
    folder, ended = finished
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = " ".join(ended.stdout.split("\n")[-6:])
    for name in ("model", "report.html", "record.json"):
        assert str(folder / name) in last
        assert (folder / name).exists()
    assert "complete, 6 of 6 steps" in last


def test_nothing_third_party_clutters_the_output(finished):
    _, ended = finished
    said = ended.stdout + ended.stderr
    assert "Warning" not in said
    assert "WARNING" not in said


def test_the_record_has_what_was_asked_and_what_was_done(finished):
    record = json.loads((finished[0] / "record.json").read_text())
    assert (record["status"], record["steps"], record["steps_asked"], record["restarts"]) == ("complete", 6, 6, 0)
    assert record["tokens"] == 6 * 4 * 64
    assert 0 < record["target_tokens"] < record["tokens"]
    assert record["eval_loss_after"] < record["eval_loss_before"]
    assert Path(record["checkpoint"]).name == "checkpoint-6"
    assert record["warmup"]
    assert {"python", "torch", "triton", "transformers", "strata"} <= set(record["versions"])
    assert len(record["spec_hash"]) == 16
    assert record["data"]["read"] == record["data"]["used"] + sum(
        number for name, number in record["data"].items() if name.startswith("skipped_")
    )


def test_the_model_loads_in_a_fresh_interpreter_with_the_logits_of_the_checkpoint(finished, tmp_path):
    import torch
    from transformers import AutoTokenizer

    from tasks.runtime.checkpoint.state import load_model
    from tasks.runtime.checkpoint.storage import Index
    from tasks.runtime.models.build import build_saved_model, materialize

    folder, _ = finished
    subprocess.run([sys.executable, "-c", LOGITS, folder / "model", tmp_path / "logits"], check=True, timeout=600)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("def sum(iterable)", return_tensors="pt").input_ids
    trained = build_saved_model(checkpoint := Path(CompletionRecord.load(folder / "record.json").checkpoint))
    materialize(trained, torch.device("cpu"))
    load_model(Index(checkpoint), trained)
    assert torch.equal(torch.load(tmp_path / "logits"), trained(ids).logits)
    assert trained.config.eos_token_id == tokenizer.eos_token_id


def test_the_report_shows_the_run(finished):
    page = (finished[0] / "report.html").read_text()
    assert "small" in page
    assert "no GPU here" in page


def test_mistakes_are_told_at_once_with_exit_code_2(tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text(f"optimizer: {{lr: -1}}\ntraining: {{stpes: 3}}\noutput: {tmp_path / 'out'}\nseed: 1:30\n")
    ended = pyflyte(file)
    assert ended.returncode == 2
    said = ended.stdout + ended.stderr
    # With lines, and before flytekit reads the file as YAML 1.1, where 1:30 is 90.
    for words in (
        "training.stpes (line 2)",
        "'steps'",
        "optimizer.lr (line 1)",
        "seed (line 4): not a number",
        "'1:30'",
    ):
        assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_mixture_gives_its_shares(tmp_path):
    pairs = [{"prompt": f"{i} and {i + 1} are", "completion": f" {2 * i + 1}"} for i in range(200)]
    texts = [{"prompt": "count", "completion": "one two three " * (1 + i % 3)} for i in range(60)]
    chats = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i}!"}]}
        for i in range(40)
    ]
    sources = []
    for number, (rows, weight) in enumerate(zip((pairs, texts, chats), (0.5, 0.3, 0.2), strict=True)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"source": str(path), "weight": weight})
    spec = {**SMALL, "name": "mixed", "data": {"sequence_length": 64, "packing": False, "sources": sources}}
    file = tmp_path / "spec.yaml"
    # Ten steps of four rows, as many of each source as its share says.
    file.write_text(yaml.safe_dump({**spec, "training": {"steps": 10}, "output": str(tmp_path / "out")}))
    ended = forked_flyte.pyflyte("run", "workflows/finetune.py", "finetune", "--spec", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "out" / "mixed" / "record.json").read_text())["sources"]
    assert [share["row_share"] for share in found] == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    assert all(share["eval_loss_after"] < share["eval_loss_before"] for share in found)
