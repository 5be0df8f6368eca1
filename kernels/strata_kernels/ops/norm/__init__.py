"""Normalization over the last axis: rms_norm, add_rms_norm and layer_norm, which share their kernels.

- `rms_norm`, `layer_norm`: the public functions, and the operators behind them.
- `host`: the launch tables, and the host functions that launch.
- `kernels`: the formulas and the Triton kernels.
- `reference`: shapes, dtypes and values in plain PyTorch.
"""
