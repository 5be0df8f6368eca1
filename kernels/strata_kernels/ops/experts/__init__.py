"""Mixtures of experts.

`experts.py` has the function and its operators, `experts_arguments.py` what it takes, `experts_launch.py` the tile
sizes and the launches, `product_kernels.py` the formulas and the grouped products, `routing_kernels.py` the sort by
expert, `row_kernels.py` the gate and the sums, and `experts_reference.py` the same in plain PyTorch.
"""
