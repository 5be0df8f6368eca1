"""Every check: a row with its name, what it proves, when it applies, and its function."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tasks.runtime.verification import numerics, packing
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


CHECKS = (
    Check("kernels", "The fused operators give the model's loss and gradients.", numerics.kernels, _no_kernels),
    Check("packing", "Documents of a packed row do not see each other.", packing.packing, packing.does_not_apply),
    Check("recompute", "Activations that are computed again give the same gradients.", numerics.recomputation),
    Check("compile", "Compiled layers give the same gradients.", numerics.compiled, _not_compiled),
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
