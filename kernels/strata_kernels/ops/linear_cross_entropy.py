"""Cross entropy of a linear layer, without ever holding all of its logits.

    z    = softcap · tanh((x Wᵀ + b) / softcap)        lse = log Σ_v exp z_v        p = exp(z - lse)
    loss = lse - (1 - ε) z_target - (ε / V) Σ_v z_v + z_loss · lse²
    dz   = ((1 + 2 · z_loss · lse) p - (1 - ε) onehot(target) - ε / V) · s · (1 - (z / softcap)²)
    dx   = dz W          dW = dzᵀ x          db = Σ_rows dz

with ε the label smoothing and s what the reduction multiplies a row's loss by. Source: the order of work follows the
gradient-in-forward scheme of Liger-Kernel (arXiv:2410.10989, section 3.2), the formulas Szegedy et al. (smoothing,
arXiv:1512.00567), de Brébisson and Vincent (z-loss, arXiv:1604.08859) and Gemma 2 (softcap, arXiv:2408.00118).

Axes: N rows, H features, V vocabulary entries. Rows are taken in chunks. A chunk is one matrix product into a reused
buffer, one kernel that reads the logits, gives the losses and overwrites the logits by dz, and the products for dx and
dW: 6·N·H·V FLOPs and no recomputation, since a scalar loss is linear in its incoming gradient, which the backward pass
multiplies in. Nothing is accumulated with atomics: results repeat bit for bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._cross_entropy import Options, cross_entropy_rows, padded
from ._launch import DTYPES, accumulator, describe, has_dtype, launch, takes_kernel
from ._register import register

Reduction = Literal["mean", "sum", "none"]

# Logits held at a time, in bytes. On an H200 at 8192x4096x128256 half of it costs 3 % of speed, twice of it gains none.
_CHUNK_BYTES = 512 * 2**20
# On a CPU a chunk that stays in the last-level cache is faster than one that does not.
_CPU_CHUNK_BYTES = 16 * 2**20
# dW is rounded to its dtype once per chunk. Up to this many roundings its error stays within twice that of one: with
# bf16, 8192 rows and 4, 8 or 32 chunks it is 1.8, 2.9 or 4.8 times as large at the worst element.
_MAX_ROUNDINGS = 4


@triton.jit
def multiply_kernel(p_x, p_factor, n_elements, BLOCK: tl.constexpr):
    """x *= factor, where a factor of one costs no traffic."""
    factor = tl.load(p_factor).to(tl.float32)
    if factor != 1.0:
        o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_x = o_x < n_elements
        b_x = tl.load(p_x + o_x, mask=m_x)
        tl.store(p_x + o_x, (b_x.to(tl.float32) * factor).to(b_x.dtype), mask=m_x)


def chunk_plan(
    n_rows: int, vocabulary: int, hidden: int, itemsize: int, weight_grad: bool, budget: int
) -> tuple[int, bool]:
    """Rows of a chunk, and whether dW is accumulated in fp32.

    As many rows as `budget` bytes of logits hold, evened out over the chunks. A 2-byte dW that would be rounded more
    than `_MAX_ROUNDINGS` times gets fewer and larger chunks as long as those take less memory than an fp32 copy of dW
    (up to about N = 8 H rows), and beyond that the copy.
    """
    row_bytes = padded(vocabulary) * itemsize
    chunks = -(-n_rows * row_bytes // budget)
    wide = False
    if weight_grad and itemsize == 2 and chunks > _MAX_ROUNDINGS:
        wide = -(-n_rows // _MAX_ROUNDINGS) * row_bytes > 2 * vocabulary * hidden * itemsize
        chunks = chunks if wide else _MAX_ROUNDINGS
    rows = -(-n_rows // max(chunks, 1))
    # Tiles of the matrix products are 128 rows high.
    return max(min(-(-rows // 128) * 128, n_rows), 1), wide


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, options: Options,
    want_dx: bool, want_dw: bool, want_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses of the rows [N], and dx, dW, db of their sum weighted by `scale` [N]; empty where not wanted."""
    (n_rows, hidden), vocabulary = x.shape, weight.shape[0]
    budget = _CPU_CHUNK_BYTES if x.device.type == "cpu" else _CHUNK_BYTES
    chunk, wide = chunk_plan(n_rows, vocabulary, hidden, x.itemsize, want_dw, budget)

    loss = x.new_empty(n_rows, dtype=accumulator(x.dtype))
    dx = torch.empty_like(x) if want_dx else x.new_empty(0)
    dw = x.new_empty(weight.shape if want_dw else 0, dtype=accumulator(x.dtype) if wide else None)
    db = x.new_zeros(vocabulary if want_db else 0, dtype=loss.dtype)
    buffer = x.new_empty(chunk, padded(vocabulary))
    for start in range(0, n_rows, chunk):
        x_chunk = x[start : start + chunk]
        part = slice(start, start + x_chunk.shape[0])
        z = buffer[: x_chunk.shape[0], :vocabulary]
        if bias is None:
            torch.mm(x_chunk, weight.t(), out=z)
        else:
            torch.addmm(bias, x_chunk, weight.t(), out=z)
        cross_entropy_rows(z, target[part], scale[part], loss[part], options, want_dx or want_dw or want_db)
        if want_dx:
            torch.mm(z, weight, out=dx[part])
        if want_dw:
            _add_product(dw, z.t(), x_chunk, first=start == 0)
        if want_db:
            db += z.sum(0, dtype=db.dtype)
    if n_rows == 0:
        dw.zero_()
    return loss, dx, dw.to(weight.dtype), db.to(weight.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b for the first product, total += a @ b after it; `total` may be wider than a and b."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=0 if first else 1, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total += a @ b


_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    "int ignore_index, float label_smoothing, float z_loss, float softcap, bool want_dx, bool want_dw, bool want_db"
)


