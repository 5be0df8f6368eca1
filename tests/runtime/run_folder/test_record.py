"""The completion record comes back from a file, and from one task to the next, as it was."""

import json
from math import inf, nan

from tasks.runtime.run_folder.record import CompletionRecord, TaskScore
from tests.runtime.report.test_report import RECORD


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_a_record_with_numbers_that_are_not_finite_comes_back_as_it_was(tmp_path):
    record = RECORD.model_copy(
        update={
            "train_loss": inf,
            "eval_loss_after": nan,
            "eval_metrics": {"reward_margin": -inf},
            "task_scores": (TaskScore(task="t", metric="mcc", before=nan, after=0.5, error=nan),),
            "warmup": {},
        }
    )
    record.save(tmp_path / "record.json")
    json.loads((tmp_path / "record.json").read_text(), parse_constant=refuse)
    assert repr(CompletionRecord.load(tmp_path / "record.json")) == repr(record)
    # The way from task to task.
    assert repr(CompletionRecord.model_validate_json(record.model_dump_json())) == repr(record)
