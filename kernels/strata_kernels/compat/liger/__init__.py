"""Drop-in replacement for Liger-Kernel 0.8.5: `import liger_kernel` gives its API over Strata's operators.

`install()` enables it in this process. For programs whose code you cannot change, install the distribution in
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
    """Make `import liger_kernel` import Strata in this process, even if Liger-Kernel is installed; idempotent.

    transformers, TRL and others check the metadata of `liger-kernel` before they use it: they find version 0.8.5.

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
    """Undo `install()`: new models are not patched, and `import liger_kernel` imports the installed package, if any.

    Patched models stay patched; `strata_kernels.unpatch_model` restores one.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in loaded():
        del sys.modules[name]
    if apply := sys.modules.get(f"{__name__}.apply"):
        apply.forget()
    _ask_again()


def _ask_again() -> None:
    """Clear transformers' cache of whether Liger-Kernel is available."""
    asked = sys.modules.get("transformers.utils.import_utils")
    if asked is not None:
        asked.is_liger_kernel_available.cache_clear()
