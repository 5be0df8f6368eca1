"""Imports the objects that a spec names, and digests their code.

A name is `module:Class`, or `entry-point:name` for a class that an installed package registers in the group
`strata.objectives`, `strata.formats` or `strata.callbacks`. Only what Python can import here is loaded: a spec cannot
bring code with it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ENTRY_POINT = "entry-point:"
_STRATA = ("tasks", "workflows", "strata_kernels", "strata_platform")
_LIBRARIES = tuple({Path(path).resolve() for path in map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})


def make_object(name: str, arguments: Mapping[str, Any], bases: tuple[type, ...], *, field: str, group: str) -> Any:
    """An object of the class `name`, called with `arguments`.

    field: the field of the spec that names it. group: of its entry point, such as `strata.formats`.

    Raises ValueError, which names the field, if it cannot be imported, is no class based on one of `bases`, or does not
    take the arguments.
    """
    where = f"{field} {name!r}"
    found = load_class(name, bases, field=field, group=group)
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(found).parameters) or "none"
        raise ValueError(
            f"{where}: {found.__name__} does not take these arguments: {error}; it takes: {takes}"
        ) from None
    try:
        return found(**arguments)
    except Exception as error:
        raise ValueError(f"{where}: {found.__name__}({_written(arguments)}) raised {_message_of(error)}") from error


def load_class(name: str, bases: tuple[type, ...], *, field: str, group: str) -> type[Any]:
    """The class of that name; see `make_object`."""
    where = f"{field} {name!r}"
    target = _registered(name, group, where) if name.startswith(ENTRY_POINT) else name
    module_name, _, attribute = target.partition(":")
    module = _imported(module_name, where)
    found = getattr(module, attribute, None)
    expected = " or ".join(f"{base.__module__.rpartition('.')[0]}.{base.__name__}" for base in bases)
    if found is None:
        classes = [each for each, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"{where}: {module_name} has no {attribute!r}{_suggestion(attribute, classes)}")
    if not (inspect.isclass(found) and issubclass(found, bases)):
        raise ValueError(f"{where} is not a class based on {expected}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ValueError(f"{where} lacks methods that {expected} asks for: {missing}")
    return found


def code_digest(cls: type) -> str:
    """The first 16 hex digits of the SHA-256 of the class's code: its module, and what that imports from beside it.

    Of an installed package only the package itself counts; of your own folder every module in it that is imported.
    """
    return _digest(cls.__module__, cls.__qualname__)


def digest_by_name(name: str, group: str) -> str:
    """The same of a class or function that is not imported here, `module:name` or an entry point of `group`."""
    target = _registered(name, group, repr(name)) if name.startswith(ENTRY_POINT) else name
    module, _, attribute = target.partition(":")
    return _digest(module, attribute)


def _digest(module: str, attribute: str) -> str:
    digest = hashlib.sha256()
    for name, file in sorted(_sources(module).items()):
        digest.update(f"{name}\n".encode() + file.read_bytes())
    digest.update(attribute.encode())
    return digest.hexdigest()[:16]


def _registered(name: str, group: str, where: str) -> str:
    known = {entry.name: entry.value for entry in entry_points(group=group)}
    wanted = name.removeprefix(ENTRY_POINT)
    if wanted not in known:
        installed = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"{where}: no installed package registers {wanted!r} in the group {group!r}; registered: {installed}"
            f"{_suggestion(wanted, known)}"
        )
    return known[wanted]


def _imported(name: str, where: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # A package of the name is missing, or the module itself imports what is not installed.
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(
                f"{where}: Python finds no module {error.name!r} here; install it, or add its folder to PYTHONPATH. On "
                "a cluster it must be in the image, or in the folder that --copy all sends"
            ) from None
        raise ValueError(f"{where}: importing {name} raised {_message_of(error)}") from error
    except Exception as error:
        raise ValueError(f"{where}: importing {name} raised {_message_of(error)}") from error


def _message_of(error: Exception) -> str:
    """The error in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f", in line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{at}"


def _written(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _suggestion(word: str, options: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(options), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@cache
def _sources(module: str) -> dict[str, Path]:
    """Files of a module, and of the modules beside it that it imports, directly or not, by name."""
    found: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        # Others are not looked for: that would import the packages above them.
        if name in found or not _is_sibling(name, module) or (file := _file_of(name)) is None:
            continue
        found[name] = file
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        left += _imports(file, package)
        # Importing a module runs the packages above it.
        left += [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    return found


def _file_of(name: str) -> Path | None:
    module, above = sys.modules.get(name), name.rpartition(".")[0]
    package = _file_of(above) if module is None and above else None
    if package is not None and package.name != "__init__.py":
        # A class in `from module import Class`. `find_spec` would import the module to find out.
        return None
    try:
        origin = getattr(module, "__file__", None) if module else getattr(find_spec(name), "origin", None)
    # A name that is no module, or one in a package whose own code, which runs here, raises any error.
    except Exception:
        return None
    return Path(origin) if origin and origin.endswith(".py") else None


def _is_sibling(name: str, module: str) -> bool:
    """Whether `name` is a module of the same package, or of the same folder if that is no folder of libraries."""
    top, own = name.partition(".")[0], module.partition(".")[0]
    if top == own or top in _STRATA:
        return top == own
    there, here = _root(top), _root(own)
    return there is not None and there == here and here not in _LIBRARIES


def _root(top: str) -> Path | None:
    """The folder that a top-level module or package lies in."""
    file = _file_of(top)
    if file is None:
        return None
    return (file.parent.parent if file.name == "__init__.py" else file.parent).resolve()


def _imports(file: Path, package: str) -> list[str]:
    """Names of what a file imports; some may be names of classes and functions."""
    names: list[str] = []
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        # Who imports it gets an error that says where.
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in names if name]
