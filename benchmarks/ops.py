"""Speed and memory of every operator, against the limit of the chip and against others.

    PYTHONPATH=kernels:platform:. python -m benchmarks.ops --only rms_norm --against torch,compile,liger,quack,cce

Needs a CUDA GPU, torch and triton; a peer that is not installed is named and left out. The gate comes first: a
function whose results are further from fp64 than twice PyTorch's own in the same dtype gets no times; the exit code is
1 if it is ours. Inputs are bf16, times are medians of forward and backward: `ms` on the device alone (a CUDA graph, or
eagerly for a peer that waits for the host), `wall ms` eager, with the host. The share is of the limit measured in the
same run: a device copy for what is bound by memory, an 8192-cube product for what is bound by FLOPs. `of products` is
the time of a fused head over that of its matrix products alone, `of full` over that without ignored rows.

Writes ops.csv, ops.md and a plot per operator to --out after every case. `python -m benchmarks.report` merges folders.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from strata_kernels.warmup import record, warmup

from .case import Case, Operator, in_case
from .measure import Gate, Limits, differentiate, extra_mib, in_turns_ms, limits, rotated, step, timed, wall_ms
from .operators import OPERATORS
from .peers import NAMES, Candidate, candidate, versions
from .reference import Shape
from .report import Row, finish, is_green, plot, show, write

Job = tuple[str, Operator, Case]

_SHOWN = ("kind", "operator", "shape", "by", "ms", "wall ms", "share", "of products", "extra MiB", "check s", "gate")


def jobs(names: Sequence[str], sweep: bool, shard: tuple[int, int]) -> list[Job]:
    """What to measure: the cases, or the sweeps, the longest first. Shard i of n takes every n-th."""
    chosen = [operator for operator in OPERATORS if operator.name in names]
    kind = "sweep" if sweep else "case"
    found = [(kind, o, case) for o in chosen for case in (o.sweep_cases() if sweep else o.cases)]
    return sorted(found, key=lambda job: -job[1].flops(job[2].shape))[shard[0] :: shard[1]]


def measure_case(job: Job, names: Sequence[str], limit: Limits, device: torch.device) -> Iterator[Row]:
    """A row for ours, then for each peer that has the operator."""
    kind, operator, case = job
    torch.compiler.reset()
    # What is alive now stays: the many collections below need not look at it.
    gc.collect()
    gc.freeze()

    operator = in_case(operator, case)

    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return operator.inputs(case.shape, torch.bfloat16, device)

    gate = Gate(operator.torch, operator.exact or operator.torch, make)
    green: dict[str, Row] = {}
    for name in ("ours", *names):
        found = candidate(operator, name)
        if isinstance(found, Candidate):
            row: Row = {"kind": kind, "operator": operator.name, "shape": operator.label(case.shape), "by": name}
            try:
                row |= measure(operator, case.shape, found, gate, limit, device)
            # Whatever a peer raises at this shape is a line of the table.
            except Exception as error:
                row["gate"] = f"error: {type(error).__name__}: {' '.join(str(error).split())}"[:160]
            gc.collect()
            torch.cuda.empty_cache()
            if case.wall and is_green(row):
                green[name] = row
            else:
                yield row
    yield from compared_walls(operator, make, green, device)


def compared_walls(
    operator: Operator, make: Callable[[], tuple[Tensor, ...]], green: dict[str, Row], device: torch.device
) -> Iterator[Row]:
    """The rows with wall times taken in turns: the host is too restless to compare what is seconds apart."""
    if green:
        copies = rotated(make)
        functions = [one.function for one in map(partial(candidate, operator), green) if isinstance(one, Candidate)]
        groups = [[step(function, inputs) for inputs in copies] for function in functions]
        for row, ms in zip(green.values(), wall_ms(groups, device), strict=True):
            yield row | {"wall ms": ms}


def measure(operator: Operator, shape: Shape, found: Candidate, gate: Gate, limit: Limits, device: torch.device) -> Row:
    """The gate of one function, then its times and memory."""
    seconds: dict[str, float] = {}
    with timed(seconds, "check s"):
        errors, untouched = gate.check(found.function)
    said = "; ".join(map(str, errors))
    if not all(error.ok for error in errors):
        return {**seconds, "gate": f"RED: {said}"}
    with timed(seconds, "measure s"):
        copies = rotated(lambda: operator.inputs(shape, torch.bfloat16, device))
        groups = [[step(found.function, inputs) for inputs in copies]]
        if operator.products is not None and "ignored" not in shape:
            groups.append([_plain(operator.products, inputs) for inputs in copies])
        ms, *products = in_turns_ms(groups, found.graph)
        row: Row = {"ms": ms, "timed": "graph" if found.graph else "eager", **rates(operator, shape, ms, limit)}
        if products:
            row["of products"] = ms / products[0]
        row |= {"wall ms": wall_ms(groups[:1], device)[0], "extra MiB": extra_mib(groups[0][0])}
    return {**row, **seconds, "gate": f"ok{'' if untouched else ', overwrites its inputs'}: {said}"}


def _plain(function: Callable[..., object], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        return function(*inputs)

    return call


def rates(operator: Operator, shape: Shape, ms: float, limit: Limits) -> dict[str, float]:
    """GB/s or TFLOP/s of the least that has to be moved or computed, and its share of the limit."""
    if flops := operator.flops(shape):
        return {"TFLOP/s": flops / ms / 1e9, "share": flops / ms / 1e9 / limit.product}
    moved = operator.bytes * operator.elements(shape)
    return {"GB/s": moved / ms / 1e6, "share": moved / ms / 1e6 / limit.copy}


def compile_ours(chosen: Sequence[Job]) -> str:
    """Compile the kernels of all jobs at once; returns what was done."""

    def steps() -> None:
        for _, operator, case in chosen:
            differentiate(
                in_case(operator, case).ours, operator.inputs(case.shape, torch.bfloat16, torch.device("meta"))
            )

    return warmup(record(steps)).summary()


def commit() -> str:
    """The commit that is checked out, or "unknown" outside a repository."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    done = subprocess.run([git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def header(device: torch.device, limit: Limits, commit: str) -> str:
    """What the numbers depend on, one line."""
    return ", ".join(
        [
            torch.cuda.get_device_name(device),
            f"torch {torch.__version__}",
            f"triton {triton.__version__}",
            f"CUDA {torch.version.cuda}",
            f"Python {sys.version.split()[0]}",
            *versions(),
            datetime.datetime.now(datetime.UTC).date().isoformat(),
            f"commit {commit}",
            f"copy {limit.copy:.0f} GB/s",
            f"8192-cube bf16 {limit.product:.0f} TFLOP/s",
        ]
    )


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Parses `a,b`; each must be one of `allowed`."""

    def parse(text: str) -> list[str]:
        given = text.split(",") if text else []
        if unknown := [name for name in given if name not in allowed]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known are {', '.join(allowed)}")
        return given

    return parse


def shard(text: str) -> tuple[int, int]:
    """Parses `i/n`."""
    try:
        i, n = map(int, text.split("/"))
    except ValueError:
        i, n = 0, 0
    if not 0 <= i < n:
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with 0 <= i < n")
    return i, n


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = tuple(operator.name for operator in OPERATORS)
    parser.add_argument("--only", type=names(known), default=list(known), help=f"operators, of {', '.join(known)}")
    parser.add_argument("--against", type=names(tuple(NAMES)), help=f"peers, of {', '.join(NAMES)}; '' for none")
    parser.add_argument("--sweep", action="store_true", help="sizes that are no powers of two; ours alone if unsaid")
    parser.add_argument("--shard", type=shard, default=(0, 1), help="i/n: every n-th case from the i-th on")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for what is written")
    parser.add_argument("--commit", default=commit(), help="what to record where there is no repository")
    found = parser.parse_args(arguments)
    if found.against is None:
        found.against = [] if found.sweep else list(NAMES)
    return found


def main() -> int:
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.ops needs a CUDA GPU")
    # One function is compiled for every shape.
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda", torch.cuda.current_device())
    for operator in (o for o in OPERATORS if o.name in arguments.only):
        for name in arguments.against:
            if isinstance(reason := candidate(operator, name), str):
                print(f"{operator.name}: {name} left out: {reason}")
    chosen = jobs(arguments.only, arguments.sweep, arguments.shard)
    print(compile_ours(chosen), flush=True)
    limit = limits(device)
    head = header(device, limit, arguments.commit)
    print(head, flush=True)
    rows: list[Row] = []
    for job in chosen:
        for row in measure_case(job, arguments.against, limit, device):
            rows.append(row)
            print(" | ".join(show(row, column) for column in _SHOWN), flush=True)
            write(arguments.out, [head], rows)
    for row in finish(rows):
        if "bar" in row:
            print(f"{row['operator']} {row['shape']}: {row['bar']}: {row['met']}")
    gc.unfreeze()
    try:
        plot(arguments.out, rows)
    except ImportError as error:
        print(f"no plots: {error}")
    return int(any(not is_green(row) for row in rows if row["by"] == "ours"))


if __name__ == "__main__":
    sys.exit(main())
