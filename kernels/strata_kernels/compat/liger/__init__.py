"""Strata for programs that call Liger-Kernel: `import liger_kernel` gives the surface of Liger-Kernel 0.8.5.

`install()` does it in this process. Programs that you do not start yourself find it by the distribution in
`kernels/compat`, which has the import name `liger_kernel`.

Example:
    >>> from strata_kernels.compat.liger import install
    >>> install()
    >>> from liger_kernel.transformers import LigerRMSNorm
    >>> LigerRMSNorm(4)
    LigerRMSNorm(weight_shape=(4,), eps=1e-06, offset=0.0)
"""

from __future__ import annotations

import sys

from .finder import NAME, Finder, loaded
from .surface import VERSION

__all__ = ["VERSION", "install", "uninstall"]


def install() -> None:
    """Let `import liger_kernel` find Strata in this process, even if Liger-Kernel is installed; at most once.

    transformers, TRL and others ask for the metadata of `liger-kernel` before they use it: they get version 0.8.5.

    Raises:
        RuntimeError: Liger-Kernel itself has been imported.
    """
    if NAME in sys.modules and NAME not in loaded():
        where = getattr(sys.modules[NAME], "__file__", None)
        raise RuntimeError(f"{NAME} has been imported from {where}; call install() before anything imports it")
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        # Before the finders of installed packages.
        sys.meta_path.insert(0, Finder())
        _ask_again()


def uninstall() -> None:
    """Undo `install()`: models are built as transformers does again, and `liger_kernel` is what is installed.

    Models that are patched stay so; `strata_kernels.unpatch_model` restores one.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in loaded():
        del sys.modules[name]
    if apply := sys.modules.get(f"{__name__}.apply"):
        apply.forget()
    _ask_again()


def _ask_again() -> None:
    """transformers remembers whether Liger-Kernel was there when it asked first."""
    asked = sys.modules.get("transformers.utils.import_utils")
    if asked is not None:
        asked.is_liger_kernel_available.cache_clear()
