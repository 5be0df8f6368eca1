"""The engine of losses over a linear head: logits are never in memory as a whole.

    logits = x Wᵀ + b        loss = f(logits)        dx = dlogits W        dW = dlogitsᵀ x        db = Σ_rows dlogits

A loss is a formula that takes some logits to numbers per row, and overwrites the logits by their gradient. What is
around it is here, once for all losses:

    head_pass              products by the vendor's library, and the three ways through the logits
    memory                 the size of chunks, where logits lie, how dW accumulates
    vocabulary_parallel    a vocabulary sharded over processes, DTensors
    head_arguments         checks and casts of the tensors that all losses have
"""
