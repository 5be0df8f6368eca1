"""What one compilation of a kernel has that another does not: the readable part of Triton's key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .compile_counter import listening

# Options of a launch that differ between kernels; the others are constants of a Triton version and a chip.
_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid")


@dataclass(frozen=True)
class Description:
    """A kernel's name and what it was specialized for: types, divisibility, constants and options, by argument."""

    name: str
    values: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "values": dict(self.values)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Description:
        """The inverse of `to_dict`."""
        return cls(data["name"], data["values"])


def describe(source: Any, metadata: Mapping[str, Any]) -> Description:
    """Of what Triton tells its listener: the source that is compiled, and the metadata."""
    values = {}
    for index, (name, kind) in enumerate(source.signature.items()):
        constant = source.constants.get((index,))
        if kind == "constexpr":
            values[name] = str(constant)
        else:
            traits = [trait for trait, _ in source.attrs.get((index,), ())]
            values[name] = " ".join([str(kind), *(_TRAITS.get(trait, trait) for trait in traits)])
    return Description(source.name, values | {name: str(metadata[name]) for name in _OPTIONS if name in metadata})


_TRAITS = {"tt.divisibility": "(multiple of 16)", "tt.pointer_range": "(32 bit)"}


@contextmanager
def hearing_misses(heard: Callable[[Description], None]) -> Iterator[None]:
    """Call `heard` for each kernel that Triton compiles in this process, by any thread, while the context is open."""

    def note(**event: Any) -> None:
        if not event["cache_hit"]:
            heard(describe(event["src"], event["metadata"]))

    with listening(note):
        yield


def difference(missed: Description, planned: Iterable[Description]) -> str:
    """How a kernel that was not planned differs from the planned one that is most like it."""
    named = [kernel for kernel in planned if kernel.name == missed.name]
    if not named:
        return "no kernel of this name was planned"
    differences = [_between(missed.values, kernel.values) for kernel in named]
    fewest = min(differences, key=len)
    return ", ".join(fewest) or "nothing that shows: the source, Triton, the chip or the environment differ"


def _between(missed: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys((*missed, *planned))
    return [
        f"{name}={missed.get(name, 'none')} (planned: {planned.get(name, 'none')})"
        for name in names
        if missed.get(name) != planned.get(name)
    ]
