"""What `benchmarks.ops` measures of the operators that stand alone: norms, activations and distributions of a layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import strata_kernels

from . import reference
from .case import Case, Operator
from .reference import RMS_EPS, Shape, random

GROUPS = 32


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logits(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (random(shape["rows"], shape["vocabulary"], dtype=dtype, device=device),)


def softmax(z: Tensor) -> Tensor:
    return _wide(z).softmax(-1).to(z.dtype)


def sparsemax(z: Tensor) -> Tensor:
    """Algorithm 1 of arXiv:1602.02068."""
    wide = _wide(z)
    ordered = wide.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=wide.dtype)
    inside = 1 + rank * ordered > ordered.cumsum(-1)
    tau = ((ordered * inside).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
    # Not clamp, which passes a gradient to classes on the threshold: in bf16 there are many.
    return torch.where(wide > tau, wide - tau, 0.0).to(z.dtype)


def _dyt_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    x, weight, bias = reference.layer_norm_inputs(shape, dtype, device)
    return x, torch.full((1,), 0.5, device=device, dtype=dtype).requires_grad_(), weight, bias


def dyt(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * torch.tanh(alpha * x) + bias


def _poly_norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (*reference.rows_inputs(shape, dtype, device), random(3, dtype=dtype, device=device),
            random(1, dtype=dtype, device=device))  # fmt: skip


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PolyCom's lines, with the powers in fp32."""
    wide = _wide(x)
    w_0, w_1, w_2 = (w * u * torch.rsqrt(u.square().mean(-1, keepdim=True) + RMS_EPS)
                     for w, u in zip(weight, (wide**3, wide**2, wide), strict=True))  # fmt: skip
    return (w_0 + w_1 + w_2 + bias).to(x.dtype)


