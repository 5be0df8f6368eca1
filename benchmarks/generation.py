"""Tokens per second of generation: the embedded engine beside transformers' `generate`, with the same weights.

    PYTHONPATH=kernels:platform:. python -m benchmarks.generation [--prompts 16] [--group 8] [--tokens 512]

The shape is Qwen3-0.6B's with random weights in bf16; no answer ends by itself. Before the table, both caches of the
engine answer greedily in fp32: their tokens must be the same, and so must the log-probabilities of a forward pass over
them. Each runs three times; the last one counts, because the first compiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from strata_kernels import patch_model
from tasks.runtime.generation import EmbeddedGenerator, Request, Sample, Sampling

# Of a log-probability in fp32.
_MOST = 1e-4

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMALL = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 5000}


def build(device: torch.device, dtype: torch.dtype, *, patched: bool, **changes: Any) -> Any:
    """The model with random weights, in training mode."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3", **SHAPE | changes), dtype=dtype, attn_implementation="sdpa"
        )
    if patched:
        patch_model(model)
    return model.train()


def requests(prompts: int, group: int, vocabulary: int) -> list[Request]:
    """Groups of requests for prompts of 48 to 96 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(48, 96, prompts).long().tolist()
    texts = [tuple(torch.randint(1, vocabulary, (length,), generator=generator).tolist()) for length in lengths]
    return [Request(text, number * group + key) for number, text in enumerate(texts) for key in range(group)]


def engine(model: Any, *, static: bool, batch_size: int = 128) -> EmbeddedGenerator:
    """The embedded engine; nothing asks its tokenizer."""
    tokenizer: Any = None
    return EmbeddedGenerator(model, tokenizer, pad_token_id=0, seed=0, static=static, batch_size=batch_size)


def by_transformers(model: Any, asked: list[Request], tokens: int) -> None:
    """What TRL calls: prompts padded on the left, drawn at temperature 1."""
    longest = max(len(request.prompt) for request in asked)
    ids = torch.zeros(len(asked), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(asked):
        ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, longest - len(request.prompt) :] = 1
    options = GenerationConfig(do_sample=True, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, top_k=0)
    model.eval()
    with torch.no_grad():
        model.generate(ids.to(model.device), attention_mask=mask.to(model.device), generation_config=options)
    model.train()


def check(device: torch.device) -> str:
    """Compare greedy answers of a small model in fp32, from both kinds of caches, and their log-probabilities."""
    torch.set_float32_matmul_precision("highest")
    model = build(device, torch.float32, patched=True, **SMALL)
    asked = requests(5, 2, SMALL["vocab_size"])
    sampling = Sampling(max_new_tokens=200, temperature=0.0, stop_token_ids=tuple(range(1, 40)))
    # The graphs of the second call are replayed from the start, and rows leave the batch.
    static = engine(model, static=True)
    first, second, grown = (
        one.generate(asked, sampling) for one in (static, static, engine(model, static=False))
    )  # fmt: skip
    same = all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(second, grown, strict=True))
    again = all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True))
    lengths = sorted({len(sample.token_ids) for sample in grown})
    error = max(_error(model, request, sample) for request, sample in zip(asked, second, strict=True))
    if not (same and again) or error > _MOST:
        raise SystemExit(f"the engine is wrong: as a growing cache {same}, repeated {again}, error {error:.1e}")
    return f"check: as a growing cache {same}, repeated {again}, lengths {lengths}, log-probability error {error:.1e}"


@torch.no_grad()
def _error(model: Any, request: Request, sample: Sample) -> float:
    row = torch.tensor([[*request.prompt, *sample.token_ids.tolist()]], device=model.device)
    model.eval()
    log_probs = model(input_ids=row).logits[0].float().log_softmax(-1)[len(request.prompt) - 1 : -1].cpu()
    model.train()
    return float((log_probs.gather(-1, sample.token_ids[:, None])[:, 0] - sample.log_probs).abs().max())


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Print the check and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", choices=("check", "static", "growing", "theirs"))
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.only in (None, "check"):
        print(check(device), flush=True)
    asked = requests(given.prompts, given.group, SHAPE["vocab_size"])
    sampling = Sampling(max_new_tokens=given.tokens)
    total = len(asked) * given.tokens
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, patched, kind in (
        ("embedded", True, "static"), ("embedded, growing cache", True, "growing"),
        ("transformers' generate", False, "theirs"),
    ):  # fmt: skip
        if given.only not in (None, kind):
            continue
        model = build(device, dtype, patched=patched, num_hidden_layers=given.layers)
        own = engine(model, static=kind == "static")

        def run(model: Any = model, own: EmbeddedGenerator = own, kind: str = kind) -> None:
            if kind == "theirs":
                return by_transformers(model, asked, given.tokens)
            own.generate(asked, sampling)

        times = [seconds(run, device) for _ in range(3)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        print(
            f"{name:26} {' '.join(f'{t:7.2f}' for t in times)} s  {total / times[-1]:9,.0f} tok/s  {peak:6.1f} GiB",
            flush=True,
        )
        del model, own, run
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
