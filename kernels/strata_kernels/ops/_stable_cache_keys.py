"""Where in its file a kernel stands is no part of its key.

Triton's key of a kernel holds the line that it starts on, because debug information names it: a comment above a kernel,
or another kernel, would have it compiled anew by everybody who has it in an image or a store.
"""

from __future__ import annotations

import sys

from triton.runtime.jit import JITCallable


def leave_out_lines(package: str) -> None:
    """Let all functions for Triton in the loaded modules of `package` start on line 1, before their keys are taken.

    Up to Triton 3.6 debug information and profilers count lines from there, too; later ones name the real line, or that
    which the kernel had when it was compiled.
    """
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in vars(module).values():
                if isinstance(value, JITCallable) and value.__module__ == name:
                    value.starting_line_number = 1
