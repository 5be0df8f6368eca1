"""Cross entropy of a linear layer, in little more memory than its gradients take.

    z    = softcap · tanh((x Wᵀ + b) / softcap)        lse = log Σ_v exp z_v        p = exp(z - lse)
    loss = a · lse - (1 - ε) w_target z_target - (ε / V) Σ_v w_v z_v + z_loss · lse²
    dz   = ((a + 2 · z_loss · lse) p - (1 - ε) w_target onehot(target) - (ε / V) w) · s · (1 - (z / softcap)²)
    dx   = dz W          dW = dzᵀ x          db = Σ_rows dz

with ε the label smoothing, w the class weights (1 without), a = (1 - ε) w_target + (ε / V) Σ_v w_v the weight of lse,
and s the factor of a row's loss: its row weight over the divisor of the mean. Sources: the gradient in the forward pass
is Liger-Kernel's idea (arXiv:2410.10989, section 3.2); label smoothing Szegedy et al. (arXiv:1512.00567), z-loss de
Brébisson and Vincent (arXiv:1604.08859), softcap Gemma 2 (arXiv:2408.00118).

Axes: N rows, H features, V vocabulary entries. A matrix product computes logits, a kernel computes the losses and
overwrites the logits by dz, and two products give dx and dW: 6·N·H·V FLOPs (4·N·H·V without dW). Nothing is recomputed,
because a scalar loss is linear in its incoming gradient: the backward pass only multiplies by it. Nothing accumulates
with atomics: results repeat bit for bit.

    operator               the operators of torch.library and the public functions
    arguments              options, and the checks of arguments
    chunks                 the engine: products and the row kernel, some rows at a time
    memory                 the size of chunks, where logits lie, how dW accumulates
    vocabulary_parallel    a vocabulary sharded over processes, DTensors

The row kernel is that of `cross_entropy`, in `cross_entropy.kernels` behind the functions of `cross_entropy.rows`.
"""

from .operator import linear_cross_entropy, linear_cross_entropy_with_predictions

__all__ = ["linear_cross_entropy", "linear_cross_entropy_with_predictions"]
