"""Mixtures of experts.

- `experts`: the public function and its operators.
- `experts_arguments`: types and checks of its arguments.
- `experts_launch`: tile sizes and launches.
- `product_kernels`: formulas and grouped matrix products.
- `routing_kernels`: sort of tokens by expert.
- `row_kernels`: gate, sums over a token's experts, bias gradients.
- `experts_reference`: the same in plain PyTorch.
"""
