"""Divergences of a linear head from a teacher, by its hidden states and head or by its top-k log-probabilities.

    z, t    = (x Wᵀ + b), (x' W'ᵀ + b') of student and teacher, with softcap; their widths H and H' may differ
    loss    = Σ_rows divergence(softmax(z / T), softmax(t / T)) / divisor         dz: see `ops.divergence`
    dx      = dz W          dW = dzᵀ x          db = Σ_rows dz

Axes: N rows, H and H' features, V vocabulary entries. 2·N·H'·V FLOPs for the teacher and 6·N·H·V for the student, 4 of
them with a frozen head. Logits of some rows of both are in memory at a time; the gradient overwrites the student's.

    row_divergences     what a pass over the logits does for a divergence
    sharded_divergence  the same, where several processes hold the vocabulary
    counted_rows        the rows that count, and what operators take of them
    summed_divergence   what their operators share
    linear_jsd          linear_jsd, linear_kl_div, linear_cosine_distance: a teacher with a head
    linear_distillation  linear_distillation: labels and a teacher with a head
    linear_topk         linear_topk_kl_div: a teacher known by its likeliest tokens
"""
