"""The drop-in against a table of Liger-Kernel 0.8.5's modules, public names and parameters."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from strata_kernels.compat.liger.options import WithOptions

TABLE = Path(__file__).parent / "helpers/liger_interface.txt"
# Axolotl wraps it; of its last parameters, which choose what to compute, there are none.
FEWER = {"fused_linear_cross_entropy_forward"}


def modules() -> dict[str, tuple[list[str], dict[str, ast.arguments]]]:
    """Module → its public names, and callables of it as `name`, `name.apply` or `name.forward` → parameters."""
    found: dict[str, tuple[list[str], dict[str, ast.arguments]]] = {}
    for line in TABLE.read_text().splitlines()[1:]:
        if line.startswith("["):
            names, callables = found.setdefault(line.strip("[]"), ([], {}))
        elif "(" in line:
            name, _, parameters = line.partition("(")
            callables[name] = ast.parse(f"lambda {parameters[:-1]}: 0", mode="eval").body.args
            names.append(name.partition(".")[0])
        else:
            names.extend(line.split())
    return found


TABLE_OF = modules()


@pytest.mark.usefixtures("liger_kernel")
def test_every_public_name_is_provided_or_explained() -> None:
    bare = []
    for module, (names, _) in TABLE_OF.items():
        path = f"liger_kernel.{module}".rstrip(".")
        try:
            found = importlib.import_module(path)
        except ImportError as error:
            if not re.match("Strata provides no liger_kernel", str(error)):
                bare.append(path)
            continue
        for name in names:
            try:
                getattr(found, name)
            except ImportError as error:
                assert re.match(f"Strata provides no {re.escape(path)}.{name}; use ", str(error))
            except AttributeError:
                bare.append(f"{path}.{name}")
    assert not bare


def listed(arguments: ast.arguments) -> list[inspect.Parameter]:
    """The parameters of a row of the table."""
    names = [a.arg for a in arguments.args]
    defaults = [inspect.Parameter.empty] * (len(names) - len(arguments.defaults)) + [
        ast.literal_eval(default) for default in arguments.defaults
    ]
    positional = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in zip(names, defaults, strict=True)
    ]
    keywords = [
        inspect.Parameter(a.arg, inspect.Parameter.KEYWORD_ONLY, default=ast.literal_eval(default))
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [*positional, *keywords]


def difference(found, method: str, theirs: list[inspect.Parameter], *, fewer: bool) -> str | None:
    """What a call that Liger takes would meet here; None if nothing."""
    if inspect.isclass(found) and issubclass(found, WithOptions) and not method:
        expected = {parameter.name: parameter.default for parameter in theirs}
        return None if found.defaults == expected else f"{found.defaults} in place of {expected}"
    ours = list(inspect.signature(getattr(found, method) if method else found).parameters.values())
    if method == "forward":
        ours = ours[1:]
    if fewer:
        theirs = theirs[: len(ours) - 2]
    for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        listed_here, given = [p for p in theirs if p.kind == kind], [p for p in ours if p.kind == kind]
        pairs = list(zip(listed_here, given, strict=False))
        if len(given) < len(listed_here) or any(liger.name != own.name for liger, own in pairs):
            return f"{[p.name for p in given]} in place of {[p.name for p in listed_here]}"
        # Further ones, and those that callers of Liger always pass, may have a default.
        if missing := [p.name for p in given[len(listed_here) :] if p.default is p.empty]:
            return f"Liger's callers do not pass {missing}"
        if changed := [liger.name for liger, own in pairs if liger.default not in (liger.empty, own.default)]:
            return f"another default of {changed}"
    return None


@pytest.mark.usefixtures("liger_kernel")
def test_parameters_and_defaults_are_ligers() -> None:
    differences = {}
    for module, (_, callables) in TABLE_OF.items():
        for name, arguments in callables.items():
            owner, _, method = name.partition(".")
            found = getattr(importlib.import_module(f"liger_kernel.{module}"), owner)
            if reason := difference(found, method, listed(arguments), fewer=name in FEWER):
                differences[f"{module}.{name}"] = reason
    assert not differences


@pytest.mark.usefixtures("liger_kernel")
def test_a_size_is_needed_where_there_is_a_weight() -> None:
    from liger_kernel.transformers.rms_norm import LigerRMSNormForMuseGlimmer

    assert LigerRMSNormForMuseGlimmer(with_scale=False).weight is None
    with pytest.raises(ValueError, match="dim is missing"):
        LigerRMSNormForMuseGlimmer()


@pytest.mark.usefixtures("liger_kernel")
def test_functions_take_ligers_names() -> None:
    from liger_kernel import functional
    from liger_kernel.transformers.functional import liger_relu_squared, liger_softmax

    x = torch.tensor([[-1.0, 2.0]])
    torch.testing.assert_close(functional.softmax(x=x, impl="triton"), x.softmax(-1))
    torch.testing.assert_close(liger_softmax(x=x), x.softmax(-1))
    torch.testing.assert_close(liger_relu_squared(x=x), torch.tensor([[0.0, 4.0]]))