def _empty_gradients(
    x: Tensor, weight: Tensor, want_dx: bool, want_dw: bool, want_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x) if want_dx else x.new_empty(0),
        weight.new_empty(weight.shape if want_dw else 0),
        weight.new_empty(weight.shape[0] if want_db else 0),
    )


def _total(
    divisor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    want_dx: bool, want_dw: bool, want_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    # A divisor of fp64 would carry its dtype into the loss.
    divisor = divisor.to(accumulator(x.dtype))
    scale = divisor.reciprocal().expand(x.shape[0])
    loss, dx, dw, db = _run(x, weight, bias, target, scale, options, want_dx, want_dw, want_db)
    return loss.sum() / divisor, dx, dw, db


def _total_fake(divisor: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty((), dtype=accumulator(x.dtype)), *_empty_gradients(x, weight, *rest[-3:])


def _total_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *gradients = output
    # Without this, autograd would fill a zero dW as the incoming gradient of the dW that forward returned.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*gradients)
    ctx.save_for_backward(*gradients)
    ctx.wanted = inputs[-3:]
    ctx.n_inputs = len(inputs)


def _total_backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    _refuse_double_backward()
    nothing: tuple[None, ...] = (None,) * ctx.n_inputs
    if grad is None:
        return nothing
    dx, dw, db = (_scaled(t, grad) if want else None for t, want in zip(ctx.saved_tensors, ctx.wanted, strict=True))
    return None, dx, dw, db, *nothing[4:]


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError("linear_cross_entropy can be differentiated only once; leave out create_graph=True")


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor for a scalar on the device: in place, and without traffic for a factor of one, where that is safe.

    It is not when the graph is kept for another backward pass, nor while a compiler traces (x then is of a subclass).
    """
    if type(x) is not Tensor or torch._C._autograd._get_current_graph_task_keep_graph() or not takes_kernel(x):
        return x * factor
    block = 8192
    launch(multiply_kernel, (triton.cdiv(x.numel(), block),), x, factor, x.numel(), BLOCK=block, num_warps=8)
    return x


def _rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, *_: bool,
) -> Tensor:  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    scale = x.new_empty(1, dtype=accumulator(x.dtype)).expand(x.shape[0])
    return _run(x, weight, bias, target, scale, options, False, False, False)[0]


def _rows_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], dtype=accumulator(x.dtype))


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_double_backward()
    gradients: tuple[Tensor, ...] = _rows_bwd_op(grad, *ctx.saved_tensors, *ctx.options)
    return *(g if want else None for g, want in zip(gradients, ctx.options[-3:], strict=True)), *(None,) * 8


def _rows_bwd(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    want_dx: bool, want_dw: bool, want_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    return _run(x, weight, bias, target, grad, options, want_dx, want_dw, want_db)[1:]


def _rows_bwd_fake(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(x, weight, *rest[-3:])


_total_op = register(
    f"linear_cross_entropy(Tensor divisor, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _total, _total_fake, setup_context=_total_setup, backward=_total_backward,
)  # fmt: skip
_rows_bwd_op = register(
    f"linear_cross_entropy_rows_bwd(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", _rows_bwd, _rows_bwd_fake
)
_rows_op = register(
    f"linear_cross_entropy_rows({_ARGUMENTS}) -> Tensor",
    _rows, _rows_fake, setup_context=_rows_setup, backward=_rows_backward,
)  # fmt: skip


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Cross entropy of the logits `x @ weight.T + bias`, holding only a part of them at a time.

    Equivalent to::

        logits = F.linear(x, weight, bias).float()
        logits = softcap * torch.tanh(logits / softcap)                                             # with a softcap
        loss = F.cross_entropy(logits, target, reduction="none", ignore_index=ignore_index, label_smoothing=...)
        loss += z_loss * logits.logsumexp(-1).square() * (target != ignore_index)
        loss = loss.sum() / (num_items or (target != ignore_index).sum())                           # reduction="mean"

    The z-loss thus is averaged over the same rows, by the same divisor, as the cross entropy.

    The gradients for x, weight and bias are computed in the forward pass, those that are needed; one chunk of logits is
    all that is held beside them (about 512 MiB at most on a GPU, or a quarter of the rows where that saves an fp32 copy
    of the weight's gradient). With reduction="none" a row's incoming gradient is known only in the backward pass, which
    then computes the logits a second time; so it does in fp16, whose gradients would vanish without the loss scale that
    arrives with it. Double backward is not supported.

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], of x's dtype. Under autocast both are cast to its dtype.
        target: [...], int64, each in [0, V) or `ignore_index`. On a GPU another value turns the loss and its row's
            gradient to NaN; on a CPU it raises.
        bias: [V], of x's dtype.
        ignore_index: rows with this target have loss and gradient zero.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-partition function.
        softcap: logits are squashed into (-softcap, softcap).
        reduction: "mean", "sum" or "none".
        num_items: what "mean" divides by in place of the number of rows that are not ignored; a tensor is not read by
            the host.

    Returns:
        fp32 (fp64 for fp64), a scalar, or the shape of target for "none". The mean over no rows is NaN, as in PyTorch,
        with zero gradients; the sum is 0.

    Raises:
        ValueError: a shape, dtype or option does not fit.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_cross_entropy(x, weight, torch.randint(32, (2, 8))).backward()
    """
    _check(x, weight, target, bias, label_smoothing, softcap, reduction, num_items)
    device = x.device.type
    # Meta tensors have no autocast, and torch.amp.is_autocast_available cannot be traced by torch 2.11.
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    _check_dtypes(x, weight, bias)

    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1).contiguous()
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (rows, weight, bias)]
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), *wanted)
    # A probability divided by the number of rows is below what fp16 holds, until the loss scale multiplies it: that is
    # known in the backward pass.
    if reduction == "none" or rows.dtype == torch.float16:
        losses: Tensor = _rows_op(rows, weight, bias, labels, *options)
        if reduction == "none":
            return losses.view(target.shape)
        return losses.sum() / _divisor(labels, reduction, ignore_index, num_items).to(losses.dtype)
    divisor = _divisor(labels, reduction, ignore_index, num_items)
    loss: Tensor = _total_op(divisor, rows, weight, bias, labels, *options)[0]
    return loss


