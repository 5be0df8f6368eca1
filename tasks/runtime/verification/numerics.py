"""Three ways to compute the same gradients: with the kernel layer, with recomputation, compiled; each against fp64.

Both sides of a comparison round, so a difference alone means little. Each error is therefore counted in units of the
error of PyTorch and transformers in the same dtype; both errors are relative to fp64.
"""

from __future__ import annotations

from typing import Any

import torch

from strata_platform.spec import RunSpec
from tasks.runtime.verification.exact import error, exact_step, scale
from tasks.runtime.verification.finding import Measured
from tasks.runtime.verification.observe import Step, first_step
from tasks.runtime.verification.subject import Subject

# Twice PyTorch's own error, as in the tests of the operators.
LIMIT = 2.0
# Roundings of the loss that are always allowed: it is one number, and PyTorch's errors may cancel by chance.
_LOSS_ROUNDINGS = 8


def kernels(subject: Subject) -> Measured:
    """Compare the fused operators with the model's own."""
    return against_exact(subject, first_step(_spec(subject), subject.data), "kernels on")


def recomputation(subject: Subject) -> Measured:
    """Check the spec's activation checkpointing, or `full` if it has none."""
    asked = subject.spec.training.gradient_checkpointing
    kind = "full" if asked == "none" else asked
    training = {
        "gradient_checkpointing": kind,
        "gradient_checkpointing_every": subject.spec.training.gradient_checkpointing_every,
        "activation_offloading": subject.spec.training.activation_offloading,
    }
    seen = first_step(_spec(subject, training=training), subject.data)
    return against_exact(subject, seen, f"gradient_checkpointing {kind}")


def compiled(subject: Subject) -> Measured:
    """Check layers under `torch.compile`."""
    seen = first_step(_spec(subject, training={"compile": True}), subject.data)
    return against_exact(subject, seen, "compiled")


def _spec(subject: Subject, *, training: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """The spec of a first step in the compute dtype, without recomputation and compilation."""
    off = {
        "gradient_checkpointing": "none",
        "gradient_checkpointing_every": None,
        "activation_offloading": False,
        "compile": False,
        "cuda_graphs": False,
    }
    # The fp64 reference has exact weights, which 4-bit weights cannot be compared with.
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
    """The largest error of `seen` in units of PyTorch's error, both on the same rows and relative to fp64."""
    plain, exact = _references(subject)
    rounding = torch.finfo(subject.computes_in).eps / 2
    floor = rounding * scale(exact.gradients.values())
    worst, where = _loss_error(seen, exact) / max(_loss_error(plain, exact), _LOSS_ROUNDINGS * rounding), "the loss"
    for name, gradient in exact.gradients.items():
        # Storing a gradient rounds it. Gradients far below all others are differences of larger terms, that is, noise.
        unit = max(error(plain.gradients[name], gradient), rounding * scale([gradient]), floor)
        found = error(seen.gradients[name], gradient) / unit if unit else 0.0
        if not found <= worst:
            worst, where = found, name
    problem = None
    if missing := exact.gradients.keys() ^ seen.gradients.keys():
        problem = f"the trainable parameters differ: {sorted(missing)[0]}"
    detail = f"error against fp64 in units of PyTorch's in {str(subject.computes_in)[6:]}, {way}; worst: {where}"
    return Measured(worst, LIMIT, detail, problem)


def _loss_error(step: Step, exact: Step) -> float:
    return abs(step.loss - exact.loss) / abs(exact.loss)


def _references(subject: Subject) -> tuple[Step, Step]:
    """The step by PyTorch and transformers alone, in the compute dtype and in fp64, computed once."""
    if "references" not in subject.kept:
        spec = _spec(subject, kernels={"enabled": False})
        subject.kept["references"] = first_step(spec, subject.data), exact_step(spec, subject.data)
    found: tuple[Step, Step] = subject.kept["references"]
    return found
