"""The others: how each library's operator is called with our inputs, and which libraries are here.

In-place variants are off wherever there is a switch, because ours leave every tensor as it was. All else is as the
library has it by default; where it has a more exact mode, that is a peer of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .case import Operator
from .measure import Function
from .reference import LAYER_EPS, LORA_SCALE, RMS_EPS, grpo_of, kto_of, preference_of
from .single_operators import GROUPS

# As tables name them, in their order; `torch` and `compile` are the operator's own PyTorch function.
NAMES = {
    "torch": "eager PyTorch",
    "nn": "PyTorch's fused",
    "compile": "torch.compile",
    "grouped_mm": "transformers' grouped_mm",
    "scattermoe": "ScatterMoE",
    "liger": "Liger-Kernel",
    "liger_fp32": "Liger-Kernel, fp32 sums",
    "trl": "TRL",
    "quack": "quack",
    "cce": "cut-cross-entropy",
    "cce_exact": "cut-cross-entropy, exact",
}
_DISTRIBUTIONS = (
    "transformers",
    "trl",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "cut-cross-entropy",
    "scattermoe",
)


@dataclass(frozen=True)
class Peer:
    """module: what is imported. call: called with the module and the inputs. waits: for the host, so no graph."""

    module: str
    call: Callable[..., Any]
    waits: bool = False


class _QuackLayerNorm(torch.autograd.Function):
    """quack's kernels as one function: the library leaves them without gradient, and takes fp32 weights."""

    @staticmethod
    def forward(ctx: Any, quack: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, rstd, mean = quack.layernorm_fwd(x, weight.float(), bias.float(), LAYER_EPS, True, True)
        ctx.quack, ctx.dtype = quack, weight.dtype
        ctx.save_for_backward(x, weight, rstd, mean)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd, mean = ctx.saved_tensors
        dx, dw, db = ctx.quack.layernorm_bwd(x, weight.float(), dy, rstd, mean)
        return None, dx, dw.to(ctx.dtype), db.to(ctx.dtype)


def _quack_rope(quack: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """It takes [B, S, H, D] and the angles of one half."""
    half = cos.shape[-1] // 2
    angles = cos[0, :, :half], sin[0, :, :half]
    return tuple(quack.apply_rotary_emb(x.transpose(1, 2), *angles).transpose(1, 2) for x in (q, k))


def _quack_linear_cross_entropy(quack: Any, x: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Its default chunk is 4096 rows; where that is the number of features, too, it raises."""
    return quack.chunked_linear_cross_entropy(x, weight, target, chunk_size=2048 if x.shape[1] == 4096 else 4096)


def _grouped_experts(moe: Any, x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Any:
    """transformers' function takes a module of experts."""
    settings = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    parts = {"num_experts": gate_up.shape[0], "gate_up_proj": gate_up, "down_proj": down, "act_fn": functional.silu}
    module = SimpleNamespace(**settings, **parts, _is_expert_parallel=False)
    module._apply_gate = partial(moe._default_apply_gate, module)
    return moe.grouped_mm_experts_forward(module, x, index, weights)


def _scattered_experts(moe: Any, x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Any:
    """As its `GLUMLP`, whose gate is the second half."""
    order = moe.flatten_sort_count(index, num_experts=gate_up.shape[0])
    h = moe.parallel_linear(x, gate_up.transpose(1, 2), index.shape[1], *order, grouped_out=True)
    gate, up = h.chunk(2, dim=-1)
    return moe.parallel_linear(
        functional.silu(gate) * up, down.transpose(1, 2), 1, *order, gates=weights, grouped_in=True
    )


def _summed_experts(moe: Any, x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor,
                    a_up: Tensor, b_up: Tensor, a_down: Tensor, b_down: Tensor) -> Any:  # fmt: skip
    """As PEFT 0.21 with `target_parameters`: experts with the sums of weights and adapters."""
    sums = [torch.baddbmm(w, b, a, alpha=LORA_SCALE) for w, a, b in ((gate_up, a_up, b_up), (down, a_down, b_down))]
    return _grouped_experts(moe, x, *sums, index, weights)


def _liger_grpo(grpo: Any, x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Any:
    counted, none = torch.ones_like(target), (None,) * 6
    clip, level = (0.2, 0.2), ("grpo", None, "token", 1.0, 1.05, 1.0)
    return grpo.LigerFusedLinearGRPOFunction.apply(
        x, weight, target, counted, advantages, *none, 0.0, *clip, *level, True, False
    )[0]


def _liger_kto(kto: Any, x: Tensor, weight: Tensor, target: Tensor, _: Tensor, desirable: Tensor, kl: Tensor) -> Any:
    """Without reference: that of the inputs is zero."""
    none = (None,) * 4
    return kto.LigerFusedLinearKTOFunction.apply(
        x, weight, target, desirable, *none, kl, -100, 0.1, True, False, False
    )[0]


def _trl_logprobs(trl: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As its trainers call it, 32768 columns at a time, without entropy."""
    found: Tensor = trl.ChunkedLogProbFunction.apply(x, weight, None, target, 1.0, 32768, None, 1.0, ())[0]
    return found


def _trl_logprobs_and_entropies(trl: Any, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_probs, entropies, *_ = trl.ChunkedLogProbFunction.apply(
        x, weight, None, target, 1.0, 32768, None, 1.0, ("entropy",)
    )
    return log_probs, entropies


def _trl_jsd(divergence: Any, x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    rows = divergence.ChunkedDivergenceFunction.apply(x, weight, None, teacher_x, teacher_weight, None, 0.5)[0]
    mean: Tensor = rows.mean()
    return mean


def _liger_cosine(liger: Any, x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Any:
    """Without the cross entropy of labels, which it adds by default."""
    labels = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return liger.liger_fused_linear_cosine(x, weight, teacher_x, teacher_weight, labels, None, None, 0.0, 1.0, 1.0)


_LIGER = "liger_kernel.transformers.functional"
_TRL = "trl.kernels.chunked_logprob"

PEERS: Mapping[str, Mapping[str, Peer]] = {
    "rms_norm": {
        "nn": Peer("torch", lambda _, x, weight: functional.rms_norm(x, weight.shape, weight, RMS_EPS)),
        "liger": Peer(_LIGER, lambda liger, x, weight: liger.liger_rms_norm(x, weight, RMS_EPS, in_place=False)),
        "quack": Peer("quack", lambda quack, x, weight: quack.rmsnorm(x, weight, eps=RMS_EPS)),
    },
    "add_rms_norm": {
        "liger": Peer(
            _LIGER, lambda liger, x, r, weight: liger.liger_fused_add_rms_norm(x, r, weight, RMS_EPS, in_place=False)
        ),
        "quack": Peer(
            "quack", lambda quack, x, r, weight: quack.rmsnorm(x, weight, residual=r, eps=RMS_EPS, prenorm=True)
        ),
    },
    "layer_norm": {
        "liger": Peer(_LIGER, lambda liger, x, weight, bias: liger.liger_layer_norm(x, weight, bias, LAYER_EPS)),
        "quack": Peer("quack.rmsnorm", _QuackLayerNorm.apply),
    },
    "rope": {
        "liger": Peer(_LIGER, lambda liger, *inputs: liger.liger_rope(*inputs)),
        "quack": Peer("quack.rotary", _quack_rope),
    },
    "swiglu": {"liger": Peer(_LIGER, lambda liger, gate, up: liger.liger_swiglu(gate, up))},
    "geglu": {"liger": Peer(_LIGER, lambda liger, gate, up: liger.liger_geglu(gate, up))},
    "relu_squared": {"liger": Peer(_LIGER, lambda liger, x: liger.liger_relu_squared(x))},
    "experts": {
        "grouped_mm": Peer("transformers.integrations.moe", _grouped_experts),
        "scattermoe": Peer("scattermoe.parallel_experts", _scattered_experts, waits=True),
        "liger": Peer(
            "liger_kernel.ops.fused_moe", lambda moe, *inputs: moe.LigerFusedMoEFunction.apply(*inputs), waits=True
        ),
    },
    "experts_lora": {"grouped_mm": Peer("transformers.integrations.moe", _summed_experts, waits=True)},
    "softmax": {
        "nn": Peer("torch", lambda torch, z: torch.softmax(z, -1)),
        "liger": Peer(_LIGER, lambda liger, z: liger.liger_softmax(z)),
        "quack": Peer("quack", lambda quack, z: quack.softmax(z)),
    },
    "sparsemax": {"liger": Peer(_LIGER, lambda liger, z: liger.liger_sparsemax(z))},
    "dyt": {"liger": Peer(_LIGER, lambda liger, *inputs: liger.liger_dyt(*inputs))},
    "poly_norm": {
        "liger": Peer(
            _LIGER, lambda liger, x, weight, bias: liger.liger_poly_norm(x, weight, bias, RMS_EPS, in_place=False)
        )
    },
    "group_norm": {
        "liger": Peer(
            _LIGER, lambda liger, x, weight, bias: liger.liger_group_norm(x, weight, bias, x.shape[1], GROUPS, RMS_EPS)
        )
    },
    "modulated_rms_norm": {
        "liger": Peer(
            _LIGER,
            lambda liger, x, scale, shift, weight: liger.liger_modulated_rms_norm(
                x, weight, scale, shift, RMS_EPS, in_place=False
            ),
        )
    },
    "tvd": {"liger": Peer(_LIGER, lambda liger, p, q: liger.liger_tvd(p, q, reduction="batchmean"), waits=True)},
    "linear_cosine_distance": {"liger": Peer("liger_kernel.chunked_loss.functional", _liger_cosine, waits=True)},
    "cross_entropy": {
        "liger": Peer(_LIGER, lambda liger, logits, target: liger.liger_cross_entropy(logits, target), waits=True),
        "quack": Peer("quack", lambda quack, logits, target: quack.cross_entropy(logits, target)),
    },
    "linear_cross_entropy": {
        "liger": Peer(_LIGER, lambda liger, *inputs: liger.liger_fused_linear_cross_entropy(*inputs), waits=True),
        "liger_fp32": Peer(
            _LIGER,
            lambda liger, *inputs: liger.liger_fused_linear_cross_entropy(*inputs, accum_dtype=torch.float32),
            waits=True,
        ),
        "quack": Peer("quack.linear_cross_entropy", _quack_linear_cross_entropy, waits=True),
        "cce": Peer("cut_cross_entropy", lambda cce, *inputs: cce.linear_cross_entropy(*inputs), waits=True),
        "cce_exact": Peer(
            "cut_cross_entropy", lambda cce, *inputs: cce.linear_cross_entropy(*inputs, impl="cce_exact"), waits=True
        ),
    },
    "linear_logprobs": {"trl": Peer(_TRL, lambda trl, *inputs: _trl_logprobs(trl, *inputs), waits=True)},
    "linear_logprobs_with_entropy": {
        "trl": Peer(_TRL, lambda trl, *inputs: _trl_logprobs_and_entropies(trl, *inputs), waits=True)
    },
    "linear_preference": {
        "liger": Peer(
            "liger_kernel.chunked_loss.dpo_loss",
            # Without reference: that of the inputs is zero.
            lambda liger, x, weight, target, _: liger.LigerFusedLinearDPOFunction.apply(
                x, weight, target, None, None, None, None, -100, 0.1, False, True, False
            )[0],
            waits=True,
        ),
        "trl": Peer(_TRL, lambda trl, *inputs: preference_of(partial(_trl_logprobs, trl), *inputs), waits=True),
    },
    "linear_kto": {
        "liger": Peer("liger_kernel.chunked_loss.kto_loss", _liger_kto, waits=True),
        "trl": Peer(_TRL, lambda trl, *inputs: kto_of(partial(_trl_logprobs, trl), *inputs), waits=True),
    },
    "linear_grpo": {
        "liger": Peer("liger_kernel.chunked_loss.grpo_loss", _liger_grpo, waits=True),
        "trl": Peer(_TRL, lambda trl, *inputs: grpo_of(partial(_trl_logprobs, trl), *inputs), waits=True),
    },
    "linear_jsd": {
        "liger": Peer(_LIGER, lambda liger, *inputs: liger.liger_fused_linear_jsd(*inputs), waits=True),
        "trl": Peer("trl.kernels.chunked_divergence", _trl_jsd, waits=True),
    },
    "jsd": {
        "liger": Peer(
            _LIGER, lambda liger, *logits: liger.liger_jsd(*(x.float().log_softmax(-1) for x in logits)), waits=True
        ),
    },
}


@dataclass(frozen=True)
class Candidate:
    """A function to measure: `graph` where a CUDA graph can hold it."""

    function: Function
    graph: bool = True


def candidate(operator: Operator, name: str) -> Candidate | str:
    """The function of `name`, one of NAMES or "ours", or why there is none."""
    if name == "ours":
        return Candidate(operator.ours)
    if name == "torch":
        return Candidate(operator.torch, graph=not operator.waits)
    if name == "compile" and operator.waits:
        return "waits for the host, so it is no one graph"
    if name == "compile":
        return Candidate(torch.compile(operator.torch, fullgraph=True, dynamic=False))
    peer = PEERS.get(operator.name, {}).get(name)
    if peer is None:
        return "has no such operator"
    try:
        module = importlib.import_module(peer.module)
    except ImportError as error:
        return str(error)
    return Candidate(partial(peer.call, module), graph=not peer.waits)


def versions() -> list[str]:
    """`name version` of the peers that are installed."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