def _group_norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Images as convolutions have them, [B, C, size, size]."""
    images, channels, size = shape["images"], shape["channels"], shape["size"]
    x = random(images, channels, size, size, dtype=dtype, device=device)
    return x, *(random(channels, dtype=dtype, device=device) for _ in range(2))


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.group_norm(x, GROUPS, weight, bias, RMS_EPS)


def _modulated_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x [B, T, D], scale and shift [B, D], weight [D]."""
    batch, width = shape["batch"], shape["features"]
    x = random(batch, shape["rows"] // batch, width, dtype=dtype, device=device)
    return x, *(random(*sizes, dtype=dtype, device=device) for sizes in ((batch, width), (batch, width), (width,)))


def modulated_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
    return reference.rms_norm(x, weight) * (1 + scale[:, None]) + shift[:, None]


def _mlp_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x [N, H], gate and up [I, H], down [H, I]."""
    width, inner = shape["features"], shape["inner"]
    sizes = ((inner, width), (inner, width), (width, inner))
    weights = ((torch.randn(s, device=device) * s[1] ** -0.5).to(dtype).requires_grad_() for s in sizes)
    return *reference.rows_inputs(shape, dtype, device), *weights


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)


def mlp_exact(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`mlp` that holds 2048 rows at a time: in fp64 all of them are too many."""
    return torch.cat([checkpoint(mlp, part, gate, up, down, use_reentrant=False) for part in x.split(2048)])


def _probabilities(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Of a student, and of a teacher that is near it; the last bits are those of a product in `dtype`."""
    logits, teacher = reference.jsd_inputs(shape, dtype, device)
    p, q = (x.detach().float().softmax(-1).to(dtype) for x in (logits, teacher))
    return p.requires_grad_(), q


def tvd(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (_wide(p) - _wide(q)).abs().sum(-1).mean()


def cosine_distance(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    logits, teacher = functional.linear(x, weight), functional.linear(teacher_x, teacher_weight)
    return (1 - functional.cosine_similarity(_wide(logits), _wide(teacher), dim=-1)).mean()


def cosine_distance_exact(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """`cosine_distance` that holds the logits of 512 rows at a time."""
    parts = zip(x.split(512), teacher_x.split(512), strict=True)
    run = lambda x, t: cosine_distance(x, weight, t, teacher_weight) * x.shape[0]  # noqa: E731
    return torch.stack([checkpoint(run, *part, use_reentrant=False) for part in parts]).sum() / x.shape[0]


def _rows(rows: int, features: int, **more: int) -> Shape:
    return {**more, "rows": rows, "features": features}


def _of_vocabulary(shape: Shape) -> int:
    return shape["rows"] * shape["vocabulary"]


def _rows_and_vocabulary(*sizes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case({"rows": rows, "vocabulary": vocabulary}) for rows, vocabulary in sizes)


SINGLE_OPERATORS = (
    Operator(
        name="softmax",
        ours=strata_kernels.softmax,
        torch=softmax,
        inputs=_logits,
        cases=_rows_and_vocabulary((65536, 128), (16384, 4096), (4096, 128256)),
        bytes=10,
        elements=_of_vocabulary,
    ),
    Operator(
        name="sparsemax",
        ours=strata_kernels.sparsemax,
        torch=sparsemax,
        inputs=_logits,
        cases=_rows_and_vocabulary((16384, 4096), (4096, 32768)),
        bytes=10,
        elements=_of_vocabulary,
    ),
    Operator(
        name="dyt",
        ours=strata_kernels.dyt,
        torch=dyt,
        inputs=_dyt_inputs,
        cases=(Case(_rows(16384, 4096)),),
        bytes=10,
    ),
    Operator(
        name="poly_norm",
        ours=strata_kernels.poly_norm,
        torch=poly_norm,
        inputs=_poly_norm_inputs,
        cases=(Case(_rows(16384, 4096)), Case(_rows(8192, 14336))),
        bytes=10,
    ),
    Operator(
        name="group_norm",
        ours=lambda x, weight, bias: strata_kernels.group_norm(x, GROUPS, weight, bias, RMS_EPS),
        torch=group_norm,
        inputs=_group_norm_inputs,
        # Of a U-Net, and of a decoder of images, whose groups are large and few.
        cases=(
            Case({"images": 32, "channels": 640, "size": 32}),
            Case({"images": 2, "channels": 128, "size": 512}),
        ),
        bytes=10,
        elements=lambda shape: shape["images"] * shape["channels"] * shape["size"] ** 2,
    ),
    Operator(
        name="modulated_rms_norm",
        ours=lambda x, scale, shift, weight: strata_kernels.modulated_rms_norm(x, scale, shift, weight, RMS_EPS),
        torch=modulated_rms_norm,
        inputs=_modulated_inputs,
        cases=(Case(_rows(65536, 1152, batch=64)), Case(_rows(16384, 3072, batch=4))),
        bytes=10,
    ),
    Operator(
        name="tiled_mlp",
        ours=strata_kernels.tiled_mlp,
        torch=mlp,
        exact=mlp_exact,
        inputs=_mlp_inputs,
        cases=(Case({**_rows(32768, 4096), "inner": 14336}),),
        # Two of the eleven products compute what was not kept.
        flops=lambda shape: 22 * shape["rows"] * shape["features"] * shape["inner"],
    ),
    Operator(
        name="tvd",
        ours=lambda p, q: strata_kernels.tvd(p, q, probabilities=True),
        torch=tvd,
        inputs=_probabilities,
        cases=_rows_and_vocabulary((8192, 32000), (4096, 128256)),
        bytes=6,
        elements=_of_vocabulary,
    ),
    Operator(
        name="linear_cosine_distance",
        ours=strata_kernels.linear_cosine_distance,
        torch=cosine_distance,
        exact=cosine_distance_exact,
        inputs=reference.linear_jsd_inputs,
        cases=(Case({"rows": 4096, "features": 4096, "vocabulary": 128256}),),
        flops=lambda shape: 8 * shape["rows"] * shape["features"] * shape["vocabulary"],
        products=reference.linear_jsd_products,
    ),
)  # fmt: skip
