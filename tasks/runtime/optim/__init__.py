"""Optimizers, their state tensors, and learning-rate schedules.

May import `process` only.
"""
