"""selective_log_softmax: log-probabilities of selected classes, without storing those of all.

    lse = log Σ_v exp z_v          y_k = z_{index_k} - lse          dz = Σ_k g_k (onehot(index_k) - p)

Axes: N rows, V classes, K selected classes per row. The row kernel is that of `cross_entropy`: one read of the logits
in forward, one read and one write in backward. The forward pass also gathers the selected logits. The backward kernel
stores -p Σ_k g_k for all classes; the elements of the selected classes are then overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._launch import DTYPES, accumulator, describe, has_dtype
from .._operator import Operator, is_transformed, operator, refuse_double_backward
from .row_statistics import Options
from .rows import cross_entropy_gradient, cross_entropy_rows, rows_of

# ignore_index -1 matches no class.
_OPTIONS = Options(ignore_index=-1, label_smoothing=0.0, z_loss=0.0, softcap=0.0)


def _options(temperature: float) -> Options:
    return Options(_OPTIONS.ignore_index, 0.0, 0.0, 0.0, temperature)


@operator(
    "selective_log_softmax_bwd(Tensor grad, Tensor logits, Tensor index, Tensor result, Tensor largest, Tensor log_sum,"
    " float temperature) -> Tensor"
)
class _Backward(Operator):
    """dlogits."""

    @staticmethod
    def forward(
        grad: Tensor, logits: Tensor, index: Tensor, result: Tensor, largest: Tensor, log_sum: Tensor,
        temperature: float,
    ) -> Tensor:  # fmt: skip
        dlogits = logits.new_empty(logits.shape)
        flat, columns = dlogits.view(-1, logits.shape[-1]), index.reshape(-1, index.shape[-1])
        wide = grad.reshape(columns.shape).to(largest.dtype)
        total = wide.sum(1)
        rows = rows_of(logits)
        cross_entropy_gradient(
            rows, columns[:, 0].contiguous(), -total, largest, log_sum, None, _options(temperature),
            dz=dlogits.view(rows.shape), padding=False,
        )  # fmt: skip
        # A class that is selected twice gets the sum of both gradients.
        same = (columns[:, :, None] == columns[:, None, :]).to(wide.dtype)
        own = (same @ wide[:, :, None])[:, :, 0]
        flat.scatter_(
            1, columns, ((own - result.view(columns.shape).exp() * total[:, None]) / temperature).to(flat.dtype)
        )
        return dlogits

    @staticmethod
    def fake(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
        return logits.new_empty(logits.shape)


@operator("selective_log_softmax(Tensor logits, Tensor index, float temperature) -> (Tensor, Tensor, Tensor)")
class _Forward(Operator):
    """The log-probabilities, and the statistics of the rows for the backward operator."""

    @staticmethod
    def forward(logits: Tensor, index: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        result, largest, log_sum = _Forward.fake(logits, index, temperature)
        columns, rows = index.reshape(-1, index.shape[-1]), rows_of(logits)
        loss = torch.empty_like(largest)
        cross_entropy_rows(
            rows, columns[:, 0].contiguous(), None, loss, _options(temperature), False, largest=largest,
            log_sum=log_sum, padding=False,
        )  # fmt: skip
        own = logits.gather(-1, index).to(result.dtype) / temperature
        result.copy_(own - largest.view(index.shape[:-1])[..., None] - log_sum.view(index.shape[:-1])[..., None])
        return result, largest, log_sum

    @staticmethod
    def fake(logits: Tensor, index: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        dtype, n_rows = accumulator(logits.dtype), index[..., 0].numel()
        return tuple(logits.new_empty(shape, dtype=dtype) for shape in (index.shape, n_rows, n_rows))  # type: ignore

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output)
        ctx.temperature = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:
        refuse_double_backward("selective_log_softmax")
        found = None if grad is None else _Backward.apply(grad, *ctx.saved_tensors, ctx.temperature)
        return found, None, None


def selective_log_softmax(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the classes `index`, without materializing those of all classes.

    Equivalent to::

        log_p = (logits.float() / temperature).log_softmax(-1)
        log_p.gather(-1, index[..., None])[..., 0]                                          # index [...]
        log_p.gather(-1, index)                                                             # index [..., K]

    Double backward is not supported. Under `torch.func` transforms, it runs in plain PyTorch.

    Args:
        logits: [..., V], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        index: [...] or [..., K], int64, each in [0, V).
        temperature: divisor of the logits. A constexpr: each value compiles another kernel.

    Returns:
        Same shape as index, fp32 (fp64 for fp64).

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> logits = torch.randn(2, 8, 32, requires_grad=True)
        >>> selective_log_softmax(logits, torch.randint(32, (2, 8))).sum().backward()
    """
    if not has_dtype(logits) or logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be {DTYPES} of shape [..., V] with V > 0, got {describe(logits)}")
    if index.dtype != torch.int64 or index.shape[: logits.dim() - 1] != logits.shape[:-1] or index.dim() > logits.dim():
        raise ValueError(f"index {describe(index)} must be int64 [...] or [..., K] for logits {describe(logits)}")
    if not temperature > 0.0:
        raise ValueError(f"temperature {temperature} must be positive")
    columns = index if index.dim() == logits.dim() else index[..., None]
    if columns.shape[-1] == 0:
        raise ValueError(f"index {describe(index)} must select at least one class per row")
    if is_transformed():
        log_p = (logits.to(accumulator(logits.dtype)) / temperature).log_softmax(-1)
        return log_p.gather(-1, columns).view(index.shape)
    result: Tensor = _Forward.apply(logits, columns, float(temperature))[0]
    return result.view(index.shape)
