"""Every check: a row with its name, what it proves, when it applies, and its function."""

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
    """A claim about training that is put to the test."""

    name: str
    proves: str
    run: Callable[[Subject], Measured]
    does_not_apply: Callable[[Subject], str | None] = lambda subject: None
    """Why there is nothing to check, or None where there is."""


def _no_kernels(subject: Subject) -> str | None:
    return None if subject.spec.kernels.enabled else "kernels.enabled is false"


def _not_compiled(subject: Subject) -> str | None:
    return None if subject.spec.training.compile else "training.compile is false"


def _no_adapter(subject: Subject) -> str | None:
    return "adapter.type is 'none'" if subject.spec.adapter.type == "none" else None


CHECKS = (
    Check("mask", "The targets are what the model is to say, with its end, and nothing else.", targets.mask),
    Check(
        "packing", "Documents of a packed row do not see each other.", packed_rows.packing, packed_rows.does_not_apply
    ),
    Check("kernels", "The fused operators give the model's loss and gradients.", numerics.kernels, _no_kernels),
    Check("recompute", "Activations that are computed again give the same gradients.", numerics.recomputation),
    Check("compile", "Compiled layers give the same gradients.", numerics.compiled, _not_compiled),
    Check("batching", "How rows are spread over micro-batches and processes changes nothing.", batching.batching),
    Check(
        "reference",
        "The reference model, or the teacher, is the model that is named.",
        reference_model.reference,
        reference_model.does_not_apply,
    ),
    Check("updates", "What the optimizer is to move moves as in fp32, and nothing else does.", weights.updates),
    Check(
        "buffers", "What no weights file has, such as inv_freq, is right after every way of loading.", weights.buffers
    ),
    Check("adapter", "Merging the adapter does not change what the model computes.", weights.adapter, _no_adapter),
    Check("export", "The exported folder is the trained model to transformers alone.", weights.export),
    Check("resume", "A run that is killed continues to the same bits.", resume.resume),
)


def names() -> tuple[str, ...]:
    """Of all checks, in the order in which they are done."""
    return tuple(check.name for check in CHECKS)


def examine(subject: Subject, only: Sequence[str] = (), checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Do the checks one after the other, those of the names in `only`, or all. One that raises has failed."""
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
        # Whatever it is, it is what this line has to say; the others are still to be done.
        except Exception as error:
            said = " ".join(str(error).split()) or "no message"
            where = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {said} ({where.filename.rpartition('/')[2]}, line {where.lineno})"
            yield Finding(check.name, "fail", time.monotonic() - began, detail)
            continue
        yield Finding.of(check.name, measured, time.monotonic() - began)


def _free() -> None:
    """Give back what the check before has left: processes of the next one may need the GPU's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
