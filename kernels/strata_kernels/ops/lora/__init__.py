"""Linear layers with a frozen weight and a low-rank adapter (LoRA).

Layers: `lora_linear.py`, `gated_layer.py`. Products with frozen weights: `frozen_weight.py`.
"""
