"""Compile a run's kernels once per pod, before its training processes start.

The warm-up is a process of its own (`tasks.runtime.plan`): its crash, its hang or its CUDA context stays out of the
training processes. Whatever happens there, training starts; what happened is in the report.
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

from strata_platform.spec import RunSpec
from tasks.runtime.folder import RunFolder
from tasks.runtime.record import write_json

log = logging.getLogger(__name__)

# Names the report of the warm-up that was made or tried, for the processes that are started from there.
DONE = "STRATA_WARMUP_DONE"


def ensure_warm(spec: RunSpec, folder: RunFolder) -> dict[str, Any]:
    """Warm up this pod, unless its launcher has done so, and return the report; {} on all but the pod's first process.

    Never raises: a failed warm-up costs compile time during training, nothing else.
    """
    reason = _reason_to_skip(spec)
    report = folder.root / f"warmup-{socket.gethostname()}.json"
    done = os.environ.get(DONE) == str(report)
    os.environ[DONE] = str(report)
    if reason is not None:
        if not done:
            log.info("warm-up: %s", reason)
        return {"skipped": reason}
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return {}
    if not done:
        problem = _run(spec, report)
        if problem is not None:
            log.warning("warm-up: %s; training starts all the same and compiles as it goes", problem)
            write_json(report, {"skipped": problem})
    return dict(json.loads(report.read_text(encoding="utf-8")))


def _run(spec: RunSpec, report: Path) -> str | None:
    """Run the warm-up in a process of its own; returns what went wrong, if anything did."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tasks.runtime.plan", str(report)],
            input=spec.model_dump_json(),
            text=True,
            timeout=spec.kernels.warmup_timeout,
        )
    except subprocess.TimeoutExpired:
        return f"given up after kernels.warmup_timeout {spec.kernels.warmup_timeout} s"
    except OSError as error:
        return f"its process did not start: {error}"
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
