"""Strata under the import name of Liger-Kernel: `strata_kernels.compat.liger`, installed when this is imported."""

import sys
from importlib import import_module
from importlib.metadata import distributions

for _found in distributions(name="liger-kernel"):
    if "+strata" not in _found.version:
        raise ImportError(
            f"liger-kernel {_found.version} is installed in {_found.locate_file('')} beside Strata's in {__file__}, "
            "which has the same name; uninstall one of them"
        )

from strata_kernels.compat.liger import install  # noqa: E402

# What `import liger_kernel` gives is the module that the finder of `install` makes, in the place of this one.
del sys.modules[__name__]
install()
import_module(__name__)
