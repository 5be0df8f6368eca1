"""Every operator on more elements than 32 bits count, on a GPU, against PyTorch on the last rows alone.

`python -m tests.kernels.test_large_offsets` does the same without pytest and prints a line for each operator.
"""

import functools
import sys
import time
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import (
    add_rms_norm,
    cross_entropy,
    cross_entropy_with_predictions,
    geglu,
    geglu_packed,
    gelu,
    layer_norm,
    linear_cross_entropy,
    qk_norm_rope,
    relu_squared,
    rms_norm,
    rope,
    swiglu,
    swiglu_packed,
)
from tests.kernels.helpers.error_bound import hold_to_bar

EPS = 1e-5
# Rows that are compared.
LAST = 8
# What the largest case takes, GiB.
MEMORY = 60


@dataclass(frozen=True)
class Size:
    """How large the cases are: elements of their largest tensor, features, and the head's features and classes."""

    device: str
    dtype: torch.dtype
    elements: int
    width: int
    hidden: int
    classes: int
    head_classes: int

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


LARGE = Size("cuda", torch.bfloat16, 2**31, 4096, 4096, 300_000, 560_000)
# The same cases where there is no GPU, or little memory.
SMALL = Size("cpu", torch.float32, 2**14, 64, 16, 300, 560)
Function = Callable[..., Any]


def differentiate(function: Function, inputs: list[Tensor], incoming: list[Tensor]) -> list[Tensor]:
    """The results and all gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    return [*(y.detach() for y in results), *torch.autograd.grad(results, leaves, incoming)]


def compare(ours: list[Tensor], plain: Function, inputs: list[Tensor], incoming: list[Tensor]) -> None:
    """Hold what an operator gave for some rows to PyTorch's results and gradients for them."""
    theirs = differentiate(plain, inputs, incoming)
    exact = differentiate(plain, [x.double() for x in inputs], [x.double() for x in incoming])
    hold_all(ours, theirs, exact, len(incoming))


def hold_all(ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], results: int) -> None:
    """Hold results, then gradients, to the bar; say of all that are off where they are."""
    failures = []
    for i, (mine, other, true) in enumerate(zip(ours, theirs, exact, strict=True)):
        try:
            hold_to_bar(mine, other, true)
        except AssertionError as error:
            name = f"result {i}" if i < results else f"gradient {i - results}"
            failures.append(f"{name} {list(mine.shape)}: {error}; {by_row(mine, true)}")
    assert not failures, "\n  ".join(["", *failures])


def by_row(ours: Tensor, exact: Tensor) -> str:
    """The largest error and the largest absolute value of each row; of 16 blocks where there are more."""
    rows = exact.reshape(-1, exact.shape[-1]) if exact.dim() > 1 else exact.reshape(1, -1)
    error = (ours.double().reshape(rows.shape) - rows).abs() / exact.abs().max()
    parts = [x.amax(-1).tensor_split(min(16, len(rows))) for x in (error, ours.abs().reshape(rows.shape))]
    blocks = zip(*parts, strict=True)
    return "by rows, error (largest value): " + ", ".join(f"{e.max():.1e} ({y.max():.1e})" for e, y in blocks)


def by_rows(
    size: Size, ours: Function, plain: Function, widths: list[int], small: Sequence[Tensor] = (), results: int = 1,
    out: int = 0,
) -> None:  # fmt: skip
    """An operator on rows of these widths, then on small tensors like weights.

    Only the last rows have an incoming gradient, so that the gradients of what is small come from them, too.
    """
    n_rows = size.elements // min(widths) + LAST
    rows = [size.random(n_rows, width) for width in widths]
    shape = (n_rows, out or size.width)
    incoming = [torch.zeros(shape, device=size.device, dtype=size.dtype) for _ in range(results)]
    for x in incoming:
        x[-LAST:].normal_()
    found = differentiate(ours, [*rows, *small], incoming)
    for gradient in found[results : results + len(rows)]:
        assert not gradient[:LAST].any()
    last = [x[-LAST:] if x.shape[:1] == (n_rows,) else x for x in found]
    compare(last, plain, [*(x[-LAST:] for x in rows), *small], [x[-LAST:] for x in incoming])


def norms(size: Size, ours: Function, plain: Function, rows: int = 1, weights: int = 1) -> None:
    small = [size.random(size.width) for _ in range(weights)]
    by_rows(size, ours, plain, [size.width] * rows, small, results=rows)


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return torch_rms_norm(h, weight), h


def gated(activation: Function) -> Function:
    return lambda gate, up: activation(gate) * up


def halves(activation: Function) -> Function:
    return lambda x: gated(activation)(*x.chunk(2, dim=-1))


