"""How far from fp64 an operator may be."""

import torch
from torch import Tensor


def hold_to_bar(
    ours: Tensor, torchs: Tensor, exact: Tensor, *, truncated: bool = False, roundings: int = 1, terms: int = 1
) -> None:
    """Fail if `ours` is more than twice as far from `exact`, in fp64, as `torchs` at the same dtype.

    Distances are relative to the largest exact value, at the worst element and in the mean square. Where PyTorch is
    lucky, the exact result rounded once is as good as its; with more `roundings` on a value's way through both, as many
    last halves of a place are. `truncated` lets pass what Triton's interpreter truncates where a GPU rounds to bf16:
    twice the distance and two last places.

    `terms`: how many numbers a matrix product in fp32 adds up for a value. The library chooses their order by shape,
    processor and number of threads, for both sides another one; it costs about the square root of them in roundings.
    """
    assert ours.shape == exact.shape and ours.dtype == torchs.dtype and exact.dtype == torch.float64
    if exact.numel() == 0:
        return
    factor, floor = (4, torch.bfloat16) if truncated else (2, torch.float32)
    scale = exact.abs().max().clamp_min(torch.finfo(ours.dtype).tiny)
    rounded = exact.to(ours.dtype)
    # Only the worst element can be lucky: the mean square of many is not.
    several = roundings * torch.finfo(ours.dtype).eps / 2 if roundings > 1 else 0.0
    summed = 0.0
    if terms > 1 and ours.dtype == torch.float32:
        summed = terms**0.5 * torch.finfo(torch.float32).eps / 2
    norms = ((lambda error: error.abs().max(), several), (lambda error: error.square().mean().sqrt(), 0.0))
    for norm, free in norms:
        mine, theirs, once = (float(norm((x.double() - exact) / scale)) for x in (ours, torchs, rounded))
        lucky = max(once, free)
        bar = max(factor * theirs, lucky) + 2 * torch.finfo(floor).eps + summed
        assert mine <= bar, f"{mine:.3e} from fp64, PyTorch {theirs:.3e}, rounded once {once:.3e}"
