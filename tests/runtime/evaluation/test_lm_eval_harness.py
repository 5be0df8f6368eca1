"""Tasks of lm-evaluation-harness: own ones of a file, without a network, and what is told of unknown ones."""

import importlib.util
import json

import pytest
import torch

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData
from tasks.runtime.data.preparation.tokenizer import train_tokenizer
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.evaluation.lm_eval_harness import Score, require_tasks, scores_of, task_scores
from tasks.runtime.models.build import build_model, set_special_tokens
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.comparable_runs import curve, make_spec
from tests.runtime.helpers.train_only import train_spec

needed = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")

OPPOSITES = [("hot", "cold"), ("up", "down"), ("left", "right"), ("new", "old"), ("big", "small"), ("day", "night")]


@pytest.fixture
def task(tmp_path):
    """Six questions with two answers each, not always the right one, and the harness's description of them."""
    rows = [
        {"question": f"The opposite of {pair[0]} is", "choices": pair, "answer": number % 2}
        for number, pair in enumerate(OPPOSITES)
    ]
    (tmp_path / "opposites.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "opposites.yaml"
    file.write_text(
        json.dumps(
            {
                "task": "opposites",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(tmp_path / "opposites.jsonl")}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "choices",
                "doc_to_target": "answer",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            }
        )
    )
    return str(file), rows


def spec_of(*tasks, **evaluation):
    return RunSpec.model_validate({"evaluation": {"tasks": tasks, **evaluation}})


def log_likelihood(model, tokenizer, question, answer):
    context = tokenizer(question)["input_ids"]
    whole = tokenizer(f"{question} {answer}")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    return sum(logits[place - 1, whole[place]].item() for place in range(len(context), len(whole)))


@needed
@pytest.mark.filterwarnings("default")
def test_a_task_of_a_file_is_done_without_a_network(task):
    file, rows = task
    spec = spec_of(file)
    model, tokenizer = (
        build_model(spec.model, spec.seed).eval(),
        train_tokenizer([row["question"] for row in rows] * 20),
    )
    set_special_tokens(model, tokenizer)
    require_tasks(spec.evaluation.tasks)
    scores = task_scores(model, tokenizer, spec.evaluation, batch_size=spec.training.micro_batch_size)

    right = 0
    for row in rows:
        told = [log_likelihood(model, tokenizer, row["question"], choice) for choice in row["choices"]]
        right += told.index(max(told)) == row["answer"]
    accuracy = right / len(rows)
    error = (accuracy * (1 - accuracy) / (len(rows) - 1)) ** 0.5
    assert scores == {("opposites", "acc"): Score(pytest.approx(accuracy), pytest.approx(error), True)}
    assert 0 < right < len(rows)


@needed
@pytest.mark.filterwarnings("default")
def test_a_run_is_scored_before_and_after_training(task, tmp_path):
    spec = make_spec(tmp_path / "out", "scored", "torch", "single", 1)
    evaluation = {"samples": 0, "tasks": [task[0]], "task_limit": 4, "few_shot": 1}
    spec = RunSpec.model_validate({**spec.model_dump(), "evaluation": evaluation})
    trained = train_spec(spec)
    data = PreparedData.load(next((tmp_path / "out" / "data").glob("[!.]*")))
    record = evaluate(spec, trained, data, collect_weights(RunFolder.of(spec), spec.adapter, trained))
    (score,) = record.task_scores
    assert (score.task, score.metric, score.higher_is_better) == ("opposites", "acc", True)
    # Of four questions.
    assert {4 * score.before, 4 * score.after} <= {0, 1, 2, 3, 4} and score.error is not None
    assert CompletionRecord.model_validate_json(record.model_dump_json()) == record


@needed
@pytest.mark.filterwarnings("default")
def test_a_run_is_scored_during_training_which_changes_no_loss(task, tmp_path):
    plain = make_spec(tmp_path / "out", "plain", "torch", "single", 1)
    train_spec(plain)
    spec = make_spec(tmp_path / "out", "during", "torch", "single", 1)
    evaluation = {"every": 1, "during": ["tasks"], "tasks": [task[0]], "task_limit": 4}
    record = train_spec(RunSpec.model_validate({**spec.model_dump(), "evaluation": evaluation}))
    assert curve(spec) == curve(plain)
    scores = [evaluation.metrics["opposites/acc"] for evaluation in record.evaluations]
    assert len(scores) == record.steps and {4 * score for score in scores} <= {0, 1, 2, 3, 4}


@needed
def test_unknown_tasks_are_told_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"evaluation\.tasks: there is no file '.*none\.yaml'"):
        require_tasks((str(tmp_path / "none.yaml"),))
    with pytest.raises(ValueError, match=r"evaluation\.tasks: 'helaswag' is not a task.*did you mean 'hellaswag'"):
        require_tasks(("hellaswag", "mmlu", "helaswag"))


@needed
def test_a_task_whose_data_cannot_be_loaded_is_told_by_its_name(task, tmp_path):
    file, _ = task
    (tmp_path / "opposites.jsonl").unlink()
    with pytest.raises(ValueError, match=r"evaluation\.tasks: '.*opposites\.yaml' could not be loaded: FileNotFound"):
        task_scores(None, None, spec_of(file).evaluation, batch_size=1)


def test_a_group_stands_for_its_parts():
    results = {
        "results": {
            "all": {"alias": "all", "acc,none": 0.5, "acc_stderr,none": 0.1},
            "some": {"alias": " - some", "acc,none": 0.4, "acc_stderr,none": 0.2},
            "one": {"alias": "  - one", "sample_len": 3, "acc,none": 0.3, "acc_stderr,none": 0.3},
            "named": {"alias": "named"},
            "two": {"alias": " - two", "exact_match,strict": 0.25, "exact_match_stderr,strict": "N/A"},
        },
        "group_subtasks": {"all": ["some"], "some": ["one"], "named": ["two"]},
        "higher_is_better": {"all": {"acc": True}, "some": {"acc": True}, "one": {"acc": True}, "two": {}},
    }
    assert scores_of(results) == {
        ("all", "acc"): Score(0.5, 0.1, True),
        ("two", "exact_match (strict)"): Score(0.25, None, None),
    }


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("tasks.runtime.evaluation.lm_eval_harness.find_spec", lambda name: None)
    require_tasks(())
    with pytest.raises(ValueError, match=r"evaluation\.tasks needs the package lm_eval.*strata\[lm-eval\]"):
        require_tasks(("hellaswag",))


@pytest.mark.parametrize("field", ["few_shot", "task_limit"])
def test_settings_of_no_task_are_refused(field):
    with pytest.raises(SpecError, match=rf"evaluation\.{field}: set, but evaluation\.tasks names none"):
        spec_of(**{field: 5})
