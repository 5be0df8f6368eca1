"""The table of checks: name, function, and when it applies."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tasks.runtime.verification import batching, numerics, packed_rows, reference_model, resume, targets, weights
from tasks.runtime.verification.finding import Finding, Measured
from tasks.runtime.verification.subject import Subject


@dataclass(frozen=True)
class Check:
    """A claim about training, and its test."""

    name: str
    run: Callable[[Subject], Measured]
    does_not_apply: Callable[[Subject], str | None] = lambda subject: None
    """Returns the reason why the check does not apply, or None if it applies."""


def _no_kernels(subject: Subject) -> str | None:
    return None if subject.spec.kernels.enabled else "kernels.enabled is false"


def _not_compiled(subject: Subject) -> str | None:
    return None if subject.spec.training.compile else "training.compile is false"


def _no_adapter(subject: Subject) -> str | None:
    return "adapter.type is 'none'" if subject.spec.adapter.type == "none" else None


CHECKS = (
    Check("mask", targets.mask),
    Check("packing", packed_rows.packing, packed_rows.does_not_apply),
    Check("kernels", numerics.kernels, _no_kernels),
    Check("recompute", numerics.recomputation),
    Check("compile", numerics.compiled, _not_compiled),
    Check("batching", batching.batching),
    Check("reference", reference_model.reference, reference_model.does_not_apply),
    Check("updates", weights.updates),
    Check("buffers", weights.buffers),
    Check("adapter", weights.adapter, _no_adapter),
    Check("export", weights.export),
    Check("resume", resume.resume),
)


def names() -> tuple[str, ...]:
    """Names of all checks, in order."""
    return tuple(check.name for check in CHECKS)


def examine(subject: Subject, only: Sequence[str] = (), checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Run all checks, or those named in `only`, one after the other. A check that raises has failed."""
    for check in checks:
        if only and check.name not in only:
            continue
        began = time.monotonic()
        _free()
        try:
            reason = check.does_not_apply(subject)
            if reason is not None:
                yield Finding(check.name, "n/a", time.monotonic() - began, reason)
                continue
            measured = check.run(subject)
        # Any error is the result of this check, and the other checks still run.
        except Exception as error:
            message = " ".join(str(error).split()) or "no message"
            where = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {message} ({where.filename.rpartition('/')[2]}, line {where.lineno})"
            yield Finding(check.name, "fail", time.monotonic() - began, detail)
            continue
        yield Finding.of(check.name, measured, time.monotonic() - began)


def _free() -> None:
    """Free memory of the check before: processes of the next one may need the GPU's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