def _divisor(target: Tensor, reduction: Reduction, ignore_index: int, num_items: int | Tensor | None) -> Tensor:
    """What the sum of the rows' losses is divided by: a scalar on the device, made without waiting for it."""
    if reduction == "sum":
        return torch.ones((), device=target.device)
    if num_items is None:
        return (target != ignore_index).sum()
    if isinstance(num_items, Tensor):
        return num_items.detach().to(target.device, non_blocking=True).reshape(())
    return torch.full((), num_items, dtype=torch.float32, device=target.device)


def _check(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    label_smoothing: float, softcap: float | None, reduction: str, num_items: int | Tensor | None,
) -> None:  # fmt: skip
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {describe(x)} and weight {describe(weight)} must be [..., H] and [V, H] with the same H")
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(f"target {describe(target)} must be int64 {list(x.shape[:-1])}, the leading shape of x")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {describe(bias)} must be [{weight.shape[0]}], one value per row of weight")
    tensors = [t for t in (x, weight, target, bias) if t is not None]
    if any(t.device != x.device for t in tensors):
        devices = ", ".join(str(t.device) for t in tensors)
        raise ValueError(f"x, weight, target and bias must be on one device, not {devices}")
    if weight.numel() == 0:
        raise ValueError(f"weight {describe(weight)} must have at least one class and one feature")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} must be between 0 and 1")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap {softcap} must be positive; leave it out for none")
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction {reduction!r} must be one of {', '.join(get_args(Reduction))}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items is the divisor of reduction 'mean'; it contradicts reduction {reduction!r}")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items {describe(num_items)} must have one element")


def _check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    given = [t for t in (x, weight, bias) if t is not None]
    if not has_dtype(x) or any(t.dtype != x.dtype for t in given):
        raise ValueError(
            f"x, weight and bias must have one dtype of {DTYPES}, not {', '.join(describe(t) for t in given)}"
        )
