"""FP8 in the linear layers of Llama 3.1 8B, beside torchao on plain transformers: tokens per second and peak memory.

    PYTHONPATH=kernels:platform:. python -m benchmarks.float8 [--only "ours, bf16; torchao, rowwise"]

Full fine-tuning of 2 rows of 4096 tokens, from random weights in bf16, on one GPU. Ours are runs of
`benchmarks.training` on documents of about 100,000 words; all but `nearest` keep the bits that bf16 loses, 2 bytes for
each weight. torchao's are `convert_to_float8_training` on transformers' model, layers compiled, and PyTorch's fused
AdamW, which drops updates smaller than bf16's rounding. Memory is what PyTorch's allocator handed out.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.plain_llama import plain_llama, time_steps
from benchmarks.training import Run, train_and_compare, write_documents

ROWS, LENGTH, STEPS, UNTIMED = 2, 4096, 8, 3
_NO_CLIPPING = {"optimizer.max_grad_norm": 0, "optimizer.in_backward": True}
_LORA = {"adapter.type": "lora"}


def _ours(**fields: Any) -> Run:
    return Run("8b", 1, {"training.micro_batch_size": ROWS, "tracking.log_every": 10, **fields})


OURS = {
    "ours, tensorwise": _ours(**{"training.float8": "tensorwise"}),
    "ours, tensorwise, nearest": _ours(**{"training.float8": "tensorwise", "optimizer.precision": "nearest"}),
    "ours, rowwise": _ours(**{"training.float8": "rowwise"}),
    "ours, bf16": _ours(),
    "ours, LoRA, tensorwise": _ours(**{"training.float8": "tensorwise", **_LORA}),
    "ours, LoRA, bf16": _ours(**_LORA),
}
IN_BACKWARD = {
    "ours, bf16, in_backward": _ours(**_NO_CLIPPING),
    "ours, tensorwise, in_backward": _ours(**{"training.float8": "tensorwise", **_NO_CLIPPING}),
}
TORCHAO = ("tensorwise", "rowwise")


def torchao(recipe: str) -> dict[str, float]:
    """A step of torchao on plain transformers, compiled layer by layer."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = plain_llama("8b", device)
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(
        model,
        config=config if device.type == "cuda" else replace(config, emulate=True),
        module_filter_fn=lambda module, path: path != "lm_head",
    )
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(tokens: Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(step, ROWS, LENGTH, STEPS, UNTIMED, device)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with semicolons between them")
    parser.add_argument("--profile", default="", help="the run whose 25 longest kernels are printed")
    parser.add_argument("--out", type=Path, default=Path("out/float8"))
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tasks.runtime.models.float8").setLevel(logging.INFO)
    told.out.mkdir(parents=True, exist_ok=True)
    documents = told.out.absolute() / "documents.jsonl"
    if not documents.exists():
        write_documents(documents, 100_000)
    found: dict[str, Any] = {}
    # Runs of `in_backward` are named by --only: their hooks keep a model's memory, so one is a process's last.
    only = [name.strip() for name in told.only.split(";") if name.strip()]
    known = {*OURS, *IN_BACKWARD, *(f"torchao, {recipe}" for recipe in TORCHAO)}
    if unknown := {*only} - known:
        parser.error(f"--only has {', '.join(sorted(unknown))}; there are {'; '.join(sorted(known))}")
    if told.profile and told.profile not in {**OURS, **IN_BACKWARD}:
        parser.error(f"--profile {told.profile!r} is no run of ours; there are {'; '.join({**OURS, **IN_BACKWARD})}")
    for name in only or [*OURS, *(f"torchao, {recipe}" for recipe in TORCHAO)]:
        gc.collect()
        torch.cuda.empty_cache()
        profiler = None
        run = {**OURS, **IN_BACKWARD}.get(name)
        if run is not None:
            run = replace(run, fields={**run.fields, "data.source": str(documents), "objective.type": "pretrain"})
            if told.profile == name:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            found[name] = train_and_compare(run, told.out, profiler=profiler)
        else:
            found[name] = torchao(name.split(", ")[1])
        line = "; ".join(f"{key} {value:,.1f}" for key, value in found[name].items() if isinstance(value, float))
        print(f"{name}: {line}", flush=True)
        if profiler is not None:
            print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
        torch._dynamo.reset()
    (told.out / "float8.json").write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
