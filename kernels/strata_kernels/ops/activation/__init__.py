"""Activations of feed-forward layers: swiglu, geglu and relu_squared, which share their kernels.

- `swiglu`, `geglu`, `relu_squared`: the public functions.
- `host`: the launch table, the host functions that launch, and the operators.
- `linear`: an activation and the projection after it, as one node of the autograd graph.
- `kernels`: the formulas and the Triton kernels.
- `reference`: values and gradients in plain PyTorch.
"""
