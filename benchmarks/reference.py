"""The operators' inputs, and each operator as eager PyTorch and transformers write it: in fp64 the truth.

A shape maps names of sizes to sizes; inputs come from (shape, dtype, device), those that require gradients are
differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Shape = Mapping[str, int]

RMS_EPS = 1e-6
# alpha / r of the adapters of experts.
LORA_SCALE = 2.0
LAYER_EPS = 1e-5
IGNORE_INDEX = -100


def random(*sizes: int, dtype: torch.dtype, device: torch.device, trained: bool = True) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.float32).to(dtype).requires_grad_(trained)


def rows_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x: [rows, features]."""
    return (random(shape["rows"], shape["features"], dtype=dtype, device=device),)


def pair_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Two of [rows, features]."""
    return (*rows_inputs(shape, dtype, device), *rows_inputs(shape, dtype, device))


def _vector(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return random(shape["features"], dtype=dtype, device=device)


def rms_norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (*rows_inputs(shape, dtype, device), _vector(shape, dtype, device))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS)).to(x.dtype)


def add_rms_norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (*pair_inputs(shape, dtype, device), _vector(shape, dtype, device))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms_norm(h, weight), h


def layer_norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (*rows_inputs(shape, dtype, device), _vector(shape, dtype, device), _vector(shape, dtype, device))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, LAYER_EPS)


def rope_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """As attention gives them: heads and positions transposed, cos and sin shared by the batch."""
    batch, positions, features = shape["batch"], shape["positions"], shape["features"]
    q, k = (
        random(batch, positions, shape[heads], features, dtype=dtype, device=device).detach().transpose(1, 2)
        for heads in ("heads", "kv_heads")
    )
    frequencies = 1e4 ** -(torch.arange(features // 2, device=device) / (features // 2))
    angle = torch.outer(torch.arange(positions, device=device), frequencies).repeat(1, 2)[None]
    return q.requires_grad_(), k.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]

    return rotate(q), rotate(k)


def qk_norm_rope_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    q, k, cos, sin = rope_inputs(shape, dtype, device)
    return q, k, _vector(shape, dtype, device), _vector(shape, dtype, device), cos, sin


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def mlp_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x: [rows, inner], weight and bias of a layer from there to `features`."""
    x = random(shape["rows"], shape["inner"], dtype=dtype, device=device)
    weight = (torch.randn(shape["features"], shape["inner"], device=device) * shape["inner"] ** -0.5).to(dtype)
    return x, weight.requires_grad_(), _vector(shape, dtype, device)


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(gelu(x), weight, bias)


def relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def experts_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x [T, H], gate and up [E, 2 * I, H], down [E, H, I], index and weights [T, K] of random scores."""
    tokens, count, width, inner = shape["tokens"], shape["experts"], shape["features"], shape["inner"]
    x = random(tokens, width, dtype=dtype, device=device)
    up = (random(count, 2 * inner, width, dtype=dtype, device=device).detach() * width**-0.5).requires_grad_()
    down = (random(count, width, inner, dtype=dtype, device=device).detach() * inner**-0.5).requires_grad_()
    weights, index = torch.randn(tokens, count, device=device).softmax(-1).topk(shape["top_k"])
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    return x, up, down, index, weights.requires_grad_()


def experts(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The loop over experts of transformers' eager implementation."""
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, slot = torch.where(index == e)
        gate, up = functional.linear(x[token], gate_up[e]).chunk(2, dim=-1)
        y = functional.linear(functional.silu(gate) * up, down[e]) * weights[token, slot, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def experts_lora_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """As `experts_inputs` with frozen weights; a [E, R, K] and b [E, N, R] of gate and up, and of down."""
    x, up, down, index, weights = experts_inputs(shape, dtype, device)
    rank, factors = shape["rank"], []
    for weight in (up, down):
        count, outputs, inputs = weight.shape
        a = random(count, rank, inputs, dtype=dtype, device=device).detach() * inputs**-0.5
        # As in training: small beside the weight.
        b = random(count, outputs, rank, dtype=dtype, device=device).detach() * 0.02
        factors += [a.requires_grad_(), b.requires_grad_()]
    return x, up.detach(), down.detach(), index, weights, *factors


def experts_lora(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
    """PEFT's sums of weights and adapters, and `experts`."""
    a_up, b_up, a_down, b_down = factors
    sums = [torch.baddbmm(w, b, a, alpha=LORA_SCALE) for w, a, b in ((gate_up, a_up, b_up), (down, a_down, b_down))]
    return experts(x, *sums, index, weights)


def cross_entropy_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    logits = random(shape["rows"], shape["vocabulary"], dtype=dtype, device=device)
    return logits, torch.randint(shape["vocabulary"], (shape["rows"],), device=device)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def linear_cross_entropy_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """`ignored`: the percentage of the rows that are, here and there."""
    rows, features, vocabulary = shape["rows"], shape["features"], shape["vocabulary"]
    x = random(rows, features, dtype=dtype, device=device)
    weight = (torch.randn(vocabulary, features, device=device) * features**-0.5).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (rows,), device=device)
    target[torch.randperm(rows, device=device)[: rows * shape.get("ignored", 0) // 100]] = IGNORE_INDEX
    return x, weight, target


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(functional.linear(x, weight), target)


def linear_cross_entropy_exact(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """`linear_cross_entropy` that holds the logits of 1024 rows at a time: in fp64 all of them are too many."""

    def summed(x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight), target, reduction="sum")

    parts = zip(x.split(1024), target.split(1024), strict=True)
    losses = [checkpoint(summed, x, target, use_reentrant=False) for x, target in parts]
    return torch.stack(losses).sum() / (target != IGNORE_INDEX).sum()


def linear_cross_entropy_products(x: Tensor, weight: Tensor, _: Tensor) -> None:
    """The three products of linear_cross_entropy, over all rows at once: logits, then dx and dW from them."""
    logits = x @ weight.t()
    logits @ weight
    logits.t() @ x


def linear_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -cross_entropy_of_rows(functional.linear(x, weight), target)


def cross_entropy_of_rows(logits: Tensor, target: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, target, reduction="none")


def linear_logprobs_exact(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """`linear_logprobs` that holds the logits of 1024 rows at a time."""
    parts = zip(x.split(1024), target.split(1024), strict=True)
    run = lambda x, target: linear_logprobs(x, weight, target)  # noqa: E731
    return torch.cat([checkpoint(run, x, target, use_reentrant=False) for x, target in parts])


def linear_logprobs_with_entropy(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(x, weight)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def linear_logprobs_with_entropy_exact(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """`linear_logprobs_with_entropy` that holds the logits of 1024 rows at a time."""
    parts = zip(x.split(1024), target.split(1024), strict=True)
    run = lambda x, target: linear_logprobs_with_entropy(x, weight, target)  # noqa: E731
    log_probs, entropies = zip(*(checkpoint(run, x, target, use_reentrant=False) for x, target in parts), strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def linear_logprobs_products(x: Tensor, weight: Tensor, _: Tensor) -> None:
    """The four products of linear_logprobs, over all rows at once: the backward pass computes the logits once more."""
    x @ weight.t()
    logits = x @ weight.t()
    logits @ weight
    logits.t() @ x


def jsd_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Logits of a student, and of a teacher that is near it."""
    logits = torch.randn(shape["rows"], shape["vocabulary"], device=device)
    teacher = (logits + torch.randn(shape["rows"], shape["vocabulary"], device=device)).to(dtype)
    return logits.to(dtype).requires_grad_(), teacher


def jsd(logits: Tensor, teacher: Tensor) -> Tensor:
    """The lines of TRL's function, per row."""
    log_p, log_q = (x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1) for x in (logits, teacher))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    terms = (functional.kl_div(log_m, y, reduction="none", log_target=True) for y in (log_p, log_q))
    return sum(terms).sum() / (2 * logits.shape[0])


def linear_jsd_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x and the head, then those of a teacher of the same width."""
    x, weight, _ = linear_cross_entropy_inputs(shape, dtype, device)
    teacher = linear_cross_entropy_inputs(shape, dtype, device)[:2]
    return x, weight, *(t.detach() for t in teacher)


def linear_jsd(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    return jsd(functional.linear(x, weight), functional.linear(teacher_x, teacher_weight))


def linear_jsd_exact(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """`linear_jsd` that holds the logits of 512 rows at a time."""
    parts = zip(x.split(512), teacher_x.split(512), strict=True)
    run = lambda x, t: linear_jsd(x, weight, t, teacher_weight) * x.shape[0]  # noqa: E731
    return torch.stack([checkpoint(run, *part, use_reentrant=False) for part in parts]).sum() / x.shape[0]


def linear_jsd_products(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> None:
    """The four products of linear_jsd, over all rows at once."""
    teacher_x @ teacher_weight.t()
    logits = x @ weight.t()
    logits @ weight
    logits.t() @ x


def answers_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x [answers, T, H] and targets [answers, T]; a number per answer, near what its log-probability is."""
    x, weight, target = linear_cross_entropy_inputs(shape, dtype, device)
    answers = shape["answers"]
    return (
        x.detach().view(answers, -1, x.shape[-1]).requires_grad_(), weight, target.view(answers, -1),
        torch.linspace(-0.5, 1, answers, device=device),
    )  # fmt: skip


def preference_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """As `answers_inputs`, with log-probabilities of a reference model of zero, which a peer takes that has none."""
    *inputs, numbers = answers_inputs(shape, dtype, device)
    return *inputs, torch.zeros_like(numbers)


def kto_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """As `preference_inputs`, then which answers are desirable, and a divergence near which no loss is flat."""
    x, weight, target, reference = preference_inputs(shape, dtype, device)
    desirable = torch.arange(shape["answers"], device=device) % 2 == 0
    with torch.no_grad():
        some = linear_logprobs(x.flatten(0, 1)[:64], weight, target.flatten()[:64])
    return x, weight, target, reference, desirable, some.mean() * target.shape[1]


LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


def _answers(log_probs: LogProbs, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities [answers, T] by a function of rows."""
    return log_probs(x.flatten(0, 1), weight, target.flatten()).view(target.shape)


def preference_of(log_probs: LogProbs, x: Tensor, weight: Tensor, target: Tensor, reference: Tensor) -> Tensor:
    """The sigmoid loss of DPO."""
    chosen, rejected = (_answers(log_probs, x, weight, target).sum(1) - reference).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def kto_of(
    log_probs: LogProbs, x: Tensor, weight: Tensor, target: Tensor, reference: Tensor, desirable: Tensor, kl: Tensor
) -> Tensor:
    """The loss of KTO."""
    above = _answers(log_probs, x, weight, target).sum(1) - reference - kl
    return 1 - torch.sigmoid(0.1 * torch.where(desirable, above, -above)).mean()


def grpo_of(log_probs: LogProbs, x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    """Ratios are one: the policy is the one that the answers are from."""
    values = _answers(log_probs, x, weight, target)
    return -((values - values.detach()).exp().mean(1) * advantages).mean()


def answers_products(x: Tensor, weight: Tensor, target: Tensor, *_: Tensor) -> None:
    """The four products of linear_logprobs."""
    linear_logprobs_products(x.flatten(0, 1), weight, target)
