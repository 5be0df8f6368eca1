"""Speed of an optimizer step against a device copy and against PyTorch's fused AdamW; first, its bits.

    PYTHONPATH=kernels:platform:. python -m benchmarks.optimizer_step --sweep --against torch,torchao

Needs a CUDA GPU. The gate comes first: the kernel must give the bits of the plain PyTorch reference, which runs on the
same GPU, for all roundings, dtypes, ragged sizes, misaligned memory and cut rows; otherwise nothing is timed and the
exit code is 1. Weights have the shapes of Llama 3.1 8B, or of as many of its layers as fit into memory. Times are
medians on the device; `copy` is the share of the rate of a device copy measured in the same run; `host ms` is what a
step keeps the host for, once planned.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from strata_kernels import Shard, StepPlan, adamw_step, weight_step
from strata_kernels.ops.adamw import step_plan

from .measure import device_ms

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GATE_SIZES = (1, 7, 8, 1023, 1024, 8191, 8192, 8193, 100003)
# Of Llama 3.1 8B: the matrices and norms of a layer, and what there is once.
LAYER = (4096 * 4096,) * 2 + (1024 * 4096,) * 2 + (14336 * 4096,) * 3 + (4096,) * 2
ONCE = (128256 * 4096,) * 2 + (4096,)
# Bytes of a weight: all bf16, with a remainder.
KEPT = 10
COPIED = 2**31


@dataclass(frozen=True)
class State:
    """All that a step works on."""

    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    remainders: list[Tensor]
    steps: list[Tensor]
    shards: list[Shard]

    def step(self, rounding: str, plan: StepPlan) -> None:
        master = rounding == "master" and self.weights[0].dtype == BF16
        states = (self.exp_avgs, self.exp_avg_sqs, self.remainders if master else None, self.steps, self.shards)
        adamw_step(self.weights, self.gradients, *states, **SETTINGS, rounding=rounding, seed=7, plan=plan)

    def weight_step(self, rounding: str, plan: StepPlan) -> None:
        weight_step(
            self.weights, self.gradients, self.remainders if rounding == "master" else None, self.shards,
            lr=1e-5, weight_decay=0.1, rounding=rounding, seed=7, steps=self.steps, plan=plan,
        )  # fmt: skip

    def torch_step(self) -> None:
        torch._foreach_add_(self.steps, 1)
        beta1, beta2 = SETTINGS["betas"]
        torch._fused_adamw_(
            self.weights, self.gradients, self.exp_avgs, self.exp_avg_sqs, [], self.steps,
            lr=SETTINGS["lr"], beta1=beta1, beta2=beta2, weight_decay=SETTINGS["weight_decay"], eps=SETTINGS["eps"],
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        return [*self.weights, *self.exp_avgs, *self.exp_avg_sqs, *self.remainders, *self.steps]

    def copy(self) -> State:
        names = ("weights", "exp_avgs", "exp_avg_sqs", "remainders", "steps")
        return replace(self, **{name: [x.clone() for x in getattr(self, name)] for name in names})


def make(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device, shift: int = 0, cut: bool = False
) -> State:
    """Random weights and gradients, of memory that starts `shift` elements beyond an aligned address."""
    weight, gradient, exp_avg, exp_avg_sq = dtypes

    def full(value: float, dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(n + shift, dtype=dtype, device=device)[shift:].fill_(value) for n in sizes]

    return State(
        weights=[x.normal_() for x in full(0.0, weight)],
        gradients=[x.normal_() for x in full(0.0, gradient)],
        exp_avgs=full(0.0, exp_avg),
        exp_avg_sqs=full(0.0, exp_avg_sq),
        remainders=full(0.0, torch.int16),
        steps=[torch.zeros((), device=device) for _ in sizes],
        shards=[Shard(i, 2**32 - 5000, 1000 * cut, 3000 * cut) for i in range(len(sizes))],
    )


def gate(device: torch.device) -> list[str]:
    """The cases in which the kernel and the reference differ."""
    red = []
    dtypes = ((BF16,) * 4, (FP32,) * 4, (BF16, FP32, FP32, BF16), (FP32, BF16, BF16, FP32))
    for types, rounding, shift, cut in product(dtypes, ("master", "stochastic", "nearest"), (0, 1), (False, True)):
        ours = make(GATE_SIZES, types, device, shift, cut)
        reference = ours.copy()
        plan, plain = StepPlan(), StepPlan()
        for _ in range(3):
            ours.step(rounding, plan)
            with patch.object(step_plan, "takes_kernel", lambda x: False):
                reference.step(rounding, plain)
        if not all(x.equal(y) for x, y in zip(ours.tensors(), reference.tensors(), strict=True)):
            red.append(f"{rounding}, {', '.join(map(str, types))}, shift {shift}, cut {cut}")
    return red


def host_ms(call: Callable[[], object]) -> float:
    """Median milliseconds until a call returns, with an idle device before it."""
    samples = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def copy_rate(device: torch.device) -> float:
    """GB/s of a device copy, read and written."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / device_ms([lambda: target.copy_(source)] * 4, graph=False) / 1e6


