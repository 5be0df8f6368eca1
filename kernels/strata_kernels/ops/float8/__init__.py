"""Linear layers with FP8 matrix products: casts with dynamic scales, and products of FP8 matrices.

Layers: `linear.py`. Cast operators: `cast.py`. Cast kernels: `cast_kernels.py`. Matrix products: `product.py`.
"""
