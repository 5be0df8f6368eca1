"""Makes a kernel's cache key independent of its line number.

Triton's cache key of a kernel includes its first line number (`JITCallable.cache_key`, Triton 3.6 to 3.9). So a new
line above a kernel would invalidate every compiled copy of it in images and stores.
"""

from __future__ import annotations

import sys

from triton.runtime.jit import JITCallable


def omit_line_numbers(package: str) -> None:
    """Set the first line of all Triton functions in the loaded modules of `package` to 1, before keys are computed.

    After Triton 3.6, debug information and profilers use another attribute and show the line at compile time. Triton
    3.6 has only this attribute, so line numbers there are relative to the kernel.
    """
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in vars(module).values():
                if isinstance(value, JITCallable) and value.__module__ == name:
                    value.starting_line_number = 1
