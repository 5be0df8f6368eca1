"""What is trained: the model, how it is configured, built and loaded; adapters, attention, media and activations.

May import `process`, `run_folder`, `data` and `checkpoint`.
"""
