"""Each objective learns a known rule from scratch: of two names, the one that the prompt names first is the answer.

Measured on prompts that were held out. A model that knows nothing of the rule is right half of the time.
"""

import json
import random

import pytest
import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.models.trained_weights import build_initial_model, build_trained_model, collect_weights
from tasks.runtime.objectives import build_objective
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_evaluations
from tests.runtime.helpers.narrow_preset import narrow
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.train_only import train_spec

NAMES = [first + second for first in "bcdfgklmnprst" for second in "aeiou"]
# Settings and steps.
OBJECTIVES = {
    "dpo": ({"type": "dpo", "beta": 0.5}, 30),
    "orpo": ({"type": "orpo", "beta": 1.0}, 60),
    "simpo": ({"type": "simpo"}, 20),
    "kto": ({"type": "kto", "beta": 0.5}, 40),
    "reward": ({"type": "reward"}, 30),
}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    output, draw = tmp_path_factory.mktemp("learned"), random.Random(0)
    pairs = []
    for _ in range(720):
        first, second = draw.sample(NAMES, 2)
        pairs.append({"prompt": f"{first} or {second}?", "chosen": f" {first}", "rejected": f" {second}"})
    # Prompts that KTO has not seen, either.
    write_pairs(output / "new.jsonl", pairs[600:])
    pairs = pairs[:600]
    write_pairs(output / "pairs.jsonl", pairs)
    answers = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    (output / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    return output


def accuracy_of_pairs(output, spec, record):
    """Share of new pairs whose good answer has grown more."""
    tokenizer = data_folder(spec.output, DataRecipe.from_spec(spec, fingerprint(spec))) / "tokenizer"
    data = {"source": f"{output}/new.jsonl", "sequence_length": 64, "validation_fraction": 0}
    pairs = RunSpec.model_validate(
        {
            "data": data,
            "objective": {"type": "dpo"},
            "model": {"tokenizer": str(tokenizer)},
            "kernels": {"enabled": False},
        }
    )
    recipe = DataRecipe.from_spec(pairs, fingerprint(pairs))
    rows = prepare(recipe, data_folder(str(output), recipe), report=print).train
    batch, objective = collate([rows[index] for index in range(len(rows))]), build_objective(pairs, fused=False)
    first = build_initial_model(spec)
    trained = build_trained_model(spec, collect_weights(RunFolder.of(spec), spec.adapter, record))
    with torch.no_grad():
        batch["reference"] = objective.log_probs(first, batch)
        share = objective.micro_batch_loss(trained.eval(), batch, objective.count(batch))
    return float(share.metrics["reward_accuracy"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_held_out_answers_are_ranked_by_the_rule(output, name):
    objective, steps = OBJECTIVES[name]
    spec = RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "data": {
                "source": f"{output}/{'answers' if name == 'kto' else 'pairs'}.jsonl",
                "sequence_length": 64,
                "validation_fraction": 0.15,
            },
            "objective": objective,
            "training": {"steps": steps, "micro_batch_size": 24},
            "optimizer": {"lr": 4e-3, "weight_decay": 0},
            "checkpoint": {"every": 1000},
            "evaluation": {"every": steps},
            "tracking": {"report_to": []},
        }
    )
    with narrow():
        record = train_spec(spec)
        if name == "kto":
            # Of single answers, the accuracy in evaluation is that of their labels.
            assert accuracy_of_pairs(output, spec, record) >= 0.95
            return
    (measured,) = read_evaluations(RunFolder.of(spec).metrics)
    assert measured.metrics["reward_accuracy"] >= 0.95 and measured.metrics["reward_margin"] > 0
