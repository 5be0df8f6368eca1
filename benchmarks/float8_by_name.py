"""`python -m tasks.runtime SPEC` with every layer in FP8, also where that is not faster, but for those you name.

    PYTHONPATH=kernels:platform:. python -m benchmarks.float8_by_name SPEC [k_proj model.layers.0.mlp.down_proj ...]

Layers are chosen by measured time otherwise, and processes beside each other on one GPU would choose by chance.
"""

from __future__ import annotations

import runpy
import sys

from tasks.runtime.models import float8


def keep_exact(*names: str) -> None:
    """Let layers of this process be exact whose path ends with one of `names`, and no other because of its speed."""
    float8._slow_layers = lambda layers, *_: [path for path in layers if path.endswith(names)]


if __name__ == "__main__":
    keep_exact(*sys.argv[2:])
    del sys.argv[2:]
    runpy.run_module("tasks.runtime", run_name="__main__", alter_sys=True)
