"""Kernel warm-up: what a run compiles before its first step, and where compiled kernels and graphs are kept.

May import everything that builds a training step: `models`, `objectives`, `parallel` and what is below.
"""
