"""What a run compiles, and compiling it: `python -m tasks.runtime.plan REPORT`, the spec as JSON on standard input."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from strata_kernels.warmup import Plan, record, warmup
from strata_platform.spec import RunSpec
from tasks.runtime.adapter import add_adapter
from tasks.runtime.data import collator
from tasks.runtime.log import configure_logging
from tasks.runtime.model import build_meta_model, prepare_for_training
from tasks.runtime.record import write_json

log = logging.getLogger("tasks.runtime.plan")


def plan_of(spec: RunSpec) -> Plan:
    """Every kernel that a training step of this spec launches, found by running the real step on meta tensors."""
    model = build_meta_model(spec)
    add_adapter(model, spec)
    prepare_for_training(model, spec)
    model.train()
    row = {"input_ids": torch.zeros(spec.data.sequence_length, dtype=torch.int64, device="meta")}
    tokens = collator(spec.model.attention)([row] * spec.training.micro_batch_size)["input_ids"]
    rows, length = tokens.shape
    # Given whole, because transformers makes the mask of packed rows by looking at their values, and here are none.
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="meta")
    targets = torch.zeros((), dtype=torch.int64, device="meta")

    def step() -> None:
        output = model(
            input_ids=tokens, labels=tokens, position_ids=tokens, attention_mask=mask, num_items_in_batch=targets
        )
        output.loss.backward()

    return record(step)


def main() -> None:
    """Compile the kernels of a spec and write the report to the path given."""
    configure_logging()
    spec = RunSpec.model_validate_json(sys.stdin.read())
    report = warmup(plan_of(spec))
    log.info("warm-up: %s", report.summary())
    write_json(Path(sys.argv[1]), report.to_dict())


if __name__ == "__main__":
    main()