def projected(size: Size, features: int) -> None:
    """The backward kernel writes the activation's result, too."""
    weight = size.random(features, size.width) / 64
    by_rows(
        size, lambda gate, up, weight: swiglu(gate, up, weight=weight),
        lambda gate, up, weight: functional.linear(gated(functional.silu)(gate, up), weight),
        [size.width] * 2, [weight], out=features,
    )  # fmt: skip


def without_rows(size: Size, elements: int) -> None:
    """All elements are one row, whose length is no multiple of a vector."""
    x = size.random(elements)
    incoming = size.random(elements)
    last = slice(elements - 1001, elements)
    found = differentiate(relu_squared, [x], [incoming])
    compare([y[last] for y in found], lambda x: torch.relu(x).square(), [x[last]], [incoming[last]])


def rotated(size: Size, normalized: bool, batch: int) -> None:
    """Queries and keys in the layout of attention, one key head."""
    head, heads = size.width // 32, 32
    n_s = size.elements // (batch * size.width) + LAST
    memory = [size.random(batch, n_s, n, head) for n in (heads, 1)]
    weights = [size.random(head) for _ in range(2)] if normalized else []
    angle = torch.randn(n_s, head // 2, device=size.device)
    incoming = [torch.zeros_like(x) for x in memory]
    for x in incoming:
        x[-1, -LAST:].normal_()

    def ours(q: Tensor, k: Tensor, *weights: Tensor) -> Any:
        angles = angle.cos(), angle.sin()
        if normalized:
            return qk_norm_rope(q, k, *weights, *angles, rotary_dim=head, layout="bshd", eps=EPS, cast="gemma")
        return rope(q, k, *angles, rotary_dim=head, layout="bshd")

    def plain(q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (a[-LAST:, None].to(wide).repeat(1, 1, 2) for a in (angle.cos(), angle.sin()))

        def one(x: Tensor, weight: Tensor | None) -> Tensor:
            y = x if weight is None else torch_rms_norm(x, weight)
            first, second = y.to(wide).chunk(2, dim=-1)
            return (y * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

        return tuple(map(one, (q, k), weights or (None, None)))

    found = differentiate(ours, [*memory, *weights], incoming)
    last = [x[-1, -LAST:] if x.dim() > 1 else x for x in found]
    compare(last, plain, [*(x[-1, -LAST:] for x in memory), *weights], [x[-1, -LAST:] for x in incoming])


def losses(size: Size, classes: int, n_rows: int, **options: Any) -> None:
    """The gradient of a loss that is multiplied, so that the gradient made with it is, too."""
    logits = size.random(n_rows, classes)
    target = torch.randint(classes, (n_rows,), device=size.device)

    def plain(z: Tensor) -> Tensor:
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        return functional.cross_entropy(wide, target[-LAST:], reduction="none")

    kept, by_row = logits[-LAST:].clone(), options["reduction"] == "none"
    leaf = logits.detach().requires_grad_()
    loss = cross_entropy(leaf * 1 if options.get("reuse_logits") else leaf, target, **options)
    incoming = torch.full_like(loss, 4.0)
    if by_row:
        incoming[:-LAST] = 0.0
    (gradient,) = torch.autograd.grad(loss, leaf, incoming)
    assert bool(gradient[:LAST].any()) != by_row
    losses_of_last = loss.detach()[-LAST:] if by_row else cross_entropy(kept, target[-LAST:], reduction="none")
    compare([losses_of_last, gradient[-LAST:]], plain, [kept], [torch.full_like(losses_of_last, 4.0)])
    if not by_row:
        found = cross_entropy_with_predictions(logits, target, reduction="none")
        hold_to_bar(found.loss[-LAST:], plain(kept), plain(kept.double()))
        assert torch.equal(found.predictions[-LAST:], kept.argmax(-1))


def head_losses(size: Size, reduction: str, chunk_elements: int) -> None:
    """All classes, with the logits of many rows in one chunk, or in the memory of the weight's gradient."""
    n_rows = size.elements // size.head_classes + LAST
    x, weight = size.random(n_rows, size.hidden), size.random(size.head_classes, size.hidden) / size.hidden**0.5
    target = torch.full((n_rows,), -100, device=size.device)
    target[-LAST:] = torch.arange(size.head_classes - LAST, size.head_classes, device=size.device)
    incoming = torch.ones(n_rows if reduction == "none" else (), device=size.device)
    options: dict[str, Any] = {"reduction": reduction, "chunk_bytes": chunk_elements * x.itemsize}
    loss, dx, dw = differentiate(
        lambda x, w: linear_cross_entropy(x, w, target, **options), [x, weight], [incoming]
    )  # fmt: skip
    assert not dx[:LAST].any()

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return functional.cross_entropy(functional.linear(x, weight).to(wide), target[-LAST:], reduction=reduction)

    incoming = incoming[-LAST:] if reduction == "none" else incoming
    theirs = differentiate(plain, [x[-LAST:], weight], [incoming])
    exact = differentiate(plain, [x[-LAST:].double(), weight.double()], [incoming.double()])
    # The first and the last classes: an fp64 copy of all would be larger than all else.
    ends = torch.tensor([*range(LAST), *range(size.head_classes - LAST, size.head_classes)], device=size.device)
    ours = [loss[-LAST:] if reduction == "none" else loss, dx[-LAST:], dw[ends]]
    hold_all(ours, [*theirs[:2], theirs[2][ends]], [*exact[:2], exact[2][ends]], 1)


def of_8192(size: Size) -> int:
    return size.elements // size.classes + 1034


# 2^31 - 8 logits: fewer than 2^31, but not by a program's share.
NEARLY, NEARLY_CLASSES = 2**31 - 8, 127 * 113
CASES: dict[str, Callable[[Size], None]] = {
    "rms_norm": lambda size: norms(size, functools.partial(rms_norm, eps=EPS, cast="gemma"), torch_rms_norm),
    "add_rms_norm": lambda size: norms(
        size, functools.partial(add_rms_norm, eps=EPS, cast="gemma"), torch_add_rms_norm, rows=2
    ),
    "layer_norm": lambda size: norms(
        size, functools.partial(layer_norm, eps=EPS), lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS),
        weights=2,
    ),
    "swiglu": lambda size: by_rows(size, swiglu, gated(functional.silu), [size.width] * 2),
    "swiglu_packed": lambda size: by_rows(size, swiglu_packed, halves(functional.silu), [2 * size.width]),
    "swiglu and projection": lambda size: projected(size, size.width),
    "swiglu and narrow projection": lambda size: projected(size, 16),
    "geglu": lambda size: by_rows(size, geglu, gated(functional.gelu), [size.width] * 2),
    "geglu_packed": lambda size: by_rows(size, geglu_packed, halves(functional.gelu), [2 * size.width]),
    "relu_squared": lambda size: by_rows(size, relu_squared, lambda x: torch.relu(x).square(), [size.width]),
    "gelu": lambda size: by_rows(size, gelu, functional.gelu, [size.width]),
    "relu_squared, one row": lambda size: without_rows(size, size.elements + 9),
    "relu_squared, nearly 2^31": lambda size: without_rows(size, size.elements - 5),
    "rope": lambda size: rotated(size, normalized=False, batch=4),
    "rope, one batch row": lambda size: rotated(size, normalized=False, batch=1),
    "qk_norm_rope": lambda size: rotated(size, normalized=True, batch=4),
    "cross_entropy": lambda size: losses(size, size.classes, of_8192(size), reduction="sum"),
    "cross_entropy, in place": lambda size: losses(
        size, size.classes, of_8192(size), reduction="sum", reuse_logits=True
    ),
    "cross_entropy of rows": lambda size: losses(size, size.classes, of_8192(size), reduction="none"),
    "cross_entropy, nearly 2^31": lambda size: losses(
        size, NEARLY_CLASSES, NEARLY * size.elements // 2**31 // NEARLY_CLASSES + (size is SMALL) * 2 * LAST,
        reduction="sum",
    ),
    "linear_cross_entropy": lambda size: head_losses(size, "sum", 2**20),
    "linear_cross_entropy, one chunk": lambda size: head_losses(size, "sum", 2**32),
    "linear_cross_entropy of rows": lambda size: head_losses(size, "none", 2**32),
}  # fmt: skip


def run_large(name: str) -> str:
    """Run a case beyond 32 bits; what it took, or why it was left out."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest("no GPU")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < MEMORY:
        raise unittest.SkipTest(f"{free:.0f} GiB of memory are free, {MEMORY} are needed")
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    CASES[name](LARGE)
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    return f"{seconds:.1f} s, {peak:.0f} GiB"


def pytest_generate_tests(metafunc: Any) -> None:
    """What `pytest.mark.parametrize` would do, if pytest could be imported everywhere."""
    metafunc.parametrize("name", CASES)


def test_beyond_32_bits(name) -> None:
    run_large(name)


def test_the_same_within_them(name) -> None:
    CASES[name](SMALL)


def main() -> int:
    failed = 0
    for name in CASES:
        try:
            said = run_large(name)
        except unittest.SkipTest as reason:
            said = f"skipped: {reason}"
        except Exception as error:  # The other operators are tested all the same.
            failed += 1
            said = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name}: {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
