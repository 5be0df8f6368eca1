"""What masks over packed rows cost: forward and backward passes of cut models, with masks and with varlen attention.

    PYTHONPATH=kernels:platform:. python -m benchmarks.masks [--only gpt_oss olmoe]

Shapes of released models with fewer layers and random weights, bf16, the kernels on, no optimizer. Rows have 4096
tokens: texts of 200 to 1200 tokens, or one text. With masks, attention is what transformers would use (`sdpa`, or
`eager` where there is none). Each cell is the median of five passes after two, and the peak of memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from strata_kernels import patch_model
from tasks.runtime.models.attention.attention_choice import choose_attention
from tasks.runtime.models.attention.flash_attention_4 import installed_version
from tasks.runtime.models.attention.varlen_attention import add_cu_seqlens, set_varlen_attention
from tasks.runtime.models.build import support_packed_rows, use_no_cache

LENGTH, PASSES, UNTIMED = 4096, 7, 2
# Model type: rows, and fields of its configuration. Of gpt-oss 20B, OLMoE 1B-7B, GLM-4.5, Moonlight 16B-A3B and
# StarCoder2 3B.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt_oss": (1, {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "vocab_size": 201088, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128,
    }),
    "olmoe": (2, {
        "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
    }),
    "glm4_moe": (2, {
        "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 3,
        "first_k_dense_replace": 1, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "vocab_size": 151552,
    }),
    "deepseek_v3": (2, {
        "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "num_hidden_layers": 4,
        "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "topk_group": 1, "n_shared_experts": 2, "vocab_size": 163840,
    }),
    "starcoder2": (2, {
        "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 10, "num_attention_heads": 24,
        "num_key_value_heads": 2, "vocab_size": 49152, "bos_token_id": 0, "eos_token_id": 0,
    }),
}  # fmt: skip


def build(model_type: str, device: torch.device) -> PreTrainedModel:
    """The model, in training mode, with its kernels."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **MODELS[model_type][1])
    attention = choose_attention("auto", config)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    use_no_cache(model)
    support_packed_rows(model)
    patch_model(model)
    return model.train()


def rows_of(model_type: str, *, short: bool) -> dict[str, Tensor]:
    """Random tokens in rows of several texts, or of one."""
    draw, positions = torch.Generator().manual_seed(0), []
    for _ in range(MODELS[model_type][0]):
        lengths: list[int] = []
        while (left := LENGTH - sum(lengths)) > 0:
            lengths.append(min(int(torch.randint(200, 1200, (1,), generator=draw)), left) if short else left)
        positions.append(torch.cat([torch.arange(length) for length in lengths]))
    tokens = torch.randint(10, 49_000, (len(positions), LENGTH), generator=draw)
    return {"input_ids": tokens, "position_ids": torch.stack(positions)}


def measure(model: PreTrainedModel, batch: dict[str, Tensor]) -> str:
    """Milliseconds of a forward and a backward pass, and GiB."""
    seconds = []
    for number in range(PASSES):
        if number == UNTIMED:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    gib = torch.cuda.max_memory_allocated() / 2**30
    return f"{statistics.median(seconds[UNTIMED:]) * 1e3:.1f} ms, {gib:.1f} GiB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flash-attn-4 {installed_version()}\n")
    print("| model | rows | with masks | varlen |\n| --- | --- | --- | --- |")
    for model_type in arguments.only:
        model = build(model_type, device)
        for short in (True, False):
            batch = rows_of(model_type, short=short)
            bounds = {name: x.to(device) for name, x in add_cu_seqlens(batch).items()}
            model.set_attn_implementation(choose_attention("auto", model.config))
            masked = measure(model, {name: bounds[name] for name in batch})
            set_varlen_attention(model)
            rows = f"{len(batch['input_ids'])} x {LENGTH}, {'several texts' if short else 'one text'}"
            print(f"| {model_type} | {rows} | {masked} | {measure(model, bounds)} |", flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
