"""Activations of feed-forward layers, gated and ungated; all share one pair of kernels.

- `swiglu`, `geglu`, `gelu`, `silu`, `relu_squared`: the public functions.
- `activation_operators`: launch table, host functions, operators.
- `activation_linear`: an activation and the following projection as one autograd node.
- `tiled_mlp`: a gated feed-forward layer, computed in tiles of rows.
- `activation_kernels`: the formulas and the Triton kernels.
- `activation_reference`: values and gradients in plain PyTorch.
"""
