"""Keep the results of some operators of a recomputed layer, and take them where the layer is recomputed.

`torch.utils.checkpoint` does so for the operators of a whole layer. There each operator takes the host longer, and a
last product that nobody needs is recomputed. Here the operators of some modules are watched, and the others run as they
do without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tasks.runtime.models.activation_offloading import OnHost

Kept = deque[tuple[str, Any]]
"""Names of operators, and their results."""


def name_of(operator: Any) -> str:
    """Such as `aten::mm`. Higher-order operators have a plain name instead of a schema."""
    name: str = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else operator.__name__
    return name


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
        kept: Kept = deque()
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
            with self._watch:
                return forward(*args, **kwargs)

        return run


class _Alias:
    """A result that stays where it is."""

    def __init__(self, x: Tensor) -> None:
        # Below autograd, an alias would count its changes alone.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._x = x.detach()
        self._version = self._x._version

    def to_device(self) -> Tensor:
        """It, as it was."""
        if self._x._version != self._version:
            raise ValueError(
                "training.gradient_checkpointing 'attention': a layer of this model changes in place what a product or "
                "attention has given it; set training.gradient_checkpointing to 'full'"
            )
        return self._x


class _Watch(TorchDispatchMode):
    # Such as flex attention.
    supports_higher_order_operators = True

    def __init__(self, names: frozenset[str], kept: Kept) -> None:
        super().__init__()
        self._names, self._kept = names, kept


class _Keep(_Watch):
    def __init__(self, names: frozenset[str], kept: Kept, to_host: Callable[[Tensor], OnHost] | None) -> None:
        super().__init__(names, kept)
        self._to_host = to_host

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        if (name := name_of(operator)) in self._names:
            self._kept.append((name, tree_map_only(Tensor, self._keep, found)))
        return found

    def _keep(self, x: Tensor) -> _Alias | OnHost:
        # Small ones, such as states of random generators, are not worth a copy. An alias, because autograd hangs its
        # graph on the tensor itself.
        large = self._to_host is not None and x.numel() >= _LEAST
        return self._to_host(x) if large and self._to_host is not None else _Alias(x)


class _Take(_Watch):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := name_of(operator)) not in self._names:
            return operator(*args, **(kwargs or {}))
        kept, found = self._kept.popleft()
        assert kept == name, f"a layer ran {name} where its forward pass had run {kept}"
        return tree_map_only((_Alias, OnHost), lambda x: x.to_device(), found)


# Elements of the smallest tensor that is copied to the host.
_LEAST = 2**16
