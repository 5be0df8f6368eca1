"""Flyte's type of a run spec, made once in a process.

flytekit makes it for each task and workflow that has a spec, with the JSON schemas of all its models: 0.1 s each time,
and a pod of Flyte imports four of them before it does anything.
"""

from __future__ import annotations

from functools import cache

from flytekit.core.type_engine import TypeEngine, TypeTransformer
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.types import LiteralType

from strata_platform.spec import RunSpec


class _SpecTransformer(PydanticTransformer):
    def __init__(self) -> None:
        TypeTransformer.__init__(self, "Run spec", RunSpec, enable_type_assertions=False)

    def get_literal_type(self, t: type[RunSpec]) -> LiteralType:
        return _literal_type(t)


@cache
def _literal_type(spec: type[RunSpec]) -> LiteralType:
    return PydanticTransformer().get_literal_type(spec)


TypeEngine.register(_SpecTransformer())
