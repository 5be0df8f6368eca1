"""Keep the results of some operators of a recomputed layer, and take them where the layer is recomputed.

`torch.utils.checkpoint` does so for the operators of a whole layer. There each operator takes the host longer, and a
last product that nobody needs is recomputed. Here the operators of some modules are watched, and the others run as they
do without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tasks.runtime.models.activations.activation_offloading import OnHost

# Elements of the smallest tensor that is copied to the host.
_LEAST = 2**16


def name_of(operator: Any) -> str:
    """Such as `aten::mm`. Higher-order operators have a plain name instead of a schema."""
    name: str = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else operator.__name__
    return name


def draws_dropout(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws the numbers of a dropout of its own, as attention does. If it were kept, the dropout
    after it would get other masks in recomputation, where nothing is drawn for it.
    """
    schema = getattr(operator, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return False


class KeptOperators:
    """The operators with these names that run inside `modules` of one layer."""

    def __init__(
        self, names: frozenset[str], modules: Iterable[nn.Module], to_host: Callable[[Tensor], OnHost] | None = None
    ) -> None:
        """to_host: how results are kept in host memory; None where they stay."""
        self._names, self._to_host = names, to_host
        self._watch: AbstractContextManager[Any] = nullcontext()
        for module in modules:
            module.forward = self._watched(module.forward)  # type: ignore[method-assign]

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """A `context_fn` of `checkpoint`: what the forward pass runs in, and its recomputation."""
        kept = _Kept()
        return self._watching(_Keep(self._names, kept, self._to_host)), self._watching(_Take(self._names, kept))

    @contextmanager
    def _watching(self, watch: AbstractContextManager[Any]) -> Iterator[None]:
        before, self._watch = self._watch, watch
        try:
            yield
        finally:
            self._watch = before

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            watch = self._watch
            with watch:
                found = forward(*args, **kwargs)
            if isinstance(watch, _Keep):
                watch.note_returned(found)
            return found

        return run


class _Alias:
    """A tensor that stays where it is."""

    def __init__(self, x: Tensor) -> None:
        # Below autograd, an alias would count its changes alone.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._x = x.detach()
        self._version = self._x._version

    def to_device(self) -> Tensor:
        """It, as it was."""
        if self._x._version != self._version:
            raise _changed()
        return self._x


class _Kept:
    """What a forward pass keeps.

    results: names of operators, and their results.
    storages: of the results, by address. They are not kept alive, and their addresses are not used again meanwhile.
    returned: of the modules, tensors with such storages: a view need not count the changes of what it is a view of.
    """

    def __init__(self) -> None:
        self.results: deque[tuple[str, Any]] = deque()
        self.storages: dict[int, StorageWeakRef] = {}
        self.returned: list[_Alias] = []

    def has(self, x: Tensor) -> bool:
        """Whether `x` has the storage of a result."""
        return x.untyped_storage()._cdata in self.storages


class _Watch(TorchDispatchMode):
    # Such as flex attention.
    supports_higher_order_operators = True

    def __init__(self, names: frozenset[str], kept: _Kept) -> None:
        super().__init__()
        self._names, self._kept = names, kept


class _Keep(_Watch):
    def __init__(self, names: frozenset[str], kept: _Kept, to_host: Callable[[Tensor], OnHost] | None) -> None:
        super().__init__(names, kept)
        self._to_host = to_host

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(self._kept.has(x) for x in _written(operator, args, kwargs or {})):
            raise _changed()
        found = operator(*args, **(kwargs or {}))
        if (name := name_of(operator)) in self._names and not draws_dropout(operator, args, kwargs or {}):
            self._kept.results.append((name, tree_map_only(Tensor, self._keep, found)))
        return found

    def note_returned(self, found: Any) -> None:
        """Note what a module has returned, which the layer must not change."""
        if self._to_host is None:
            tensors = [x for x in tree_leaves(found) if isinstance(x, Tensor) and self._kept.has(x)]
            self._kept.returned.extend(map(_Alias, tensors))

    def _keep(self, x: Tensor) -> _Alias | OnHost:
        storage = StorageWeakRef(x.untyped_storage())
        self._kept.storages[storage.cdata] = storage
        # Small ones, such as states of random generators, are not worth a copy. An alias, because autograd hangs its
        # graph on the tensor itself.
        return _Alias(x) if self._to_host is None or x.numel() < _LEAST else self._to_host(x)


class _Take(_Watch):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := name_of(operator)) not in self._names or draws_dropout(operator, args, kwargs or {}):
            return operator(*args, **(kwargs or {}))
        for x in self._kept.returned:
            x.to_device()
        kept, found = self._kept.results.popleft() if self._kept.results else ("nothing more", None)
        if kept != name:
            raise ValueError(
                f"training.gradient_checkpointing 'attention': a layer of this model ran {name} where its forward pass "
                f"had run {kept}; set training.gradient_checkpointing to 'full'"
            )
        return tree_map_only((_Alias, OnHost), lambda x: x.to_device(), found)


def _written(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))


def _changed() -> ValueError:
    return ValueError(
        "training.gradient_checkpointing 'attention': a layer of this model changes in place what a product or "
        "attention has given it; set training.gradient_checkpointing to 'full'"
    )
