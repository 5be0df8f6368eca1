"""Each objective learns a known rule from scratch: of two names, the one that the prompt names first is the answer.

Measured on prompts that were held out. A model that knows nothing of the rule is right half of the time.
"""

import pytest

from benchmarks.preferences import accuracy_of_pairs, spec_of, write_rule
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_evaluations
from tests.runtime.helpers.narrow_preset import narrow
from tests.runtime.helpers.train_only import train_spec

STEPS = {"dpo": 30, "orpo": 60, "simpo": 20, "kto": 40, "reward": 30}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    output = tmp_path_factory.mktemp("learned")
    write_rule(output)
    return output


@pytest.mark.parametrize("name", STEPS)
def test_held_out_answers_are_ranked_by_the_rule(output, name):
    steps = STEPS[name]
    spec = spec_of(output, name, steps, steps, rows=24, rate=4e-3)
    with narrow():
        train_spec(spec)
        if name == "kto":
            # Of single answers, the accuracy in evaluation is that of their labels.
            assert accuracy_of_pairs(spec, steps) >= 0.95
            return
    (measured,) = read_evaluations(RunFolder.of(spec).metrics)
    assert measured.metrics["reward_accuracy"] >= 0.95 and measured.metrics["reward_margin"] > 0
