"""Shared implementation of losses over an LM head, in little more memory than their gradients need.

    logits = x Wᵀ + b        loss = f(logits)        dx = dlogits W        dW = dlogitsᵀ x        db = Σ_rows dlogits

A loss (`RowLoss`, `PartLoss`) computes numbers per row from a block of logits, and overwrites the logits with their
gradient. Everything else is here:

    head_pass              matrix products (cuBLAS), and three loops over blocks of logits
    memory                 block sizes, buffers of logits, accumulation of dW
    vocabulary_parallel    vocabulary sharded over processes, DTensors
    head_arguments         checks and casts of the arguments that all losses have
"""
