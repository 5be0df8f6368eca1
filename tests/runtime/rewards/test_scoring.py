"""What is known of rewards before training."""

import json
from types import SimpleNamespace

import pytest
import torch

from strata_platform.spec.sections.objectives import RewardTerm
from tasks.runtime.data.dataset import COLUMNS
from tasks.runtime.rewards.scoring import require_reward_columns


def test_tests_that_cannot_fail_are_found_before_training():
    def row(tests):
        known = {"prompt": "a", "columns": {"tests": tests}, "where": f"rows.jsonl:{len(tests)}"}
        return {COLUMNS: torch.tensor([*json.dumps(known).encode()], dtype=torch.uint8)}

    rows = [row("assert f()"), row("def check(f): assert f()")]
    split = SimpleNamespace(rows=0)
    data = SimpleNamespace(train=rows, rows=2, validation=[], manifest=SimpleNamespace(validation=split))
    objective = SimpleNamespace(type="grpo", rewards=[RewardTerm(function="unit_tests")])
    with pytest.raises(ValueError, match=r"rewards\[0\]: rows.jsonl:24: the column 'tests' holds 'def check"):
        require_reward_columns(objective, data)
    data.train, data.rows = rows[:1], 1
    require_reward_columns(objective, data)
