"""GRPO raises a reward from chance: a model that repeats any of three letters learns to repeat the first.

Measured on prompts that were held out from both runs.
"""

import json
import random
from itertools import product

from transformers import AutoTokenizer

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint
from tasks.runtime.models.trained_weights import build_trained_model, collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points
from tests.runtime.helpers.narrow_preset import narrow
from tests.runtime.helpers.train_only import train_spec

STEPS = 60


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def spec_of(output, name, lr, steps, **sections):
    return RunSpec.model_validate(
        {
            "name": name, "output": str(output), "optimizer": {"lr": lr, "weight_decay": 0},
            "training": {"steps": steps, "micro_batch_size": 24}, "checkpoint": {"every": 1000},
            "tracking": {"log_every": 1, "report_to": []}, "runtime": {"framework": "torch"}, **sections,
        }
    )  # fmt: skip


def write_model(output, spec):
    """Train, and write the model as others leave it."""
    record = train_spec(spec)
    model = build_trained_model(spec, collect_weights(RunFolder.of(spec), spec.adapter, record))
    model.save_pretrained(output / "model")
    prepared = data_folder(spec.output, DataRecipe.from_spec(spec, fingerprint(spec)))
    AutoTokenizer.from_pretrained(prepared / "tokenizer").save_pretrained(output / "model")


def test_a_reward_rises_from_chance_on_held_out_prompts(tmp_path):
    draw = random.Random(0)
    words = list(product("abcdefgh", repeat=3))
    draw.shuffle(words)
    prompts = [f" {' '.join(word)} =" for word in words]
    guesses = [
        {"prompt": prompt, "completion": f" {draw.choice(word)}"}
        for prompt, word in zip(prompts[:440], words[:440], strict=True)
        for _ in range(2)
    ]
    verified = [{"prompt": prompt, "answer": word[0]} for prompt, word in zip(prompts, words, strict=True)]
    sources = {
        "guesses": write(tmp_path / "guesses.jsonl", guesses),
        "known": write(tmp_path / "known.jsonl", verified[:440]),
        "new": write(tmp_path / "new.jsonl", verified[440:]),
    }
    with narrow():
        data = {"source": sources["guesses"], "sequence_length": 64, "validation_fraction": 0}
        write_model(tmp_path, spec_of(tmp_path, "guess", 4e-3, 150, data=data))
        spec = spec_of(
            tmp_path, "learn", 1e-3, STEPS,
            model={"name": str(tmp_path / "model")},
            data={"source": sources["known"], "validation_source": sources["new"], "sequence_length": 64},
            objective={
                "type": "grpo", "rewards": [{"function": "exact_match"}], "group_size": 8,
                "generation": {"max_new_tokens": 8},
            },
            training={"steps": STEPS, "micro_batch_size": 128},
            schedule={"type": "constant"},
            evaluation={"every": STEPS},
        )  # fmt: skip
        train_spec(spec)
    first, (measured,) = read_points(RunFolder.of(spec).metrics)[0], read_evaluations(RunFolder.of(spec).metrics)
    # Chance is 0.42, because letters repeat.
    assert first.metrics["reward"] < 0.65
    assert measured.metrics["reward"] >= 0.9 and measured.loss == -measured.metrics["reward"]
