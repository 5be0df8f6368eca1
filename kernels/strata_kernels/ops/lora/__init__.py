"""Linear layers with a frozen weight and a low-rank adapter (LoRA).

`lora_linear.py` and `gated_layer.py` have the layers, `frozen_weight.py` the products with frozen weights.
"""
