"""Declaration of operators, and the path of a call to the host function.

An operator is a class, registered under its schema in the `strata` namespace of PyTorch's dispatcher:

    @operator("scale(Tensor x, float factor) -> Tensor")
    class Scale(Operator):
        @staticmethod
        def forward(x, factor): ...                   # host function: choose kernel or reference, allocate, launch

        @staticmethod
        def fake(x, factor): ...                      # uninitialized outputs of forward

        @staticmethod
        def setup_context(ctx, inputs, output): ...   # save tensors for the backward pass

        @staticmethod
        def backward(ctx, dy): ...                    # call the backward operator, another class

    y = Scale.apply(x, 2.0)

Names and signatures are those of `torch.autograd.Function`; `fake` is what `torch.library.register_fake` takes.

A call goes through the dispatcher if torch.compile, torch.export, fake tensors, a dispatch mode (e.g. of selective
checkpointing), a `torch.func` transform or a Tensor subclass must intercept it. Otherwise it goes directly to the
autograd node and the launch cache, because the dispatcher reenters Python for each dispatch key, which takes longer
than a small operator's kernels.

`torch.library.custom_op` is not used: it supports the same, but an eager call costs more CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import function as torch_function

from ._launch import is_recording
from ._launch_cache import TENSOR_TYPES, cache_key, run_cached
from .recompute import note_results

_library = torch.library.Library("strata", "FRAGMENT")  # type: ignore[no-untyped-call]


class Operator:
    """The parts of an operator, as static methods of a class under `@operator`.

    forward: host function (*inputs) -> a tensor or a tuple of tensors, for real tensors on any device. The first input
        is a tensor. It must not write to an input or return one. On a GPU, its PyTorch calls and launches must be a
        function of shapes, strides, dtypes, alignments and plain values only, because `_launch_cache` replays them.
    fake: (*inputs) -> uninitialized outputs with the shapes, dtypes and strides of forward's. Inside `recording()`,
        fake tensors run `forward` instead, so that its launches are recorded.
    setup_context, backward: as in `torch.autograd.Function`; both, or neither for an operator without a derivative.
    vmap: (info, in_dims, *inputs), as in `torch.autograd.Function`; None for a loop over the batch.
    recomputed: number of leading outputs that `recomputing` may recompute; `setup_context` saves none of them.
    keeps_inputs: whether `setup_context` saves the inputs that these outputs are computed from. If not, they are
        recomputed only if the first `recomputed` inputs are recomputable as well.
    apply: calls the operator, with positional arguments only; set by `@operator`.
    """

    forward: ClassVar[Callable[..., Any]]
    fake: ClassVar[Callable[..., Any]]
    setup_context: ClassVar[Callable[..., None] | None] = None
    backward: ClassVar[Callable[..., Any] | None] = None
    vmap: ClassVar[Callable[..., Any] | None] = None
    recomputed: ClassVar[int] = 0
    keeps_inputs: ClassVar[bool] = True
    apply: ClassVar[Callable[..., Any]]


_Parts = TypeVar("_Parts", bound=Operator)


def operator(schema: str) -> Callable[[type[_Parts]], type[_Parts]]:
    """Define `strata::<schema>` with the methods of the decorated class."""

    def define(parts: type[_Parts]) -> type[_Parts]:
        parts.apply = staticmethod(_define(schema, parts))
        return parts

    return define


def _define(schema: str, parts: type[Operator]) -> Callable[..., Any]:
    # The dispatcher drops arguments that equal a default, and setup_context would see fewer inputs.
    assert "=" not in schema, f"{schema}: operators have no default arguments"
    name = schema[: schema.index("(")]
    forward, fake = parts.forward, parts.fake

    def forward_or_fake(*args: Any) -> Any:
        return forward(*args) if is_recording() else fake(*args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"strata::{name}", forward_or_fake, lib=_library)
    overload = getattr(torch.ops.strata, name).default
    types = tuple(_ARGUMENT_TYPES[str(argument.type)] for argument in overload._schema.arguments)

    def cached(*args: Any) -> Any:
        found = cache_key(name, types, args)
        return overload(*args) if found is None else run_cached(forward, args, *found)

    node = None
    if parts.setup_context is not None and parts.backward is not None:
        _define_autograd(name, overload, parts)
        node = _node(name, cached, parts)
    call = _eager(overload, cached, node)
    if parts.vmap is not None:
        torch.library.register_vmap(f"strata::{name}", parts.vmap, lib=_library)
    return call


def _define_autograd(name: str, overload: Callable[..., Any], parts: type[Operator]) -> None:
    """Register the autograd kernel of the operator, for calls through the dispatcher."""

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    def one_level_down(*args: Any) -> Any:
        # A node's forward runs in no-grad mode, but lower torch.func levels must record.
        with torch.enable_grad():
            return below(*args)

    node = _node(name, one_level_down, parts)

    def differentiable(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return below(*args)
        # Under torch.func transforms, the dispatcher calls this once per level, with the tensors of that level.
        with enable_single_level_autograd_function():
            return node(*args)

    _library.impl(name, differentiable, "Autograd")  # type: ignore[no-untyped-call]


def _node(name: str, run: Callable[..., Any], parts: type[Operator]) -> Callable[..., Any]:
    """`run` as an autograd node, with the setup_context and backward of `parts`."""
    setup_context, backward = parts.setup_context, parts.backward
    recomputed, keeps_inputs = parts.recomputed, parts.keeps_inputs
    assert setup_context is not None and backward is not None

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        if recomputed:
            note_results(run, args, output, recomputed, keeps_inputs)
        setup_context(ctx, args, output)
        return output

    # The base class of torch.autograd.Function, whose `apply` rejects or unwraps the tensors of torch.func levels.
    base = torch_function._SingleLevelFunction
    key = torch.autograd.Function._compiled_autograd_key
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "_compiled_autograd_key": key}
    function: Any = type(f"strata_{name}", (base,), methods)
    apply: Callable[..., Any] = function.apply
    return apply


_ARGUMENT_TYPES = {
    "Tensor": TENSOR_TYPES,
    "Optional[Tensor]": TENSOR_TYPES | {type(None)},
    "int": frozenset({int}),
    "Optional[int]": frozenset({int, type(None)}),
    "float": frozenset({float}),
    "bool": frozenset({bool}),
    "str": frozenset({str}),
}
_PLAIN_TYPES = frozenset().union(*_ARGUMENT_TYPES.values())


def _eager(
    overload: Callable[..., Any], cached: Callable[..., Any], node: Callable[..., Any] | None
) -> Callable[..., Any]:
    """`overload`; if nothing intercepts the call, directly the autograd node, or `cached` without autograd."""

    def call(*args: Any) -> Any:
        if is_observed() or not _PLAIN_TYPES.issuperset(map(type, args)):
            return overload(*args)
        if not torch.is_grad_enabled():
            return cached(*args)
        return overload(*args) if node is None or _is_excluded(_AUTOGRAD) else node(*args)

    return call


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_included = torch._C._dispatch_tls_local_include_set
_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
# Dispatch keys that every thread includes; ADInplaceOrView is missing in inference mode.
_ALWAYS = (_BACKEND.add(torch._C.DispatchKey.ADInplaceOrView), _BACKEND)


def has_mode() -> bool:
    """Whether a dispatch mode, transform or tracer is active in this thread: each includes a dispatch key."""
    return _included() not in _ALWAYS


def is_recorded() -> bool:
    """Whether autograd records: grad mode is on, and this is not inside another operator."""
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not _is_excluded(_AUTOGRAD))


def refuse_double_backward(name: str) -> None:
    """Raise NotImplementedError if the backward pass runs with create_graph=True."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{name} can be differentiated only once; leave out create_graph=True")


def is_observed() -> bool:
    """Whether a compiler, a mode or `recording()` must intercept the call, so that it goes through the dispatcher."""
    return torch.compiler.is_compiling() or has_mode() or torch._C._is_torch_function_mode_enabled() or is_recording()


def is_transformed() -> bool:
    """Whether a `torch.func` transform is active: it can only transform plain PyTorch."""
    return torch._C._are_functorch_transforms_active()


def plain_gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], incoming: Any) -> tuple[Any, ...]:
    """Differentiable gradients of `function(*inputs)`, a plain PyTorch function; None for inputs that are None.

    For backward with create_graph=True, if the backward operator has no derivative.
    """
    given = [i for i, x in enumerate(inputs) if x is not None]

    def of_given(*tensors: Tensor) -> Any:
        every = dict(zip(given, tensors, strict=True))
        return function(*(every.get(i) for i in range(len(inputs))))

    pull = torch.func.vjp(of_given, *(inputs[i] for i in given))[1]
    gradients = dict(zip(given, pull(incoming), strict=True))
    return tuple(gradients.get(i) for i in range(len(inputs)))
