"""`python -m tasks.runtime SPEC` with every layer in FP8 that FP8 has, also where it is not faster.

    PYTHONPATH=kernels:platform:. python -m benchmarks.every_layer_in_float8 SPEC

Layers are chosen by measured time otherwise, and processes beside each other on one GPU would choose by chance.
"""

from __future__ import annotations

import runpy

from tasks.runtime.models import float8


def measure_no_layer() -> None:
    """Let no layer of this process be exact because FP8 is slower."""
    float8._slow_layers = lambda *_: []  # type: ignore[assignment]


if __name__ == "__main__":
    measure_no_layer()
    runpy.run_module("tasks.runtime", run_name="__main__", alter_sys=True)
