"""Stages by the command of the page: a model, one that prefers its better answers, a reward model, one that learns from
its scores, and their outputs.
"""

import csv
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from strata_platform import kept_log
from strata_platform.spec import RunSpec
from strata_platform.spec.stages import Stages
from tasks import align
from tasks.runtime.run_folder import kept_logs
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.preference_pairs import PAIRS, write_pairs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.workflows.helpers.forked_flyte import pyflyte


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    save_pretrained(folder / "base")
    write_pairs(folder / "pairs.jsonl", PAIRS[:16])
    write_pairs(folder / "answers.jsonl", [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS[:16]])
    common = {
        "output": str(folder / "out"),
        "data": {"sequence_length": 96, "validation_fraction": 0.2},
        "training": {"steps": 2, "micro_batch_size": 2},
        "evaluation": {"samples": 0, "max_batches": 1},
    }
    stages = {
        "sft": {"name": "sft", "model": {"name": str(folder / "base")}, "data": {"source": f"{folder}/answers.jsonl"}},
        "dpo": {
            "name": "dpo",
            "model": {"name": "run:sft"},
            "data": {"source": f"{folder}/pairs.jsonl"},
            "objective": {"type": "dpo"},
        },
    }
    stages["reward"] = {**stages["dpo"], "name": "reward", "objective": {"type": "reward"}}
    stages["grpo"] = {
        **stages["dpo"], "name": "grpo", "training": {"steps": 2, "micro_batch_size": 4},
        "objective": {
            "type": "grpo", "rewards": [{"model": "run:reward"}], "group_size": 2, "overlong": "rewarded",
            "generation": {"max_new_tokens": 8},
        },
    }  # fmt: skip
    (folder / "common.yaml").write_text(yaml.safe_dump(common))
    for name, stage in stages.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"include": "common.yaml", **stage}))
    (folder / "align.yaml").write_text("stages: [sft.yaml, dpo.yaml, reward.yaml, grpo.yaml]\n")
    return folder


@pytest.fixture(scope="module")
def ended(folder):
    return pyflyte("run", "workflows/align.py", "align", "--stages", str(folder / "align.yaml"))


def test_each_stage_is_a_whole_run_and_starts_from_the_one_before(folder, ended):
    assert ended.returncode == 0, ended.stdout + ended.stderr
    out = folder / "out"
    first, last = (CompletionRecord.load(out / name / "record.json") for name in ("sft", "dpo"))
    assert (first.status, last.status) == ("complete", "complete")
    started = yaml.safe_load((out / "dpo" / "spec.yaml").read_text())
    assert started["model"]["name"] == str(out / "sft" / "model")
    # Before its first step DPO is the model of the stage before, whatever that is.
    assert last.eval_loss_before == pytest.approx(0.6931, abs=1e-4)
    moved, base = (AutoModelForCausalLM.from_pretrained(p) for p in (out / "dpo" / "model", folder / "base"))
    between = AutoModelForCausalLM.from_pretrained(out / "sft" / "model")
    with torch.no_grad():
        distances = [
            sum(float((a - b).norm()) for a, b in zip(one.parameters(), between.parameters(), strict=True))
            for one in (moved, base)
        ]
    assert 0 < distances[0] < distances[1]


def test_a_table_has_all_stages_and_the_last_one_is_what_comes_out(folder, ended):
    rows = list(csv.DictReader((folder / "out" / "grpo" / "stages.csv").read_text().splitlines()))
    assert [(row["stage"], row["objective"]) for row in rows] == [
        (name, name) for name in ("sft", "dpo", "reward", "grpo")
    ]
    assert float(rows[1]["validation loss"]) == pytest.approx(
        json.loads((folder / "out/dpo/record.json").read_text())["eval_loss_after"]
    )
    said = " ".join(ended.stdout.split()[-8:])
    assert f"model={folder}/out/grpo/model" in said and f"table={folder}/out/grpo/stages.csv" in said


def test_answers_are_rewarded_by_the_model_of_the_stage_before(folder, ended):
    out = folder / "out"
    scores, tokenizer = (
        kind.from_pretrained(out / "reward" / "model") for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    told = list(map(json.loads, (out / "grpo" / "answers.jsonl").read_text().splitlines()))
    assert told
    for line in told:
        ids = tokenizer(line["prompt"] + line["answer"], return_tensors="pt")["input_ids"]
        if ids[0, -1] != tokenizer.eos_token_id:
            ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
        with torch.no_grad():
            assert line["reward"] == pytest.approx(float(scores(ids).logits), abs=1e-5)


def stages_of(tmp_path, **changes):
    first = RunSpec(name="first", output=str(tmp_path))
    data = {"source": str(tmp_path / "rows.jsonl")}
    second = RunSpec.model_validate(
        {"name": "second", "output": str(tmp_path), "model": {"name": "run:first"}, "data": data, **changes}
    )
    return Stages(stages=(first, second))


def test_a_later_stage_is_looked_at_before_the_first(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    stages = stages_of(tmp_path)
    assert align.check_stages(stages=stages) == stages
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(Exception, match=r"(?s)stage 'second': .*data\.source.*rows\.jsonl"):
        align.check_stages(stages=stages)


def test_on_a_cluster_stages_need_a_common_volume(tmp_path, monkeypatch):
    on_a_cluster(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r"model\.name of stage 'second' is the model of another pod"):
        align.check_stages(stages=stages_of(tmp_path, output="out"))


def test_a_stage_that_is_rejected_on_a_cluster_leaves_the_log_of_its_check(tmp_path, monkeypatch):
    on_a_cluster(monkeypatch)
    with pytest.raises(Exception, match="stage 'second'"):
        align.check_stages(stages=stages_of(tmp_path))
    (file,) = (tmp_path / "second" / "logs").glob("*.plan.jsonl")
    assert any("rows.jsonl" in line.text for line in kept_log.parse(file.name, file.read_bytes()))


def on_a_cluster(monkeypatch):
    monkeypatch.setattr(align, "is_local", lambda: False)
    for module in (align, kept_logs):
        # It would take the loggers from the tests that follow.
        monkeypatch.setattr(module, "configure_logging", lambda: None)


def test_a_model_that_is_gone_is_told(folder, ended, tmp_path):
    first, second = stages_of(tmp_path).stages
    record = str(folder / "out" / "sft" / "record.json")
    with pytest.raises(Exception, match=r"stage 'second' starts from the model of stage 'first', which does not exist"):
        align.start_from(spec=second, before=[first], records=[record])
