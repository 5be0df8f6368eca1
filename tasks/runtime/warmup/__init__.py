"""Kernel warm-up: plan and compile a run's kernels before its first step, and keep kernels and graphs.

May import everything that builds a training step: `models`, `objectives`, `parallel` and what is below.
"""
