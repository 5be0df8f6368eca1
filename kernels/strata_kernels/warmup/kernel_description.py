"""Describe a compiled kernel by the readable part of Triton's cache key, and compare two descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .compile_counter import compile_listener

# Launch options that differ between kernels; the others depend on Triton's version and the chip only.
_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid")


@dataclass(frozen=True)
class KernelDescription:
    """A kernel's name and specialization: types and divisibility of arguments, constants, options."""

    name: str
    values: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "values": dict(self.values)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelDescription:
        """The inverse of `to_dict`."""
        return cls(data["name"], data["values"])


def describe_kernel(source: Any, metadata: Mapping[str, Any]) -> KernelDescription:
    """Describe a kernel from `src` and `metadata` of an event of `compile_listener`."""
    values = {}
    for index, (name, kind) in enumerate(source.signature.items()):
        constant = source.constants.get((index,))
        if kind == "constexpr":
            values[name] = str(constant)
        else:
            traits = [trait for trait, _ in source.attrs.get((index,), ())]
            values[name] = " ".join([str(kind), *(_TRAITS.get(trait, trait) for trait in traits)])
    return KernelDescription(source.name, values | {name: str(metadata[name]) for name in _OPTIONS if name in metadata})


_TRAITS = {"tt.divisibility": "(multiple of 16)", "tt.pointer_range": "(32 bit)"}


@contextmanager
def on_cache_miss(callback: Callable[[KernelDescription], None]) -> Iterator[None]:
    """Call `callback` for each kernel that Triton compiles in this process, by any thread, in this context."""

    def listener(**event: Any) -> None:
        if not event["cache_hit"]:
            callback(describe_kernel(event["src"], event["metadata"]))

    with compile_listener(listener):
        yield


def difference(missed: KernelDescription, planned: Iterable[KernelDescription]) -> str:
    """The differences of an unplanned kernel from the most similar planned one."""
    named = [kernel for kernel in planned if kernel.name == missed.name]
    if not named:
        return "no kernel of this name was planned"
    lists = [_differences(missed.values, kernel.values) for kernel in named]
    fewest = min(lists, key=len)
    return ", ".join(fewest) or "no visible difference: the source, Triton, the chip or the environment differs"


def _differences(missed: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys((*missed, *planned))
    return [
        f"{name}={missed.get(name, 'none')} (planned: {planned.get(name, 'none')})"
        for name in names
        if missed.get(name) != planned.get(name)
    ]
