"""Cross entropy of logits that exist in memory.

    z    = softcap · tanh(logits / softcap)            lse = log Σ_v exp z_v        p = exp(z - lse)
    loss = a · lse - (1 - ε) w_target z_target - (ε / V) Σ_v w_v z_v + z_loss · lse²
    dz   = ((a + 2 · z_loss · lse) p - (1 - ε) w_target onehot(target) - (ε / V) w) · s · (1 - (z / softcap)²)

with ε the label smoothing, w the class weights (1 without), a = (1 - ε) w_target + (ε / V) Σ_v w_v the weight of lse,
and s the factor of a row's loss in the reduction. Sources: Szegedy et al. (label smoothing, arXiv:1512.00567), de
Brébisson and Vincent (z-loss, arXiv:1604.08859), Gemma 2 (softcap, arXiv:2408.00118); the gradient in the forward pass
is Liger-Kernel's idea (arXiv:2410.10989, section 3.2).

Axes: N rows, V vocabulary entries. A scalar loss is linear in its incoming gradient, so the forward pass also writes
the gradient while it has the logits at hand, and the backward pass multiplies it: 4 bytes of traffic per logit in bf16.
Without a reduction, the backward pass reads the logits again, and lse in two parts, the largest logit and the logarithm
of a sum: far from zero, their sum would lose the digits of p. Nothing accumulates with atomics: results repeat bit for
bit.

    kernels       the row kernel
    statistics    what the kernel computes per row, and the loss from it
    reference     the same in plain PyTorch
    rows          launch table and host functions: kernel or reference
    reduction     from the losses of rows to a scalar, and its incoming gradient
    operator      the operators of torch.library and the public functions
"""

from .operator import LossAndPredictions, cross_entropy, cross_entropy_with_predictions

__all__ = ["LossAndPredictions", "cross_entropy", "cross_entropy_with_predictions"]
