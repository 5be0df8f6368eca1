"""What drives the training loop: one module per framework."""
