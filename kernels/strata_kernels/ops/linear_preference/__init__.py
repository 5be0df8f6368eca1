"""Losses of preference and policy optimization over an LM head.

`linear_logprobs` computes log-probabilities of tokens. The losses are functions of `strata_kernels.preference` and
`strata_kernels.policy`: plain PyTorch on a few numbers per token, differentiated by autograd.

    linear_pairs     linear_preference: pairs of answers; linear_kto: single answers
    linear_policy    linear_grpo
"""
