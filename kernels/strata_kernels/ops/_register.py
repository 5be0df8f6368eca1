"""How an operator enters the `strata` namespace of torch's dispatcher.

An operator is one host function (it chooses kernel or reference), one fake function (it only allocates) and, for a
forward operator, the pair that links it to its backward operator. The raw `torch.library.Library` is used in place of
`custom_op`: the same compile, export and selective-checkpointing behavior at less dispatch cost per eager call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._launch import is_recording

_library = torch.library.Library("strata", "FRAGMENT")


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define `strata::<schema>` and return its overload, to be called with positional arguments only.

    run: the implementation on real tensors of any device. It must neither write into nor return its arguments.
    fake: the same outputs, unfilled: shapes, dtypes and strides equal to those of `run`.
    setup_context, backward: as for `torch.library.register_autograd`; both or neither. Schemas have no defaults: the
        dispatcher drops arguments that equal one, and the two functions then see fewer inputs.

    While launches are recorded, fake tensors take `run`, so that its host code is what the plan is made of.
    """
    assert "=" not in schema, f"{schema}: operators have no default arguments"
    name = schema[: schema.index("(")]

    def trace(*args: Any) -> Any:
        return run(*args) if is_recording() else fake(*args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strata::{name}", trace, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"strata::{name}", backward, setup_context=setup_context, lib=_library)
    overload: Callable[..., Any] = getattr(torch.ops.strata, name).default
    return overload
