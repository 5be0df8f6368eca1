"""What `benchmarks.ops` measures: a row per operator, with the shapes and the bars that they are held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

import strata_kernels

from . import reference
from .case import Case, Inputs, Operator
from .reference import Shape
from .single_operators import SINGLE_OPERATORS

FEATURES = (2304, 2560, 2880, 3584, 5120, 6144, 18944)
VOCABULARIES = (32000, 50257, 50304, 100352, 128256, 151936, 200064, 256000, 262208)


def _rows(rows: int, features: int) -> Shape:
    return {"rows": rows, "features": features}


def _logits(rows: int, vocabulary: int) -> Shape:
    return {"rows": rows, "vocabulary": vocabulary}


def _lean(rows: int, features: int, vocabulary: int, bars: Mapping[str, float]) -> Case:
    """With the weight's gradient summed in its own dtype: less memory, more roundings."""
    return Case(_head(rows, features, vocabulary, lean=1), bars, told={"accumulate": "lean"})


def _half_ignored(rows: int, features: int, vocabulary: int) -> Case:
    """Data loaders see the labels before the GPU does, and so how many of them count."""
    shape = _head(rows, features, vocabulary, ignored=50)
    return Case(shape, {"of full": 0.56}, told={"max_targets": rows - rows * 50 // 100})


def _experts(tokens: int, experts: int, top_k: int, features: int, inner: int) -> Shape:
    return {"tokens": tokens, "experts": experts, "top_k": top_k, "features": features, "inner": inner}


def _experts_label(s: Shape) -> str:
    return f"{s['tokens']} tokens, {s['top_k']} of {s['experts']}, {s['features']}x{s['inner']}"


def _experts_flops(s: Shape) -> float:
    return 18 * s["tokens"] * s["top_k"] * s["features"] * s["inner"]


def _adapted_experts(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor,
                     *factors: Tensor) -> Tensor:  # fmt: skip
    of_up, of_down = (strata_kernels.LowRank(*pair, reference.LORA_SCALE) for pair in (factors[:2], factors[2:]))
    return strata_kernels.experts(x, gate_up, down, index, weights, gate_up_adapter=of_up, down_adapter=of_down)


def _head(rows: int, features: int, vocabulary: int, **more: int) -> Shape:
    return {"rows": rows, "features": features, "vocabulary": vocabulary, **more}


def _heads(batch: int, positions: int, heads: int, kv_heads: int, features: int) -> Shape:
    return {"batch": batch, "positions": positions, "heads": heads, "kv_heads": kv_heads, "features": features}


def _head_elements(s: Shape) -> int:
    return s["batch"] * s["positions"] * (s["heads"] + s["kv_heads"]) * s["features"]


def _heads_label(s: Shape) -> str:
    return f"B{s['batch']} S{s['positions']} {s['heads']}/{s['kv_heads']}x{s['features']}"


def _head_label(s: Shape) -> str:
    ignored = f", {s['ignored']} % ignored" if "ignored" in s else ""
    return f"{s['rows']}x{s['features']}x{s['vocabulary']}{', lean' if 'lean' in s else ''}{ignored}"


def _head_flops(s: Shape) -> float:
    return 6 * s["rows"] * (1 - s.get("ignored", 0) / 100) * s["features"] * s["vocabulary"]


def _twice_head_flops(s: Shape) -> float:
    """With the logits computed once more."""
    return 8 * s["rows"] * s["features"] * s["vocabulary"]


def _answers(answers: int, rows: int, features: int, vocabulary: int) -> Shape:
    return {"answers": answers, "rows": rows, "features": features, "vocabulary": vocabulary}


def _answers_label(s: Shape) -> str:
    return f"{s['answers']} answers, {s['rows']}x{s['features']}x{s['vocabulary']}"


# Beside the gradients of 8192x4096 hidden states and of the head, 1066 MiB.
_ANSWER_BARS = {"of products": 1 / 0.80, "extra MiB": 2 * 1024 + 1066}
_BY_FEATURES = ("features", FEATURES, {"rows": 16384})


def _of_answers(
    name: str, answers: int, ours: Callable[..., Any], of: Callable[..., Tensor], inputs: Inputs
) -> Operator:
    """A loss of so many answers over a head: `ours` returns it as a field, `of` computes it by a function of rows."""
    return Operator(
        name=name,
        ours=lambda *inputs: ours(*inputs).loss,
        torch=partial(of, reference.linear_logprobs),
        exact=partial(of, reference.linear_logprobs_exact),
        inputs=inputs,
        cases=(Case(_answers(answers, 8192, 4096, 128256), _ANSWER_BARS),),
        flops=_twice_head_flops,
        products=reference.answers_products,
        label=_answers_label,
    )


OPERATORS = (
    Operator(
        name="rms_norm",
        ours=strata_kernels.rms_norm,
        torch=reference.rms_norm,
        inputs=reference.rms_norm_inputs,
        cases=(
            Case(_rows(16384, 4096), {"share": 0.88}),
            Case(_rows(8192, 8192), {"share": 0.88}),
            Case(_rows(65536, 128), {"share": 0.70}),
            Case(_rows(16384, 2560), {"share": 0.85}),
            Case(_rows(8192, 16384), {"share": 0.85}),
            Case(_rows(512, 2048), {"of nn wall": 1.0}, wall=True),
        ),
        sweep=_BY_FEATURES,
        bytes=10,
    ),
    Operator(
        name="add_rms_norm",
        ours=lambda x, residual, weight: strata_kernels.add_rms_norm(x, residual, weight, reference.RMS_EPS),
        torch=reference.add_rms_norm,
        inputs=reference.add_rms_norm_inputs,
        cases=(Case(_rows(16384, 4096), {"share": 0.88}), Case(_rows(8192, 8192)), Case(_rows(512, 2048), wall=True)),
        sweep=_BY_FEATURES,
        bytes=16,
    ),
    Operator(
        name="layer_norm",
        ours=lambda x, weight, bias: strata_kernels.layer_norm(x, weight, bias, reference.LAYER_EPS),
        torch=reference.layer_norm,
        inputs=reference.layer_norm_inputs,
        cases=(Case(_rows(16384, 4096), {"share": 0.85}), Case(_rows(16384, 1024)), Case(_rows(512, 2048), wall=True)),
        sweep=_BY_FEATURES,
        bytes=10,
    ),
    Operator(
        name="rope",
        ours=strata_kernels.rope,
        torch=reference.rope,
        inputs=reference.rope_inputs,
        cases=(Case(_heads(2, 8192, 32, 8, 128), {"share": 0.95}), Case(_heads(1, 32768, 32, 4, 64))),
        bytes=8,
        elements=_head_elements,
        label=_heads_label,
    ),
    Operator(
        name="qk_norm_rope",
        ours=lambda q, k, q_weight, k_weight, cos, sin: strata_kernels.qk_norm_rope(
            q, k, q_weight, k_weight, cos, sin, eps=reference.RMS_EPS
        ),
        torch=reference.qk_norm_rope,
        inputs=reference.qk_norm_rope_inputs,
        cases=(Case(_heads(2, 8192, 32, 8, 128), {"share": 0.85}), Case(_heads(1, 32768, 32, 4, 64))),
        bytes=10,
        elements=_head_elements,
        label=_heads_label,
    ),
    Operator(
        name="swiglu",
        ours=strata_kernels.swiglu,
        torch=reference.swiglu,
        inputs=reference.pair_inputs,
        cases=(Case(_rows(8192, 14336), {"share": 0.98}), Case(_rows(16384, 8192))),
        sweep=_BY_FEATURES,
        bytes=16,
    ),
    Operator(
        name="geglu",
        ours=lambda gate, up: strata_kernels.geglu(gate, up, approximate="tanh"),
        torch=reference.geglu,
        inputs=reference.pair_inputs,
        cases=(Case(_rows(8192, 14336), {"share": 0.98}), Case(_rows(16384, 8192))),
        sweep=_BY_FEATURES,
        bytes=16,
    ),
    Operator(
        name="gelu",
        ours=lambda x: strata_kernels.gelu(x, "tanh"),
        torch=reference.gelu,
        inputs=reference.rows_inputs,
        # The towers of SigLIP so400m (Gemma 3, PaliGemma) and of Qwen2-VL.
        cases=(Case(_rows(65536, 4304)), Case(_rows(65536, 5120))),
        bytes=10,
    ),
    Operator(
        name="quick_gelu",
        ours=lambda x: strata_kernels.gelu(x, "sigmoid"),
        torch=reference.quick_gelu,
        inputs=reference.rows_inputs,
        cases=(Case(_rows(65536, 5120)),),
        bytes=10,
    ),
    Operator(
        name="gelu_linear",
        ours=lambda x, weight, bias: strata_kernels.gelu(x, "tanh", weight=weight, bias=bias),
        torch=reference.gelu_linear,
        inputs=reference.mlp_inputs,
        cases=(Case(_rows(65536, 1152) | {"inner": 4304}), Case(_rows(65536, 1280) | {"inner": 5120})),
        flops=lambda s: 6 * s["rows"] * s["features"] * s["inner"],
        label=lambda s: f"{s['rows']}x{s['inner']}x{s['features']}",
    ),
    Operator(
        name="relu_squared",
        ours=strata_kernels.relu_squared,
        torch=reference.relu_squared,
        inputs=reference.rows_inputs,
        cases=(Case(_rows(8192, 14336)), Case(_rows(16384, 8192))),
        sweep=_BY_FEATURES,
        bytes=10,
    ),
    Operator(
        name="experts",
        ours=strata_kernels.experts,
        torch=reference.experts,
        inputs=reference.experts_inputs,
        cases=(
            # Qwen3-30B-A3B, with many and with few tokens of an expert; Mixtral 8x7B.
            Case(_experts(16384, 128, 8, 2048, 768), {"of grouped_mm": 0.83}),
            Case(_experts(2048, 128, 8, 2048, 768)),
            Case(_experts(8192, 8, 2, 4096, 14336)),
        ),
        flops=_experts_flops,
        waits=True,
        label=_experts_label,
    ),
    Operator(
        name="experts_lora",
        ours=_adapted_experts,
        torch=reference.experts_lora,
        inputs=reference.experts_lora_inputs,
        cases=(
            Case(_experts(16384, 128, 8, 2048, 768) | {"rank": 16}, {"of grouped_mm": 0.83}),
            Case(_experts(16384, 128, 8, 2048, 768) | {"rank": 64}),
        ),
        # Frozen weights have no gradients.
        flops=lambda shape: _experts_flops(shape) * 2 / 3,
        waits=True,
        label=lambda shape: f"{_experts_label(shape)}, rank {shape['rank']}",
    ),
    Operator(
        name="cross_entropy",
        ours=strata_kernels.cross_entropy,
        torch=reference.cross_entropy,
        inputs=reference.cross_entropy_inputs,
        cases=(
            Case(_logits(8192, 32000), {"share": 0.80}),
            Case(_logits(8192, 128256), {"share": 0.72}),
            Case(_logits(4096, 262144), {"share": 0.70}),
        ),
        sweep=("vocabulary", VOCABULARIES, {"rows": 4096}),
        bytes=4,
        elements=lambda shape: shape["rows"] * shape["vocabulary"],
    ),
    Operator(
        name="linear_cross_entropy",
        ours=strata_kernels.linear_cross_entropy,
        torch=reference.linear_cross_entropy,
        exact=reference.linear_cross_entropy_exact,
        inputs=reference.linear_cross_entropy_inputs,
        cases=(
            Case(_head(8192, 4096, 128256), {"of products": 1.05, "extra MiB": 1.4 * 1024}),
            Case(_head(8192, 3072, 262144), {"of products": 1.08, "extra MiB": 2.2 * 1024}),
            Case(_head(16384, 2048, 151936), {"of products": 1.08, "extra MiB": 2.2 * 1024}),
            Case(_head(32768, 4096, 128256), {"of products": 1.08, "extra MiB": 2.2 * 1024}),
            _lean(8192, 4096, 128256, {"of products": 1.05, "extra MiB": 1.4 * 1024}),
            _lean(8192, 3072, 262144, {"of products": 1.08, "extra MiB": 2.2 * 1024}),
            _lean(16384, 2048, 151936, {"of products": 1.08, "extra MiB": 2.2 * 1024}),
            _lean(32768, 4096, 128256, {"of products": 1.08, "extra MiB": 2.2 * 1024}),
            _half_ignored(8192, 4096, 128256),
            _half_ignored(8192, 3072, 262144),
            _half_ignored(16384, 2048, 151936),
            _half_ignored(32768, 4096, 128256),
        ),
        sweep=("vocabulary", VOCABULARIES, {"rows": 4096, "features": 2048}),
        flops=_head_flops,
        products=reference.linear_cross_entropy_products,
        label=_head_label,
    ),
    Operator(
        name="linear_logprobs",
        ours=strata_kernels.linear_logprobs,
        torch=reference.linear_logprobs,
        exact=reference.linear_logprobs_exact,
        inputs=reference.linear_cross_entropy_inputs,
        cases=(
            Case(_head(8192, 4096, 128256), {"of products": 1 / 0.85, "extra MiB": 1.6 * 1024}),
            Case(_head(16384, 2048, 151936), {"of products": 1 / 0.85}),
        ),
        flops=_twice_head_flops,
        products=reference.linear_logprobs_products,
        label=_head_label,
    ),
    Operator(
        name="linear_logprobs_with_entropy",
        ours=strata_kernels.linear_logprobs_with_entropy,
        torch=reference.linear_logprobs_with_entropy,
        exact=reference.linear_logprobs_with_entropy_exact,
        inputs=reference.linear_cross_entropy_inputs,
        cases=(Case(_head(8192, 4096, 128256)), Case(_head(16384, 2048, 151936))),
        flops=_twice_head_flops,
        products=reference.linear_logprobs_products,
        label=_head_label,
    ),
    _of_answers(
        "linear_preference", 8, strata_kernels.linear_preference, reference.preference_of, reference.preference_inputs
    ),
    _of_answers("linear_kto", 8, strata_kernels.linear_kto, reference.kto_of, reference.kto_inputs),
    _of_answers("linear_grpo", 16, strata_kernels.linear_grpo, reference.grpo_of, reference.answers_inputs),
    Operator(
        name="linear_jsd",
        ours=strata_kernels.linear_jsd,
        torch=reference.linear_jsd,
        exact=reference.linear_jsd_exact,
        inputs=reference.linear_jsd_inputs,
        cases=(
            Case(_head(4096, 4096, 128256), {"of products": 1 / 0.80}),
            Case(
                _head(4096, 4096, 128256, lean=1),
                {"of products": 1 / 0.80, "extra MiB": 2 * 1024},
                told={"accumulate": "lean"},
            ),
        ),
        flops=_twice_head_flops,
        products=reference.linear_jsd_products,
        label=_head_label,
    ),
    Operator(
        name="jsd",
        ours=strata_kernels.jsd,
        torch=reference.jsd,
        inputs=reference.jsd_inputs,
        cases=(Case(_logits(8192, 131072), {"share": 0.75}), Case(_logits(8192, 32000))),
        bytes=6,
        elements=lambda shape: shape["rows"] * shape["vocabulary"],
    ),
    *SINGLE_OPERATORS,
)
