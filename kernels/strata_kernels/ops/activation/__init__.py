"""Activations of feed-forward layers, gated or not, which share their kernels.

- `swiglu`, `geglu`, `gelu`, `silu`, `relu_squared`: the public functions.
- `activation_operators`: the launch table, the host functions that launch, and the operators.
- `activation_linear`: an activation and the projection after it, as one node of the autograd graph.
- `tiled_mlp`: a whole gated layer that takes some rows at a time.
- `activation_kernels`: the formulas and the Triton kernels.
- `activation_reference`: values and gradients in plain PyTorch.
"""
