"""Losses of preference and policy optimization over a linear head: log-probabilities, then a small formula.

The heavy pass is `linear_logprobs`. The formulas are those of `strata_kernels.preference` and `strata_kernels.policy`:
plain PyTorch on a few numbers per token, through which autograd finds the coefficient of each row's gradient.

    linear_pairs     linear_preference: pairs of answers; linear_kto: single answers
    linear_policy    linear_grpo
"""
