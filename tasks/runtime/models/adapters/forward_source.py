"""What the source of a forward pass shows: which children read one input, and whether a decoder layer is like Llama's.

Only speed depends on it: a layer whose source is missing or differs keeps its own forward pass.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


def usual_forward(  # type: ignore[no-untyped-def]  # pragma: no cover - it is read, not run
    self,
    hidden_states,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    use_cache=False,
    position_embeddings=None,
    **kwargs,
):
    """The forward pass of transformers' LlamaDecoderLayer, for comparison. From 5.24 on it calls the cache `cache`."""
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


@cache
def has_usual_forward(cls: Any) -> bool:
    """Whether a decoder layer's forward pass has the source of Llama's, `usual_forward`."""
    found = _function(cls.forward)
    return found is not None and _parts(found) == _parts(_function(usual_forward))


def _parts(function: Any) -> tuple[list[str], list[str]]:
    """Its arguments without annotations, and its statements; its docstring is none."""
    arguments = function.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    further = [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument]
    defaults = [ast.unparse(value) for value in arguments.defaults]
    body = function.body[ast.get_docstring(function) is not None :]
    written = [ast.unparse(statement).replace("past_key_values", "cache") for statement in body]
    named = [name.replace("past_key_values", "cache") for name in named]
    return [*named, "*", *further, *defaults], written


@cache
def ends_with_o_proj(cls: Any) -> bool:
    """Whether the first result of its forward pass is that of `o_proj`, which it calls once."""
    function = _function(cls.forward)
    if function is None:
        return False
    last = [ast.unparse(statement) for statement in function.body[-2:]]
    called = sum(isinstance(node, ast.Attribute) and node.attr == "o_proj" for node in ast.walk(function))
    returns = sum(isinstance(node, ast.Return) for node in ast.walk(function))
    ends = ["attn_output = self.o_proj(attn_output)", "return (attn_output, attn_weights)"]
    return last == ends and called == 1 and returns == 1


@cache
def calls_with_one_input(cls: Any) -> tuple[tuple[str, ...], ...]:
    """The names of children that `cls.forward` calls with one variable that it does not set in between.

    Read from its source, and nothing depends on it but speed. Empty if there is no source.
    """
    function = _function(cls.forward)
    if function is None:
        return ()
    calls = _Calls()
    calls.visit(function)
    return tuple(tuple(names) for names in calls.found.values() if len(names) > 1)


def _function(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The source of `function`, if there is one."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.FunctionDef) else None


class _Calls(ast.NodeVisitor):
    """Calls `self.child(variable)` by the variable and how often it was set before."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], list[str]] = {}
        self._set: dict[str, int] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        """The value is computed before the targets are set."""
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Name(self, node: ast.Name) -> None:
        """Count where the variable is set."""
        if isinstance(node.ctx, ast.Store):
            self._set[node.id] = self._set.get(node.id, 0) + 1

    def visit_Call(self, node: ast.Call) -> None:
        """Note a call of a child."""
        child, given = node.func, node.args
        is_own = isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "self"
        if is_own and len(given) == 1 and not node.keywords and isinstance(given[0], ast.Name):
            assert isinstance(child, ast.Attribute)
            key = (given[0].id, self._set.get(given[0].id, 0))
            self.found.setdefault(key, []).append(child.attr)
        self.generic_visit(node)
