"""Causal attention by FlashAttention 4, where the package `flash-attn-4` is installed.

PyTorch's own operators run cuDNN on rows of one sequence, and on packed rows FlashAttention 2, which was written for
GPUs before Hopper. The package compiles its kernels when they are first called, 4 s each, unless `keep_kernels` named a
folder in which it finds them.
Source: https://github.com/Dao-AILab/flash-attention, `flash_attn/cute`.

Its functions are wrapped into operators of PyTorch's: so `per_op` keeps their results, and torch.compile sees one node.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.runtime.models.layer_configs import head_width, layer_configs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

# Versions whose results and gradients a test has held against fp64, on Hopper, for heads of these sizes. Other betas
# have other arguments, or no backward pass of packed rows there.
_TESTED = ("4.0.0b36",)
_MAJOR = 9
_SIZES = (64, 128)
KEEP, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""The package's variables: whether it keeps compiled kernels in a folder, and which. It reads them when imported."""
_OURS = "flash_attention_4"


def usable_version(config: PretrainedConfig) -> str | None:
    """Of `flash-attn-4`, if it computes the attention of models of this configuration in training on this machine."""
    text = config.get_text_config()
    sizes = {head_width(layer) for layer in layer_configs(text)}
    dropout: float = getattr(text, "attention_dropout", None) or 0.0
    # Latent attention has keys of another size than values; `head_dim` is that of the rotated part of keys.
    if not sizes <= {*_SIZES} or dropout or getattr(text, "kv_lora_rank", None):
        return None
    return installed_version()


@cache
def installed_version() -> str | None:
    """Of `flash-attn-4`, if it is a tested one and this machine's GPU is one that it was tested on."""
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability()[0] != _MAJOR:
        return None
    return tested_version()


@cache
def tested_version() -> str | None:
    """Of `flash-attn-4`, if it is installed and a tested one. Asks nothing of a GPU, so processes may fork later."""
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return None
    if found not in _TESTED:
        log.warning("flash-attn-4 %s is not used: %s is known to be exact; install that", found, " or ".join(_TESTED))
        return None
    return found


def keep_kernels(inside: Path) -> None:
    """Have the package, in this process and its children, keep its kernels in a folder in `inside` and find them there.

    A folder that the environment already names stays.
    """
    if tested_version() is None or Path(os.environ.get(FOLDER, _OURS)).name != _OURS:
        return
    os.environ[FOLDER] = str(inside / _OURS)
    os.environ.setdefault(KEEP, "1")


def kept_kernels(inside: Path) -> int:
    """The number of kernels that it keeps there."""
    return sum(1 for _ in (inside / _OURS).rglob("[!.]*.o"))


def takes(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether the operator computes attention of these queries and values, [..., D]; on the meta device, would."""
    sizes = query.shape[-1], value.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type != "cpu" and half and sizes[0] in _SIZES and sizes[0] == sizes[1] and not dropout


def flash_attention_4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None = None,
    longest: tuple[int, int] | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention: of whole rows, query [B, T, H, D] against key and value [B, T, K, D], or of their sequences.

    The equivalent of `scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)` with heads before tokens,
    and of `torch.nn.attention.varlen.varlen_attn`.

    Args:
        ends: [2, sequences + 1], int32, cumulative lengths of queries and of keys. Then query is [N, H, D], key and
            value [M, K, D], and the last query of a sequence sees all of its keys.
        longest: upper bounds of the lengths of a sequence, of queries and of keys.
        scale: of scores; None is 1 / √D.
        window: how many tokens a query sees, with its own; None is all before it.

    Returns:
        As query.
    """
    lengths = (None, None) if ends is None else ends.unbind()
    result: Tensor = forward(query, key, value, *lengths, *(longest or (None, None)), scale, window)[0]
    return result


@cache
def _package() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _settings(
    query_ends: Tensor | None, key_ends: Tensor | None, longest_query: int | None, longest_key: int | None,
    scale: float | None, window: int | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "cu_seqlens_q": query_ends,
        "cu_seqlens_k": key_ends,
        "max_seqlen_q": longest_query,
        "max_seqlen_k": longest_key,
        "softmax_scale": scale,
        "causal": True,
        # Tokens before the query's own.
        "window_size_left": None if window is None else window - 1,
    }


@torch.library.custom_op("strata_runtime::flash_attention_4", mutates_args=())
def forward(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor | None, key_ends: Tensor | None,
    longest_query: int | None, longest_key: int | None, scale: float | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and the logarithms of the sums of exponentials, fp32, [B, H, T] or [H, N]."""
    settings = _settings(query_ends, key_ends, longest_query, longest_key, scale, window)
    result, sums, *_ = _package()._flash_attn_fwd(query, key, value, return_lse=True, **settings)
    return result, sums


@forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_settings: Any) -> tuple[Tensor, Tensor]:
    *rows, tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(*rows, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("strata_runtime::flash_attention_4_bwd", mutates_args=())
def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, sums: Tensor,
    query_ends: Tensor | None, key_ends: Tensor | None, longest_query: int | None, longest_key: int | None,
    scale: float | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    settings = _settings(query_ends, key_ends, longest_query, longest_key, scale, window)
    # By default atomic additions make a query's gradient of parts in any order.
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
    gradients = _package()._flash_attn_bwd(query, key, value, result, grad.contiguous(), sums, **settings)
    return gradients[0], gradients[1], gradients[2]


@backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, query_ends, key_ends, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, query_ends, key_ends)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, grad_sums: None) -> tuple[Tensor | None, ...]:
    assert grad_sums is None, "flash_attention_4 returns the result alone"
    return (*backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 6)


forward.register_autograd(_differentiate, setup_context=_save)
