"""The command line: `python -m strata_kernels` with `models`, `plan` or `bake`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import reduce
from operator import add
from pathlib import Path

import torch

from .patch.overview import families, fused_in
from .warmup import Plan
from .warmup.bake import MANIFEST, bake
from .warmup.cross_compile import target_of
from .warmup.plan_model import load_config, plan_model, presets

# Trained weights: all, or those of a LoRA adapter on the linear layers.
_LEARNS = ("all", "adapter")
_BATCHES, _LENGTHS = (1, 2, 4, 8), (4096,)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, 1 if a kernel does not compile, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m strata_kernels", description=__doc__)
    commands = parser.add_subparsers(required=True)
    models = commands.add_parser("models", help="print the table of model families, or the operators of given types")
    models.add_argument("types", nargs="*", metavar="TYPE", help="a model type of transformers, e.g. qwen3_moe")
    models.set_defaults(run=_models)
    plan = commands.add_parser("plan", help="list every kernel that training a model launches")
    plan.add_argument("--out", type=Path, required=True, metavar="FILE", help="output file of the plan, JSON")
    plan.set_defaults(run=_plan)
    baking = commands.add_parser("bake", help="compile a plan for GPUs that this machine does not have")
    baking.add_argument("--plan", type=Path, metavar="FILE", help="a saved plan, instead of --model")
    baking.add_argument("--arch", type=_archs, required=True, help="sm_90 (H100, H200), sm_100 (B200), gfx942 (MI300)")
    baking.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="output folder, with a subfolder per architecture"
    )
    baking.add_argument("--workers", type=int, help="processes; default: one per CPU core")
    baking.set_defaults(run=_bake)
    for command in (plan, baking):
        known = ", ".join(presets())
        # No defaults here, so that --plan can reject these arguments.
        command.add_argument("--model", type=_list, help=f"{known}; or paths of config.json files or their folders")
        command.add_argument("--dtype", choices=_DTYPES, help="dtype of the layers; default: bfloat16")
        command.add_argument("--learns", type=_learns, help="all,adapter; default: both")
        command.add_argument("--batch", type=_numbers, help="sequences per micro-batch; default: 1,2,4,8")
        command.add_argument("--length", type=_numbers, help="tokens per sequence; default: 4096")
    return parser


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in _list(text)]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers like 1,2,4")
    return numbers


def _learns(text: str) -> list[str]:
    kinds = _list(text)
    if not kinds or not set(kinds) <= set(_LEARNS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {' and '.join(_LEARNS)}")
    return kinds


def _archs(text: str) -> list[str]:
    for arch in (archs := _list(text)):
        try:
            target_of(arch)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    if not archs:
        raise argparse.ArgumentTypeError("pass at least one architecture, e.g. sm_90")
    return list(dict.fromkeys(archs))


def _models(options: argparse.Namespace) -> int:
    for line in [fused_in(model_type) for model_type in options.types] or [families()]:
        print(line)
    return 0


def _plan_of(options: argparse.Namespace) -> Plan:
    if not options.model:
        raise ValueError(
            f"--model is missing: pass one or more of {', '.join(presets())}, or the path of a config.json"
        )
    dtype = _DTYPES[options.dtype or "bfloat16"]
    plans = [
        plan_model(load_config(model), dtype=dtype, batch=batch, length=length, adapter=learns == "adapter")
        for model in options.model
        for learns in options.learns or _LEARNS
        for length in options.length or _LENGTHS
        for batch in options.batch or _BATCHES
    ]
    return reduce(add, plans)


def _plan(options: argparse.Namespace) -> int:
    plan = _plan_of(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(plan.to_json(), encoding="utf-8")
    print(f"{len(plan)} kernels, plan {plan.hash[:12]}, in {options.out}")
    return 0


def _bake(options: argparse.Namespace) -> int:
    for name in ("model", "dtype", "learns", "batch", "length"):
        if options.plan and vars(options)[name]:
            raise ValueError(f"--plan and --{name} exclude each other: a saved plan already has a {name}")
    plan = Plan.from_json(options.plan.read_text(encoding="utf-8")) if options.plan else _plan_of(options)
    print(f"{len(plan)} kernels, plan {plan.hash[:12]}", flush=True)
    results = bake(plan, options.arch, options.out, workers=options.workers, progress=_progress())
    for baked in results:
        print(f"{baked.summary()}; {baked.folder / MANIFEST}")
        for failure in baked.failed:
            print(f"  {failure.name}({failure.signature}): {failure.error}", file=sys.stderr)
    return 1 if any(baked.failed for baked in results) else 0


def _progress(width: int = 24) -> Callable[[int, int, str], None]:
    """A progress bar in a terminal; otherwise, e.g. in a build log, one line per quarter."""
    live = sys.stderr.isatty()

    def show(done: int, total: int, what: str) -> None:
        if live:
            bar = "#" * (width * done // total)
            print(f"\r[{bar:<{width}}] {done}/{total} {what[:40]:<40}", end="\n" * (done == total), file=sys.stderr)
        elif done == total or done * 4 // total > (done - 1) * 4 // total:
            print(f"{done}/{total} kernels", file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
