"""Three ways to compute the same gradients: with our kernels, with recomputation, compiled; each against fp64.

A difference between two ways means little by itself: both round. So the error of each is counted in units of the error
that PyTorch and transformers make in the same dtype, both taken against fp64.
"""

from __future__ import annotations

from typing import Any

import torch

from strata_platform.spec import RunSpec
from tasks.runtime.verification.exact import error, exact_step, scale
from tasks.runtime.verification.finding import Measured
from tasks.runtime.verification.observe import Step, first_step
from tasks.runtime.verification.subject import Subject

# As in the tests of the operators: twice PyTorch's own error.
LIMIT = 2.0
# Of the loss, one number in which errors cancel by chance: so many roundings are free.
_LOSS_ROUNDINGS = 8


def kernels(subject: Subject) -> Measured:
    """The fused operators against the model's own."""
    return against_exact(subject, first_step(_spec(subject), subject.data), "kernels on")


def recomputation(subject: Subject) -> Measured:
    """What the spec recomputes in the backward pass, or all of it, where it recomputes nothing."""
    asked = subject.spec.training.gradient_checkpointing
    kind = "full" if asked == "none" else asked
    every = subject.spec.training.gradient_checkpointing_every
    training = {"gradient_checkpointing": kind, "gradient_checkpointing_every": every}
    seen = first_step(_spec(subject, training=training), subject.data)
    return against_exact(subject, seen, f"gradient_checkpointing {kind}")


def compiled(subject: Subject) -> Measured:
    """Layers under `torch.compile`."""
    seen = first_step(_spec(subject, training={"compile": True}), subject.data)
    return against_exact(subject, seen, "compiled")


def _spec(subject: Subject, *, training: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """Of a first step in the dtype that the run computes in, with nothing recomputed and nothing compiled."""
    off = {"gradient_checkpointing": "none", "gradient_checkpointing_every": None, "compile": False}
    # Weights of four bits are others than those that fp64 has: of these nothing is learned here.
    exact = (
        {"adapter": subject.spec.adapter.model_dump() | {"quantization": "none"}} if subject.spec.is_quantized else {}
    )
    return subject.variant(
        model={"dtype": str(subject.computes_in).removeprefix("torch.")},
        training={"micro_batch_size": subject.micro_batch, **off, **(training or {})},
        optimizer={"in_backward": False},
        **exact,
        **changes,
    )


def against_exact(subject: Subject, seen: Step, way: str) -> Measured:
    """The greatest error of `seen`, in units of PyTorch's own; both of the same rows, against fp64."""
    plain, exact = _references(subject)
    rounding = torch.finfo(subject.computes_in).eps / 2
    floor = rounding * scale(exact.gradients.values())
    worst, where = _loss_error(seen, exact) / max(_loss_error(plain, exact), _LOSS_ROUNDINGS * rounding), "the loss"
    for name, gradient in exact.gradients.items():
        # Storing a gradient costs a rounding, and to those far below all others more: what cancels leaves noise.
        unit = max(error(plain.gradients[name], gradient), rounding * scale([gradient]), floor)
        found = error(seen.gradients[name], gradient) / unit if unit else 0.0
        if not found <= worst:
            worst, where = found, name
    problem = None
    if missing := exact.gradients.keys() ^ seen.gradients.keys():
        problem = f"other parameters learn: {sorted(missing)[0]}"
    detail = f"error against fp64 in units of PyTorch's in {str(subject.computes_in)[6:]}, {way}; worst: {where}"
    return Measured(worst, LIMIT, detail, problem)


def _loss_error(step: Step, exact: Step) -> float:
    return abs(step.loss - exact.loss) / abs(exact.loss)


def _references(subject: Subject) -> tuple[Step, Step]:
    """The step by PyTorch and transformers alone, in the dtype of the run and in fp64. Computed once."""
    if "references" not in subject.kept:
        spec = _spec(subject, kernels={"enabled": False})
        subject.kept["references"] = first_step(spec, subject.data), exact_step(spec, subject.data)
    found: tuple[Step, Step] = subject.kept["references"]
    return found
