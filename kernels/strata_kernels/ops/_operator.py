"""How an operator enters the `strata` namespace of torch's dispatcher, and how an eager call goes past it.

An operator is one host function (it chooses kernel or reference), one fake function (it only allocates) and, for a
forward operator, the pair that links it to its backward operator.

The dispatcher lets others see an operator: compile, export, fake tensors, modes such as selective checkpointing's,
function transforms, subclasses of tensors. It enters Python anew for each of its keys, which costs a small operator
more than its work. So a call that nobody would see goes straight to what the dispatcher would come to.

The dispatcher's own interface is used in place of `torch.library.custom_op`: for compile, export and selective
checkpointing the two are alike, and an eager call costs less of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import function as torch_function

from ._launch import is_recording
from ._launch_cache import TENSORS, form_of, repeat

_library = torch.library.Library("strata", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define `strata::<schema>` and return a function to be called with positional arguments only.

    run: the implementation on real tensors of any device; the first argument is a tensor. It must neither write into
        nor return its arguments, and on a GPU what it asks of PyTorch and launches must follow from the shapes,
        strides, dtypes, alignments and plain values of its arguments: `_launch_cache` tells why.
    fake: the same outputs, unfilled: shapes, dtypes and strides equal to those of `run`.
    setup_context, backward: as in `torch.autograd.Function`; both or neither.

    While launches are recorded, fake tensors take `run`, so that its host code is what the plan is made of.
    """
    # The dispatcher drops arguments that equal a default, and setup_context would see fewer inputs.
    assert "=" not in schema, f"{schema}: operators have no default arguments"
    name = schema[: schema.index("(")]

    def trace(*args: Any) -> Any:
        return run(*args) if is_recording() else fake(*args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"strata::{name}", trace, lib=_library)
    overload = getattr(torch.ops.strata, name).default
    kinds = tuple(_KINDS[str(argument.type)] for argument in overload._schema.arguments)

    def directly(*args: Any) -> Any:
        found = form_of(name, kinds, args)
        return overload(*args) if found is None else repeat(run, args, *found)

    if setup_context is None or backward is None:
        return _eager(overload, directly, None)

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    def one_level_down(*args: Any) -> Any:
        # A node's forward runs without grad mode, which the levels of torch.func below are to record in.
        with torch.enable_grad():
            return below(*args)

    node = _node(name, one_level_down, setup_context, backward)

    def differentiable(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return below(*args)
        # Under transforms of torch.func the dispatcher comes here once per level, with the tensors of that level.
        with enable_single_level_autograd_function():
            return node(*args)

    _library.impl(name, differentiable, "Autograd")  # type: ignore[no-untyped-call]
    return _eager(overload, directly, _node(name, directly, setup_context, backward))


def _node(
    name: str, run: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """`run` as a node of the autograd graph."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        setup_context(ctx, args, output)
        return output

    # The base of torch.autograd.Function, whose own `apply` would refuse or unwrap what transforms of torch.func pass.
    base = torch_function._SingleLevelFunction
    key = torch.autograd.Function._compiled_autograd_key
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "_compiled_autograd_key": key}
    function: Any = type(f"strata_{name}", (base,), methods)
    apply: Callable[..., Any] = function.apply
    return apply


_KINDS = {
    "Tensor": TENSORS,
    "Optional[Tensor]": TENSORS | {type(None)},
    "int": frozenset({int}),
    "float": frozenset({float}),
    "bool": frozenset({bool}),
    "str": frozenset({str}),
}
_PLAIN = frozenset().union(*_KINDS.values())


def _eager(
    overload: Callable[..., Any], directly: Callable[..., Any], node: Callable[..., Any] | None
) -> Callable[..., Any]:
    """`overload`; or where the dispatcher has nothing but autograd and `run` for a call, these."""

    def call(*args: Any) -> Any:
        if is_observed() or not _PLAIN.issuperset(map(type, args)):
            return overload(*args)
        if not torch.is_grad_enabled():
            return directly(*args)
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
    """Whether autograd takes note of what is computed: it is on, and this is not the inside of another operator."""
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not _is_excluded(_AUTOGRAD))


def is_observed() -> bool:
    """Whether a compiler or a mode follows what is called here, so that it must go through the dispatcher."""
    return torch.compiler.is_compiling() or has_mode() or torch._C._is_torch_function_mode_enabled() or is_recording()


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
