"""Cache of the proofs of `discover`, in memory and on disk.

The key is a digest of the code of the module's class, its bases and the functions they call in transformers' models,
losses and activations, of the module's attributes and sizes, the sources of this package, the versions of Python,
PyTorch and transformers, and of whether Triton's interpreter is used. So changed code, also a function that was
monkey-patched in this process, needs a new proof; for PyTorch and the rest of transformers, only the version counts.
Proofs of classes from elsewhere, such as custom code of the Hub, are not cached.

On disk, proofs are small JSON files in a hidden folder of Triton's cache directory. If a file cannot be read or
written, the proof is repeated.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from triton import knobs

from ..files import source_hash, write_atomically
from .small_copy import INTERNALS, NotEqual
from .structure import original_class
from .table import Experts, Head, Mlp, Norm, Recipe, Rope

_log = logging.getLogger(__name__)

_FOLDER = ".strata-proofs"
_PACKAGE = Path(__file__).parents[1]
_RECIPES: dict[str, type[Any]] = {cls.__name__: cls for cls in (Norm, Mlp, Experts, Rope, Head)}
# Packages whose version represents their code. Parts of transformers that users edit or replace are read.
_RELEASED = frozenset({"torch", "transformers", *sys.stdlib_module_names})
_READ = ("transformers.models.", "transformers.loss.", "transformers.activations")
# Attributes of modules that do not affect a proof: layer index and storage format of weights.
PLACES = frozenset({"layer_idx", "restore_weight"})

_known: dict[str, Recipe | NotEqual] = {}


class _Foreign(Exception):
    """A value or code that has no stable identity across processes."""


def digest_of(operator: str, module: nn.Module, model: nn.Module) -> str | None:
    """Key of the proof that `module`, part of `model`, equals `operator`; None if it cannot be cached."""
    reader = _Reader()
    try:
        reader.module(module)
        for child in module.children():
            # Replacements of linear layers are replaced by nn.Linear in a proof.
            if not hasattr(child, "in_features"):
                reader.cls(original_class(child))
        if operator == "rope":
            for part in model.modules():
                if "Rotary" in original_class(part).__name__:
                    reader.module(part)
        if operator == "linear_cross_entropy":
            reader.value("loss", module.loss_function)
    except _Foreign as reason:
        _log.debug("%s: the proof of %s is not kept: %s", type(module).__name__, operator, reason)
        return None
    versions = (sys.version, torch.__version__, import_module("transformers").__version__, source_hash(_PACKAGE))
    # The interpreter rounds differently.
    interpreted = str(bool(knobs.runtime.interpret))
    return sha256("\n".join((operator, *versions, interpreted, *reader.lines)).encode()).hexdigest()


def recall(digest: str) -> Recipe | NotEqual | None:
    """The cached result of a proof, or None."""
    if digest not in _known:
        try:
            _known[digest] = _from_json(json.loads(_file(digest).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            _log.debug("%s is proven again: %s", _file(digest), error)
            return None
    return _known[digest]


def keep(digest: str, result: Recipe | NotEqual) -> None:
    """Cache the result of a proof, also on disk if the folder is writable."""
    _known[digest] = result
    path = _file(digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_to_json(result)).encode())
    except OSError as error:
        _log.debug("%s is not written: %s", path, error)


def _file(digest: str) -> Path:
    return Path(knobs.cache.dir, _FOLDER, f"{digest}.json")


def _to_json(result: Recipe | NotEqual) -> dict[str, Any]:
    if isinstance(result, NotEqual):
        return {"kept": str(result)}
    fields = asdict(result)
    if isinstance(result, Head) and result.output is not None:
        fields["output"] = [result.output.__module__, result.output.__name__]
    return {"recipe": type(result).__name__, "fields": fields}


def _from_json(text: dict[str, Any]) -> Recipe | NotEqual:
    if "kept" in text:
        return NotEqual(text["kept"])
    fields = dict(text["fields"])
    if "functions" in fields:
        fields["functions"] = tuple((name, kind) for name, kind in fields["functions"])
    if fields.get("output") is not None:
        module, name = fields["output"]
        if not module.startswith("transformers."):
            raise ValueError(f"{module} is not a module of transformers")
        fields["output"] = getattr(import_module(module), name)
    recipe: Recipe = _RECIPES[text["recipe"]](**fields)
    return recipe


class _Reader:
    """Serializes modules, classes and functions to lines that are equal in every process."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seen: set[int] = set()

    def module(self, module: nn.Module) -> None:
        """Add a module: class, attributes, sizes of weights, and repr of its children."""
        self.cls(original_class(module))
        attributes = {name: value for name, value in vars(module).items() if name not in INTERNALS | PLACES}
        for name in sorted(attributes):
            self.value(name, attributes[name])
        for kind, tensors in (("weight", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                self.lines.append(f"{kind} {name} {None if tensor is None else list(tensor.shape)}")
        children = repr(module._modules)
        if " at 0x" in children:
            raise _Foreign("a child prints its address")
        self.lines.append(children)

    def cls(self, cls: type) -> None:
        """Add the code of a class and its bases."""
        for base in cls.__mro__:
            self.lines.append(f"class {base.__module__}.{base.__qualname__}")
            if not _is_read(base.__module__) or id(base) in self._seen:
                continue
            self._seen.add(id(base))
            for name, value in sorted(vars(base).items()):
                inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(inner, FunctionType | type) or _is_plain(inner):
                    self.value(name, inner)

    def value(self, name: str, value: Any) -> None:
        """Add a function's code, or any other value."""
        if isinstance(value, FunctionType):
            self.lines.append(name)
            self._function(value)
        elif isinstance(value, type):
            self.lines.append(f"{name} class {value.__module__}.{value.__qualname__}")
        elif _is_plain(value):
            self.lines.append(f"{name} {value!r}")
        elif isinstance(value, tuple | list | set | frozenset):
            self.lines.append(f"{name} {type(value).__name__} {len(value)}")
            ordered = value if isinstance(value, tuple | list) else sorted(value, key=repr)
            for number, item in enumerate(ordered):
                self.value(str(number), item)
        elif isinstance(value, dict):
            self.lines.append(f"{name} dict {len(value)}")
            for key in sorted(value, key=repr):
                self.value(repr(key), value[key])
        elif callable(getattr(value, "to_dict", None)):
            # A configuration, without the path of the model.
            fields = {k: v for k, v in value.to_dict().items() if k not in ("_name_or_path", "name_or_path")}
            self.value(f"{name} {type(value).__name__}", fields)
        else:
            raise _Foreign(f"{name} is a {type(value).__name__}")

    def _function(self, function: FunctionType) -> None:
        """Add the code of a function and of the global functions that it calls."""
        home = function.__globals__.get("__name__", "")
        self.lines.append(f"def {home}.{function.__qualname__}")
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        inside = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        for value in (getattr(function, "__wrapped__", None), *inside):
            if isinstance(value, FunctionType):
                self._function(value)
        if _is_read(home):
            # Including non-function values of a closure.
            for value in (*inside, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self.lines.append(repr(value) if _is_plain(value) else type(value).__qualname__)
            self._code(function.__code__, function.__globals__)

    def _code(self, code: CodeType, names: dict[str, Any]) -> None:
        self.lines.append(f"{code.co_code.hex()} {code.co_names} {code.co_varnames}")
        for value in code.co_consts:
            if isinstance(value, CodeType):
                self._code(value, names)
            else:
                self.lines.append(repr(sorted(value, key=repr) if isinstance(value, frozenset) else value))
        for name in code.co_names:
            value = names.get(name)
            if isinstance(value, FunctionType | type) or _is_plain(value):
                self.value(name, value)


def _is_read(home: str) -> bool:
    """Whether to add the code of a Python module; False if its package's version represents it."""
    if home.startswith(_READ):
        return True
    if home.partition(".")[0] not in _RELEASED:
        raise _Foreign(f"{home} has a part in it")
    return False


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device)