def sizes(budget: int) -> list[int]:
    """Llama 3.1 8B, or as many of its layers as `budget` bytes hold."""
    layers = min(32, (budget // KEPT - sum(ONCE)) // sum(LAYER))
    return [*LAYER * max(layers, 1), *ONCE]


def report(name: str, call: Callable[[], None], moved: int, weights: int, copy: float) -> None:
    ms = device_ms([call], graph=False)
    rate = moved * weights / ms / 1e6
    print(f"{name:44} | {ms:8.2f} | {rate:6.0f} | {rate / copy:6.1%} | {host_ms(call):.3f}", flush=True)


def sweep(state: State, weights: int, copy: float) -> None:
    """A handful of launches of the two modes that lose nothing."""
    for block, chunk, warps in product((512, 1024, 2048, 4096), (8192, 32768), (2, 4, 8)):
        if block // (32 * warps) not in (8, 16):
            continue
        for rounding, moved in (("master", 18), ("stochastic", 14)):
            with patch.object(step_plan, "_STEP", step_plan.Launch(block=block, chunk=chunk, warps=warps)):
                plan = StepPlan()
                name = f"{rounding}, block {block}, chunk {chunk}, warps {warps}"
                report(name, lambda r=rounding, p=plan: state.step(r, p), moved, weights, copy)  # type: ignore[misc]


def torchao_step(state: State) -> Callable[[], None]:
    """A step of torchao's AdamW with stochastic rounding of bf16 weights."""
    from torchao.optim import _AdamW

    parameters = [torch.nn.Parameter(weight) for weight in state.weights]
    for parameter, gradient in zip(parameters, state.gradients, strict=True):
        parameter.grad = gradient
    optimizer = _AdamW(parameters, **SETTINGS, bf16_stochastic_round=True)

    def call() -> None:
        optimizer.step()

    return call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="several launches of the kernel")
    parser.add_argument("--against", default="torch", help="peers, of torch,torchao; '' for none")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.optimizer_step needs a CUDA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if red := gate(device):
        print("RED: other bits than the reference:", *red, sep="\n  ")
        return 1
    print("gate: the bits of the reference in every case", flush=True)
    copy = copy_rate(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    state = make(sizes(int(0.85 * free)), (BF16,) * 4, device)
    weights = sum(x.numel() for x in state.weights)
    print(f"{weights / 1e9:.2f}e9 weights in {len(state.weights)} tensors, copy {copy:.0f} GB/s")
    print("step | ms | GB/s | copy | host ms", flush=True)
    for rounding, moved in (("master", 18), ("stochastic", 14), ("nearest", 14)):
        plan = StepPlan()
        report(f"adamw_step, {rounding}", lambda r=rounding, p=plan: state.step(r, p), moved, weights, copy)  # type: ignore[misc]
    for rounding, moved in (("master", 10), ("stochastic", 6)):
        plan = StepPlan()
        report(f"weight_step, {rounding}", lambda r=rounding, p=plan: state.weight_step(r, p), moved, weights, copy)  # type: ignore[misc]
    if "torch" in arguments.against.split(","):
        report("torch fused AdamW, nearest", state.torch_step, 14, weights, copy)
    if arguments.sweep:
        sweep(state, weights, copy)
    if "torchao" in arguments.against.split(","):
        state.exp_avgs.clear()
        state.exp_avg_sqs.clear()
        report("torchao _AdamW, stochastic", torchao_step(state), 14, weights, copy)
    print(f"copy again {copy_rate(device):.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
