"""LoRA adapters: how they start, run as fused operators and are stored, and the 4-bit weights under them."""
