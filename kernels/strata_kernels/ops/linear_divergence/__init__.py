"""Divergences of an LM head from a teacher, given by hidden states and a head, or by top-k log-probabilities.

    z, t    = (x Wᵀ + b), (x' W'ᵀ + b') of student and teacher, with softcap; H and H' may differ
    loss    = Σ_rows divergence(softmax(z / T), softmax(t / T)) / divisor         dz: see `ops.divergence`
    dx      = dz W          dW = dzᵀ x          db = Σ_rows dz

Axes: N rows, H and H' features, V vocabulary entries. 2·N·H'·V FLOPs for the teacher and 6·N·H·V for the student
(4·N·H·V with a frozen head). Logits are computed in chunks of rows; the gradient overwrites the student's logits.

    row_divergences      the computation on a chunk of logits
    sharded_divergence   the same with a vocabulary sharded over processes
    counted_rows         the rows that are not ignored, and the arguments of operators
    summed_divergence    base class of the operators
    linear_jsd           linear_jsd, linear_kl_div, linear_cosine_distance: a teacher with a head
    linear_distillation  linear_distillation: labels and a teacher with a head
    linear_topk          linear_topk_kl_div: a teacher given by its top-k tokens
"""
