"""What is trained: the model, its LoRA adapter, quantization, activation checkpointing and varlen attention.

May import `process`, `run_folder`, `data` and `checkpoint`.
"""
