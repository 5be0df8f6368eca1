"""LoRA on Llama 3.1 8B and 70B, beside PEFT on transformers: tokens per second and peak memory.

    PYTHONPATH=kernels:platform:. python -m benchmarks.lora [--only "ours, 8b; PEFT, compiled"]

Rank 16 on all linear layers but the head, 2 rows of 4096 tokens of 8B and one of 70B, random weights in bf16, on one
GPU. Ours are runs of `benchmarks.training` on documents of about 100,000 words. The others are PEFT's adapters in
transformers' model with PyTorch's fused AdamW and clipping: as they are, with layers compiled, with Liger-Kernel where
it is installed. Memory is what PyTorch's allocator handed out.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
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
_LORA = {"adapter.type": "lora", "tracking.log_every": 10}
_FP8 = {"training.float8": "tensorwise"}
_FULL = {"training.gradient_checkpointing": "full"}

OURS = {
    "ours, 8b": Run("8b", 1, {"training.micro_batch_size": ROWS, **_LORA}),
    "ours, 8b, float8": Run("8b", 1, {"training.micro_batch_size": ROWS, **_LORA, **_FP8}),
    "ours, 8b, recomputed": Run("8b", 1, {"training.micro_batch_size": ROWS, **_LORA, **_FULL}),
    "ours, 70b, float8, recomputed": Run("70b", 1, {"training.micro_batch_size": 1, **_LORA, **_FP8, **_FULL}),
}
PEERS = ("PEFT", "PEFT, compiled", "PEFT, Liger")


def peer(name: str) -> dict[str, float]:
    """Steps of PEFT's LoRA in transformers' Llama 3.1 8B."""
    from peft import LoraConfig, get_peft_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.endswith("Liger"):
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    model = plain_llama("8b", device)
    layers = model.model.layers
    targets = [path.rpartition(".")[2] for path, module in layers[0].named_modules() if type(module) is torch.nn.Linear]
    # It would keep adapters in fp32, which takes longer.
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=targets), autocast_adapter_dtype=False)
    if name.endswith("compiled") and device.type == "cuda":
        for layer in layers:
            layer.compile()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    adapted.train()

    def step(tokens: Tensor) -> None:
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(step, ROWS, LENGTH, STEPS, UNTIMED, device)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with semicolons between them")
    parser.add_argument("--out", type=Path, default=Path("out/lora"))
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Liger patches transformers for the whole process, so it is the last.
    liger = importlib.util.find_spec("liger_kernel") is not None
    known = [*OURS, *(name for name in PEERS if liger or not name.endswith("Liger"))]
    only = [name.strip() for name in told.only.split(";") if name.strip()]
    if unknown := {*only} - {*known}:
        parser.error(f"--only has {', '.join(sorted(unknown))}; there are {'; '.join(known)}")
    told.out.mkdir(parents=True, exist_ok=True)
    documents = told.out.absolute() / "documents.jsonl"
    if not documents.exists():
        write_documents(documents, 100_000)
    found: dict[str, Any] = {}
    for name in only or known:
        gc.collect()
        torch.cuda.empty_cache()
        if run := OURS.get(name):
            run = replace(run, fields={**run.fields, "data.source": str(documents), "objective.type": "pretrain"})
            found[name] = train_and_compare(run, told.out)
        else:
            found[name] = peer(name)
        line = "; ".join(f"{key} {value:,.1f}" for key, value in found[name].items() if isinstance(value, float))
        print(f"{name}: {line}", flush=True)
        torch._dynamo.reset()
    (told.out / "lora.json").write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
