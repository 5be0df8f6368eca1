"""Runs of a few steps that every framework and strategy computes alike, and the curves to compare."""

import json
import os
from dataclasses import asdict

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points

# As many as a change has to pass; 20 of them, by STRATA_MATRIX_STEPS, take two cores eight minutes.
STEPS = int(os.environ.get("STRATA_MATRIX_STEPS", 4))
SAVED = STEPS // 2


def make_spec(
    output,
    name,
    framework,
    strategy,
    processes,
    adapter="none",
    training=None,
    dora=False,
    steps=STEPS,
    evaluated=False,
    **options,
):
    """Four rows a step, however they are spread; `options` are those of the strategy.

    evaluated: after every second step.
    """
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            # A rate at which a few steps change the loss.
            **({"model": {"name": f"{output}/pretrained"}, "optimizer": {"lr": 5e-3}} if adapter != "none" else {}),
            "adapter": {"type": adapter, **({"use_dora": True} if dora else {})},
            "data": {"sequence_length": 64, "max_samples": 60},
            "training": {
                "steps": steps,
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 4 // processes,
                **(training or {}),
            },
            "checkpoint": {"every": SAVED, "keep_last": steps},
            "evaluation": {"every": 2} if evaluated else {},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": framework},
            "parallel": {"type": strategy, **options},
            "topology": {"nproc_per_node": processes},
        }
    )


def rounded(spec):
    """The same with weights in bfloat16."""
    return RunSpec.model_validate({**spec.model_dump(), "model": {**spec.model.model_dump(), "dtype": "bfloat16"}})


def unevaluated(spec):
    """The same run without evaluation."""
    return RunSpec.model_validate({**spec.model_dump(), "evaluation": {}})


def file_of(output, spec, name=None):
    file = output / f"{name or spec.name}.json"
    file.write_text(spec.model_dump_json())
    return str(file)


def evaluations(spec):
    """Step and validation loss of each evaluation during training."""
    return [(point.step, point.loss) for point in read_evaluations(RunFolder.of(spec).metrics)]


def curve(spec, attempt=None):
    """Loss, norm, rate and counts of each step: of the newest attempt, or of one."""
    if attempt is None:
        points = map(asdict, read_points(RunFolder.of(spec).metrics))
    else:
        lines = map(json.loads, RunFolder.of(spec).metrics.read_text().splitlines())
        points = [line for line in lines if "loss" in line]
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "target_tokens")
    return [tuple(point[name] for name in names) for point in points if attempt in (None, point["attempt"])]


def approx(points):
    """Equal but for rounding. PyTorch sums a large norm on the CPU in one go, which is less exact than in parts."""
    return [
        (step, pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-3), *counts)
        for step, loss, norm, *counts in points
    ]
