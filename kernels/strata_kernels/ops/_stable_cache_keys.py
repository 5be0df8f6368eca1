"""A kernel's cache key does not depend on the line that the kernel stands on.

Triton's key of a kernel ends with the number of its first line (`JITCallable.cache_key`, Triton 3.6 to 3.9). So with a
comment above a kernel, or one more kernel in its file, everybody who has it in an image or a store would compile it
again.
"""

from __future__ import annotations

import sys

from triton.runtime.jit import JITCallable


def omit_line_numbers(package: str) -> None:
    """Let all Triton functions in the loaded modules of `package` start on line 1, before their keys are taken.

    After Triton 3.6, debug information and profilers read another attribute and name the real line, or the one that the
    kernel had when it was compiled. Triton 3.6 has only this attribute, so there they count from the top of the kernel.
    """
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in vars(module).values():
                if isinstance(value, JITCallable) and value.__module__ == name:
                    value.starting_line_number = 1
