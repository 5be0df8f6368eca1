"""The finder on `sys.meta_path` for modules and metadata of `liger_kernel`."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .surface import PROVIDED, VERSION, instead_of

NAME = "liger_kernel"
_log = logging.getLogger(__name__)


class Finder(DistributionFinder, Loader):
    """Finds the modules of `surface`, and for `importlib.metadata` the version of liger-kernel."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is provided.

        Raises:
            ImportError: Liger has the module, but Strata does not provide it.
        """
        root, _, name = fullname.partition(".")
        if root != NAME:
            return None
        if name in PROVIDED:
            package = any(other.startswith(f"{name}.") for other in PROVIDED) or not name
            return ModuleSpec(fullname, self, origin=__file__, is_package=package)
        if instead := instead_of(name):
            raise _not_provided(fullname, instead)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module; names are resolved at first access."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set `__getattr__` and names of the module."""
        path = module.__name__.partition(".")[2]
        names = PROVIDED[path]

        def get(name: str) -> Any:
            if name in names:
                value = getattr(import_module(f"{__package__}.{names[name]}"), name)
                vars(module)[name] = value
                return value
            if f"{path}.{name}".lstrip(".") in PROVIDED:
                # As in Liger, packages provide their submodules as attributes.
                return import_module(f"{module.__name__}.{name}")
            if instead := instead_of(f"{path}.{name}".lstrip(".")):
                raise _not_provided(f"{module.__name__}.{name}", instead)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__doc__ = f"Strata under the name of Liger-Kernel's {module.__name__}."
        module.__file__ = __file__
        vars(module).update(__version__=VERSION, __getattr__=get, __all__=list(names), __dir__=lambda: list(names))

    def find_distributions(self, context: Any = DistributionFinder.Context()) -> Iterable[Distribution]:  # noqa: B008
        """The metadata of liger-kernel, if requested."""
        if context.name is None or re.sub(r"[-_.]+", "_", context.name).lower() == NAME:
            yield _Metadata()


class _Module(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in PROVIDED[self.__name__.partition(".")[2]]:
            _log.warning("%s.%s was replaced; models that Strata patches do not call it", self.__name__, name)


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
            "top_level.txt": f"{NAME}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


def _not_provided(name: str, instead: str) -> ImportError:
    return ImportError(f"Strata provides no {name}; use {instead}", name=name)


def loaded() -> list[str]:
    """The modules in `sys.modules` that the finder created."""
    ours = [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]
    return [name for name in ours if isinstance(getattr(sys.modules[name].__spec__, "loader", None), Finder)]
