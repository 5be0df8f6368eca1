"""Linear layers that multiply in FP8: casts with scales taken from the values, and products of what was cast.

`linear.py` has the layers, `cast.py` the operators, `cast_kernels.py` the kernels, `product.py` the products.
"""
