"""How an operator is declared, and how a call reaches its host function.

An operator is a class that holds its parts, under its schema in the `strata` namespace of torch's dispatcher:

    @operator("scale(Tensor x, float factor) -> Tensor")
    class Scale(Operator):
        @staticmethod
        def forward(x, factor): ...                   # host function: choose kernel or reference, allocate, launch

        @staticmethod
        def fake(x, factor): ...                      # the outputs of forward, unfilled

        @staticmethod
        def setup_context(ctx, inputs, output): ...   # save tensors for the backward pass

        @staticmethod
        def backward(ctx, dy): ...                    # call the backward operator, a class of its own

    y = Scale.apply(x, 2.0)

Names and signatures are those of `torch.autograd.Function`; `fake` is what `torch.library.register_fake` takes.

A call goes one of two ways. Through the dispatcher, if compile, export, fake tensors, a mode such as selective
checkpointing's, a transform of `torch.func` or a subclass of Tensor has to see it. Otherwise straight to the autograd
node and the launch cache: the dispatcher enters Python anew for each of its keys, which costs a small operator more
than its work.

`torch.library.custom_op` is not used: for compile, export and selective checkpointing it is equal, but an eager call
costs more CPU time.
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

    forward: (*inputs) -> a tensor or a tuple of tensors, on real tensors of any device. The first input is a tensor. It
        neither writes into nor returns an input. On a GPU its calls of PyTorch and its launches depend on nothing but
        the shapes, strides, dtypes, alignments and plain values of its inputs, because `_launch_cache` replays them.
    fake: (*inputs) -> the outputs of forward, unfilled: equal shapes, dtypes and strides. While launches are recorded,
        fake tensors take `forward` instead, so that the plan is made of its host code.
    setup_context, backward: as in `torch.autograd.Function`; both, or neither for an operator without a derivative.
    vmap: (info, in_dims, *inputs), as in `torch.autograd.Function`; None for a loop over the batch.
    recomputed: how many of the first outputs `recomputing` may compute again; none of them is saved by `setup_context`.
    keeps_inputs: whether `setup_context` saves the inputs that they are made of. Otherwise they are computed again only
        if the first inputs, as many as `recomputed`, can be, too.
    apply: calls the operator, with positional arguments only. `@operator` sets it.
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
    """Define `strata::<schema>` with the parts of the decorated class."""

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
    """Link the operator to its backward function for calls through the dispatcher."""

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    def one_level_down(*args: Any) -> Any:
        # A node's forward runs without grad mode, which the levels of torch.func below are to record in.
        with torch.enable_grad():
            return below(*args)

    node = _node(name, one_level_down, parts)

    def differentiable(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return below(*args)
        # Under transforms of torch.func the dispatcher comes here once per level, with the tensors of that level.
        with enable_single_level_autograd_function():
            return node(*args)

    _library.impl(name, differentiable, "Autograd")  # type: ignore[no-untyped-call]


def _node(name: str, run: Callable[..., Any], parts: type[Operator]) -> Callable[..., Any]:
    """`run` as a node of the autograd graph, with the setup_context and backward of `parts`."""
    setup_context, backward = parts.setup_context, parts.backward
    recomputed, keeps_inputs = parts.recomputed, parts.keeps_inputs
    assert setup_context is not None and backward is not None

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        if recomputed:
            note_results(run, args, output, recomputed, keeps_inputs)
        setup_context(ctx, args, output)
        return output

    # The base of torch.autograd.Function, whose own `apply` would refuse or unwrap what transforms of torch.func pass.
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
    """`overload`; or, where nobody has to see the call, the autograd node or `cached` themselves."""

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
# Keys that every thread includes; the first is missing in inference mode.
_ALWAYS = (_BACKEND.add(torch._C.DispatchKey.ADInplaceOrView), _BACKEND)


def has_mode() -> bool:
    """Whether this thread has a dispatch mode, transform or tracer of any kind active: each includes a dispatch key."""
    return _included() not in _ALWAYS


def is_recorded() -> bool:
    """Whether autograd records what is computed: it is on, and this is not the inside of another operator."""
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not _is_excluded(_AUTOGRAD))


def refuse_double_backward(name: str) -> None:
    """Raise NotImplementedError in a backward pass under create_graph=True."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{name} can be differentiated only once; leave out create_graph=True")


def is_observed() -> bool:
    """Whether a compiler, a mode or a recording has to see this call, so that it must go through the dispatcher."""
    return torch.compiler.is_compiling() or has_mode() or torch._C._is_torch_function_mode_enabled() or is_recording()


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is at work: it sees into plain PyTorch alone."""
    return torch._C._are_functorch_transforms_active()


def plain_gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], incoming: Any) -> tuple[Any, ...]:
    """The gradients of `function(*inputs)`, which is plain PyTorch, differentiable themselves; None for None.

    For a backward pass with create_graph=True of an operator whose backward operator has no derivative.
    """
    given = [i for i, x in enumerate(inputs) if x is not None]

    def of_given(*tensors: Tensor) -> Any:
        every = dict(zip(given, tensors, strict=True))
        return function(*(every.get(i) for i in range(len(inputs))))

    pull = torch.func.vjp(of_given, *(inputs[i] for i in given))[1]
    gradients = dict(zip(given, pull(incoming), strict=True))
    return tuple(gradients.get(i) for i in range(len(inputs)))
