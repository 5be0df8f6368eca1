"""Faults of machines: the health check before training, and advice after running out of memory."""
