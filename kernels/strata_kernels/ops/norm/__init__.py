"""Normalization over the last axis: rms_norm, add_rms_norm and layer_norm, which share kernels, and modulated norms.

- `rms_norm`, `layer_norm`: the public functions, and the operators behind them.
- `modulated_norm`: modulated_rms_norm and modulated_layer_norm, their operator and its launch table.
- `modulated_norm_kernels`: its kernels.
- `norm_launch`: the launch tables, and the host functions that launch.
- `norm_kernels`: the formulas and the Triton kernels.
- `norm_reference`: shapes, dtypes and values in plain PyTorch.
"""
