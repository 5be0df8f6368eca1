"""Speed and memory of every operator, against the limit of the chip and against others.

    PYTHONPATH=kernels:platform:. python -m benchmarks.ops [--only rms_norm,rope] [--against torch,compile,liger]

Needs a CUDA GPU, torch and triton, nothing else; a peer that is not installed is named and left out. A function whose
results are further from fp64 than twice PyTorch's own in the same dtype gets no times; the exit code is 1 if it is
ours. Inputs are bf16. Times are medians: `ms` on the device alone, `wall ms` eager, with the host. The share is of the
limit measured in the same run: a device copy for what is bound by memory, an 8192-cube product for what is bound by
FLOPs. `of products` is the time of linear_cross_entropy over that of its three matrix products. Writes ops.csv and
ops.md to --out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from .measure import as_tuple, device_ms, errors, extra_mib, limits, rotated, wall_ms
from .operators import OPERATORS, Function, Operator, Shape

PEERS = ("torch", "compile", "liger")
COLUMNS = (
    "operator",
    "shape",
    "by",
    "pass",
    "ms",
    "wall ms",
    "GB/s",
    "TFLOP/s",
    "share",
    "of products",
    "extra MiB",
    "gate",
)


def peer(operator: Operator, name: str) -> Function | str:
    """The function of a peer, or why there is none."""
    if name == "torch":
        return operator.torch
    if name == "compile":
        torch.compiler.reset()
        return torch.compile(operator.torch, fullgraph=True, dynamic=False)
    try:
        functions = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        return str(error)
    attribute, adapt = operator.liger
    return adapt(getattr(functions, attribute))


def measure(
    operator: Operator, shape: Shape, by: str, function: Function, limit: tuple[float, float], device: torch.device
) -> list[dict[str, Any]]:
    """The rows of one function at one shape: the gate, then the forward pass and the whole."""
    base = {"operator": operator.name, "shape": "x".join(map(str, shape.values())), "by": by}

    def make() -> tuple[Tensor, ...]:
        return operator.inputs(shape, torch.bfloat16, device)

    torch.manual_seed(0)
    found = errors(function, operator.torch, make())
    gate = "; ".join(f"{mine:.1e} of {allowed:.1e}" for mine, _, allowed in found)
    if not all(mine <= allowed for mine, _, allowed in found):
        return [{**base, "pass": "both", "gate": f"RED {gate}"}]

    copies = rotated(make)
    rows = []
    for which, calls in {
        "forward": [_forward(function, inputs) for inputs in copies],
        "both": [_both(function, inputs) for inputs in copies],
    }.items():
        # Liger's loss waits for the host, which a CUDA graph cannot hold.
        ms = device_ms(calls, graph=by != "liger" or operator.products is None)
        row = {**base, "pass": which, "ms": ms, "wall ms": wall_ms(calls, device), "gate": "ok"}
        rows.append(row | rates(operator, shape, which, ms, limit))
    if operator.products is not None:
        rows[-1]["of products"] = rows[-1]["ms"] / products_ms(operator, copies)
    rows[-1]["extra MiB"] = extra_mib(_both(function, copies[0]))
    return rows


def rates(operator: Operator, shape: Shape, which: str, ms: float, limit: tuple[float, float]) -> dict[str, float]:
    """GB/s or TFLOP/s of the least that has to be moved or computed, and its share of the limit."""
    if operator.flops(shape):
        flops = operator.flops(shape) / (3 if which == "forward" else 1)
        return {"TFLOP/s": flops / ms / 1e9, "share": flops / ms / 1e9 / limit[1]}
    per_element = operator.bytes[0] if which == "forward" else sum(operator.bytes)
    moved = per_element * operator.elements(shape)
    return {"GB/s": moved / ms / 1e6, "share": moved / ms / 1e6 / limit[0]}


def products_ms(operator: Operator, copies: list[tuple[Tensor, ...]]) -> float:
    """Device time of the operator's matrix products alone, in this run."""
    assert operator.products is not None
    products = operator.products
    with torch.no_grad():
        return device_ms([lambda inputs=inputs: products(*inputs) for inputs in copies])


def _forward(function: Function, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def _both(function: Function, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    with torch.no_grad():
        shapes = [(y.shape, y.dtype) for y in as_tuple(function(*inputs))]
    incoming = [torch.ones(shape, dtype=dtype, device=inputs[0].device) for shape, dtype in shapes]
    trained = [x for x in inputs if x.requires_grad]
    return lambda: torch.autograd.grad(as_tuple(function(*inputs)), trained, incoming)


def commit() -> str:
    """The commit that is checked out, or "unknown" outside a repository."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    done = subprocess.run([git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def header(device: torch.device, limit: tuple[float, float], commit: str) -> str:
    """What the numbers depend on, one line."""
    return ", ".join(
        [
            torch.cuda.get_device_name(device),
            f"torch {torch.__version__}",
            f"triton {triton.__version__}",
            f"CUDA {torch.version.cuda}",
            f"Python {sys.version.split()[0]}",
            datetime.datetime.now(datetime.UTC).date().isoformat(),
            f"commit {commit}",
            f"copy {limit[0]:.0f} GB/s",
            f"8192-cube bf16 {limit[1]:.0f} TFLOP/s",
        ]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    formats = {"ms": "{:.3f}", "wall ms": "{:.3f}", "share": "{:.0%}", "of products": "{:.3f}"}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in rows:
        cells = [
            formats.get(c, "{:.0f}").format(row[c]) if isinstance(row.get(c), float) else row.get(c, "")
            for c in COLUMNS
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(out: Path, head: str, rows: list[dict[str, Any]]) -> None:
    """ops.csv with full precision, ops.md to read."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "ops.csv").open("w", newline="") as file:
        file.write(f"# {head}\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (out / "ops.md").write_text(f"{head}\n\n{table(rows)}\n")


def names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in allowed]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known are {', '.join(allowed)}")
        return given

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = tuple(operator.name for operator in OPERATORS)
    parser.add_argument("--only", type=names(known), default=list(known), help=f"operators, of {', '.join(known)}")
    parser.add_argument("--against", type=names(PEERS), default=list(PEERS), help=f"peers, of {', '.join(PEERS)}")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for ops.csv and ops.md")
    parser.add_argument("--commit", default=commit(), help="what to record where there is no repository")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")

    # One function is compiled for every shape, with gradients and without.
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda", torch.cuda.current_device())
    limit = limits(device)
    head = header(device, limit, arguments.commit)
    print(head)
    rows: list[dict[str, Any]] = []
    for operator in (o for o in OPERATORS if o.name in arguments.only):
        functions = {"ours": operator.ours}
        for name in arguments.against:
            found = peer(operator, name)
            if isinstance(found, str):
                print(f"{operator.name}: {name} left out: {found}")
            else:
                functions[name] = found
        for shape in operator.shapes:
            for by, function in functions.items():
                rows += measure(operator, shape, by, function, limit, device)
                print(table(rows).splitlines()[-1], flush=True)
                write(arguments.out, head, rows)
    print(table(rows))
    return int(any(row["gate"] != "ok" for row in rows if row["by"] == "ours"))


if __name__ == "__main__":
    sys.exit(main())
