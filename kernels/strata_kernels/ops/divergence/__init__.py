"""Divergences between a student's and a teacher's distribution over the vocabulary.

    p, q = softmax(z / T), softmax(t / T) of student and teacher          m = (1 - β) p + β q
    forward_kl  Σ q log(q / p)             reverse_kl  Σ p log(p / q)
    jsd         β Σ q log(q / m) + (1 - β) Σ p log(p / m)                 tvd  Σ |p - q| / 2

    dz = p (c - Σ p c) / T with c = dloss/dp: -q / p, log(p / q), (1 - β) log(p / m), sign(p - q) / 2

The generalized Jensen-Shannon divergence is that of GKD (Agarwal et al., arXiv:2306.13649), where β = 0 means
forward_kl and β = 1 reverse_kl. Axes: N rows, V vocabulary entries.

    divergence_kernel       the general kernel
    narrow_kernel           the kernel of 16-bit logits, except for tvd
    whole_row_kernels       kernels of distances without a softmax: cosine, tvd of probabilities
    divergence_rows         launch tables and host functions: kernel or reference
    divergence_reference    the same in plain PyTorch
    given_logits            the public functions kl_div, jsd and tvd of materialized logits or log-probabilities
"""
