"""Compile a run's kernels once per pod, before its training processes start.

`ensure_warm` runs this module as a process of its own: a crash, a hang or a CUDA context of the warm-up stays out of the
training processes. Whatever happens here, training starts; what happened is in the report.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from strata_kernels.warmup import Plan, record, warmup
from strata_platform.spec import RunSpec
from tasks.runtime.data import collator
from tasks.runtime.folder import RunFolder
from tasks.runtime.model import build_meta_model, prepare_for_training
from tasks.runtime.record import write_json

log = logging.getLogger(__name__)

# Set for the workers of a pod whose launcher has warmed up already.
DONE = "STRATA_WARMUP_DONE"


def plan_of(spec: RunSpec) -> Plan:
    """Every kernel that a training step of this spec launches, found by running the real step on meta tensors."""
    model = build_meta_model(spec)
    prepare_for_training(model, spec)
    model.train()
    row = {"input_ids": torch.zeros(spec.data.sequence_length, dtype=torch.int64, device="meta")}
    batch = collator(spec.model.attention)([row] * spec.training.micro_batch_size)["input_ids"]

    def step() -> None:
        targets = torch.zeros((), dtype=torch.int64, device="meta")
        model(input_ids=batch, labels=batch, position_ids=batch, num_items_in_batch=targets).loss.backward()

    return record(step)


def ensure_warm(spec: RunSpec, folder: RunFolder) -> dict[str, Any]:
    """Warm up this pod, unless its launcher has done so, and return the report; {} on all but the pod's first process.

    Never raises: a failed warm-up costs compile time during training, nothing else.
    """
    reason = _reason_to_skip(spec)
    if reason is not None:
        log.info("warm-up: %s", reason)
        return {"skipped": reason}
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return {}
    report = folder.root / f"warmup-{socket.gethostname()}.json"
    if DONE not in os.environ:
        problem = _run(spec, report)
        if problem is not None:
            log.warning("warm-up: %s; training starts all the same and compiles as it goes", problem)
            return {"skipped": problem}
        os.environ[DONE] = "1"
    return dict(json.loads(report.read_text(encoding="utf-8")))


def _run(spec: RunSpec, report: Path) -> str | None:
    """Run the warm-up in a process of its own; returns what went wrong, if anything did."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tasks.runtime.warm", str(report)],
            input=spec.model_dump_json(),
            text=True,
            timeout=spec.kernels.warmup_timeout,
        )
    except subprocess.TimeoutExpired:
        return f"given up after kernels.warmup_timeout {spec.kernels.warmup_timeout} s"
    if done.returncode != 0 or not report.exists():
        return f"its process ended with code {done.returncode}"
    return None


def _reason_to_skip(spec: RunSpec) -> str | None:
    if not spec.kernels.enabled:
        return "kernels.enabled is false; nothing to compile"
    if not torch.cuda.is_available():
        return "no GPU here; operators run their PyTorch reference, nothing to compile"
    if not spec.kernels.warmup:
        return "kernels.warmup is false; kernels are compiled when they are first used"
    return None


def main() -> None:
    """Read a spec as JSON from standard input, compile its kernels, write the report to the path given."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    spec = RunSpec.model_validate_json(sys.stdin.read())
    report = warmup(plan_of(spec))
    log.info("warm-up: %s", report.summary())
    write_json(Path(sys.argv[1]), report.to_dict())


if __name__ == "__main__":
    main()
