"""Normalization over the last axis: rms_norm, add_rms_norm and layer_norm, which share their kernels.

- `rms_norm`, `layer_norm`: the public functions, and the operators behind them.
- `norm_launch`: the launch tables, and the host functions that launch.
- `norm_kernels`: the formulas and the Triton kernels.
- `norm_reference`: shapes, dtypes and values in plain PyTorch.
"""
