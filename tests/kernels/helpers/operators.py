"""Every operator beside PyTorch's own way to compute it, on small tensors.

A new operator needs a line in OPERATORS; `test_layouts.py` says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import strata_kernels

EPS = 1e-5
Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Operator:
    """How an operator and PyTorch are called with the same tensors.

    trained: names and shapes of tensors that get a gradient.
    given: names and values of those that get none.
    results: shapes of the results.
    roundings: of a value on its way through, in ours and in PyTorch's.
    """

    ours: Function
    torchs: Function
    trained: dict[str, tuple[int, ...]]
    results: tuple[tuple[int, ...], ...]
    given: dict[str, Tensor]
    roundings: int = 1

    def inputs(self) -> dict[str, Tensor]:
        """Random values for `trained`, then `given`."""
        return {**{name: torch.randn(shape) for name, shape in self.trained.items()}, **self.given}

    def differentiate(self, function: Function, tensors: list[Tensor], incoming: list[Tensor]) -> list[Tensor]:
        """The results of `ours` or `torchs`, and the gradients of the trained tensors."""
        leaves = [x.detach().requires_grad_() for x in tensors[: len(self.trained)]]
        results = function(*leaves, *tensors[len(self.trained) :])
        results = results if isinstance(results, tuple) else (results,)
        return [*(y.detach() for y in results), *torch.autograd.grad(results, leaves, incoming)]


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return torch_rms_norm(h, weight), h


def torch_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As transformers writes it; angles [B, S, D / 2]."""
    cos, sin = (a[:, None].repeat(1, 1, 1, 2) for a in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(q), rotate(k)


def torch_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Neighboring features are a pair; q and k are [B, S, H, D], angles a table [rows, D] that holds each twice."""
    cos, sin = (a[:, ::2][positions][:, :, None] for a in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

    return rotate(q), rotate(k)


def torch_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    return torch_rope(torch_rms_norm(q, q_weight), torch_rms_norm(k, k_weight), cos, sin)


def torch_experts(x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, index: Tensor) -> Tensor:
    """The dense sum over all experts, whose weights are 0 where a token is not routed to."""
    gate, up = torch.einsum("th,enh->ten", x, gate_up).chunk(2, dim=-1)
    y = torch.einsum("tei,ehi->teh", functional.silu(gate) * up, down)
    return (y * (functional.one_hot(index, len(down)) * router[..., None]).sum(1)[..., None]).sum(1)


def torch_losses(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """[...] from logits [..., V]."""
    losses = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), weight, reduction="none")
    return losses.view(target.shape)


def torch_linear_losses(
    x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, class_weight: Tensor, row_weight: Tensor
) -> Tensor:
    return torch_losses(functional.linear(x, weight, bias), target, class_weight) * row_weight


def torch_log_probs(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies, 0 where there is no target."""
    log_p, counted = functional.linear(x, weight, bias).log_softmax(-1), target >= 0
    own = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return own.where(counted, 0.0), -(log_p.exp() * log_p).sum(-1).where(counted, 0.0)


def torch_poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    def norm(u: Tensor) -> Tensor:
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS)

    return weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias


def torch_sparsemax(z: Tensor) -> Tensor:
    ordered = z.sort(-1, descending=True).values
    inside = 1 + torch.arange(1, z.shape[-1] + 1, device=z.device) * ordered > ordered.cumsum(-1)
    tau = (ordered.where(inside, 0.0).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
    return (z - tau).clamp(min=0)


def torch_jsd(logits: Tensor, teacher: Tensor) -> Tensor:
    """[...] from logits [..., V], with beta 0.5."""
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    return ((log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2).sum(-1)


def torch_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student), [...]."""
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def three_tokens(first: Tensor) -> Tensor:
    """[..., 3], of 7, that differ from each other."""
    return (first + torch.arange(3, device=first.device)) % 7


def torch_topk_kl(x: Tensor, weight: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
    log_p = functional.linear(x, weight).log_softmax(-1).gather(-1, tokens)
    return (log_probs.exp() * (log_probs - log_p)).sum()


def torch_grpo(x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    """Ratios are one, and their gradients are those of log-probabilities."""
    log_probs = torch_log_probs(x, weight, torch.zeros_like(weight[:, 0]), target)[0]
    ratio = (log_probs - log_probs.detach()).exp() * (target >= 0)
    return -(ratio.sum(1) / (target >= 0).sum(1) * advantages).mean()


def torch_preference(x: Tensor, weight: Tensor, target: Tensor, reference: Tensor) -> Tensor:
    log_probs = torch_log_probs(x, weight, torch.zeros_like(weight[:, 0]), target)[0].sum(1)
    chosen, rejected = (log_probs - reference).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def torch_kto(x: Tensor, weight: Tensor, target: Tensor, reference: Tensor, desirable: Tensor) -> Tensor:
    log_probs = torch_log_probs(x, weight, torch.zeros_like(weight[:, 0]), target)[0].sum(1)
    ratio = 0.1 * (log_probs - reference)
    return (1 - torch.where(desirable, ratio, -ratio).sigmoid()).mean()


def linear_losses(reduction: str) -> Function:
    def run(
        x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, class_weight: Tensor, row_weight: Tensor
    ) -> Tensor:
        return strata_kernels.linear_cross_entropy(
            x, weight, target, bias=bias, class_weight=class_weight, row_weight=row_weight, reduction=reduction
        )

    return run


GENERATOR = torch.Generator().manual_seed(0)
X, PACKED, D, HIDDEN = (2, 3, 8), (2, 3, 16), (8,), (5, 8)
Q, K, LOGITS, CLASSES = (2, 3, 3, 8), (2, 2, 3, 8), (2, 2, 7), (7,)
ANGLE, TABLE = torch.randn(2, 3, 4, generator=GENERATOR), torch.randn(5, 8, generator=GENERATOR)
ANGLES = {"cos": ANGLE.cos(), "sin": ANGLE.sin()}
TABLES = {"cos": TABLE.cos(), "sin": TABLE.sin(), "positions": torch.tensor([[0, 4, 2], [3, 0, 1]])}
TARGET = {"target": torch.tensor([[3, -100], [6, 0]])}
CLASS_WEIGHT = {"class_weight": torch.rand(CLASSES, generator=GENERATOR) + 0.5}
LINEAR = {"x": (2, 2, 8), "weight": (7, 8), "bias": CLASSES}
LINEAR_GIVEN = {**TARGET, **CLASS_WEIGHT, "row_weight": torch.rand(2, 2, generator=GENERATOR)}
TEACHER = {"teacher": torch.randn(LOGITS, generator=GENERATOR)}
TEACHER_HEAD = {
    "teacher_x": torch.randn(2, 2, 6, generator=GENERATOR), "teacher_weight": torch.randn(7, 6, generator=GENERATOR),
}  # fmt: skip
DIFFERENT = torch.randn(7, generator=torch.Generator().manual_seed(1))
TOP_K = {
    "first": torch.tensor([[[0], [3]], [[6], [1]]]),
    "log_probs": torch.randn(2, 2, 7, generator=GENERATOR).log_softmax(-1)[..., :3].contiguous(),
}


def _gated(ours: Function, activation: Function) -> Operator:
    return Operator(ours, lambda g, u: activation(g) * u, {"gate": X, "up": X}, (X,), {})


def _packed(ours: Function, activation: Function) -> Operator:
    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return Operator(ours, plain, {"x": PACKED}, (X,), {})


OPERATORS = {
    "rms_norm": Operator(
        lambda x, w: strata_kernels.rms_norm(x, w, EPS, cast="gemma"), torch_rms_norm, {"x": X, "weight": D}, (X,), {}
    ),
    "add_rms_norm": Operator(
        lambda x, r, w: strata_kernels.add_rms_norm(x, r, w, EPS, cast="gemma"),
        torch_add_rms_norm, {"x": X, "residual": X, "weight": D}, (X, X), {},
    ),
    "layer_norm": Operator(
        lambda x, w, b: strata_kernels.layer_norm(x, w, b, EPS),
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS), {"x": X, "weight": D, "bias": D}, (X,), {},
    ),
    "swiglu": _gated(strata_kernels.swiglu, functional.silu),
    "swiglu_packed": _packed(strata_kernels.swiglu_packed, functional.silu),
    "swiglu and projection": Operator(
        lambda g, u, w, b: strata_kernels.swiglu(g, u, weight=w, bias=b),
        lambda g, u, w, b: functional.linear(functional.silu(g) * u, w, b),
        {"gate": X, "up": X, "weight": HIDDEN, "bias": (5,)}, ((2, 3, 5),), {},
        # The gradient of what lies between is a product in the dtype of the inputs.
        roundings=2,
    ),
    "geglu": _gated(strata_kernels.geglu, functional.gelu),
    "geglu_packed": _packed(
        lambda x: strata_kernels.geglu_packed(x, "tanh"), lambda x: functional.gelu(x, approximate="tanh")
    ),
    "tiled_mlp": Operator(
        lambda *tensors: strata_kernels.tiled_mlp(*tensors, tile=4),
        lambda x, gate, up, down: functional.linear(
            functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down
        ),
        {"x": X, "gate": HIDDEN, "up": HIDDEN, "down": (6, 5)}, ((2, 3, 6),), {}, roundings=3,
    ),
    "relu_squared": Operator(
        strata_kernels.relu_squared, lambda x: functional.relu(x).square(), {"x": X}, (X,), {}
    ),
    "gelu": Operator(
        lambda x: strata_kernels.gelu(x, "sigmoid"), lambda x: x * torch.sigmoid(1.702 * x), {"x": X}, (X,), {}
    ),
    "silu": Operator(strata_kernels.silu, functional.silu, {"x": X}, (X,), {}),
    "experts": Operator(
        lambda x, gate_up, down, router, index: strata_kernels.experts(x, gate_up, down, index, router),
        torch_experts, {"x": (3, 8), "gate_up": (2, 8, 8), "down": (2, 8, 4), "router": (3, 2)}, ((3, 8),),
        {"index": torch.tensor([[0, 1], [1, 1], [0, 1]])},
        # h, a and y are rounded, and the gradients between.
        roundings=3,
    ),
    "rope": Operator(
        lambda *tensors: strata_kernels.rope(*tensors, rotary_dim=8), torch_rope, {"q": Q, "k": K}, (Q, K), ANGLES
    ),
    "rope by positions": Operator(
        lambda q, k, cos, sin, positions: strata_kernels.rope(
            q, k, cos, sin, positions=positions, interleaved=True, layout="bshd"
        ),
        torch_interleaved, {"q": (2, 3, 3, 8), "k": (2, 3, 1, 8)}, ((2, 3, 3, 8), (2, 3, 1, 8)), TABLES,
    ),
    "qk_norm_rope": Operator(
        lambda *tensors: strata_kernels.qk_norm_rope(*tensors, rotary_dim=8, eps=EPS, cast="gemma"),
        torch_qk_norm_rope, {"q": Q, "k": K, "q_weight": D, "k_weight": D}, (Q, K), ANGLES,
    ),
    "cross_entropy": Operator(
        lambda z, t, w: strata_kernels.cross_entropy(z, t, weight=w, reduction="sum"),
        lambda z, t, w: torch_losses(z, t, w).sum(), {"logits": LOGITS}, ((),), {**TARGET, **CLASS_WEIGHT},
    ),
    "cross_entropy of rows": Operator(
        lambda z, t, w: strata_kernels.cross_entropy(z, t, weight=w, reduction="none"),
        torch_losses, {"logits": LOGITS}, ((2, 2),), {**TARGET, **CLASS_WEIGHT},
    ),
    "cross_entropy_with_predictions": Operator(
        lambda z, t, w: strata_kernels.cross_entropy_with_predictions(z, t, weight=w, reduction="sum").loss,
        lambda z, t, w: torch_losses(z, t, w).sum(), {"logits": LOGITS}, ((),), {**TARGET, **CLASS_WEIGHT},
    ),
    "linear_cross_entropy": Operator(
        linear_losses("sum"), lambda *tensors: torch_linear_losses(*tensors).sum(), LINEAR, ((),), LINEAR_GIVEN
    ),
    "linear_cross_entropy_with_predictions": Operator(
        lambda x, w, target: strata_kernels.linear_cross_entropy_with_predictions(x, w, target).loss,
        lambda x, w, target: functional.cross_entropy(functional.linear(x, w).flatten(0, -2), target.flatten()),
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), TARGET,
    ),
    "linear_cross_entropy of rows": Operator(
        linear_losses("none"), torch_linear_losses, LINEAR, ((2, 2),), LINEAR_GIVEN
    ),
    "selective_log_softmax": Operator(
        strata_kernels.selective_log_softmax, lambda z, index: z.log_softmax(-1).gather(-1, index),
        {"logits": LOGITS}, ((2, 2, 2),), {"index": torch.tensor([[[3, 1], [6, 6]], [[0, 2], [5, 4]]])},
    ),
    "dyt": Operator(
        strata_kernels.dyt, lambda x, alpha, w, b: w * torch.tanh(alpha * x) + b,
        {"x": X, "alpha": (1,), "weight": D, "bias": D}, (X,), {},
    ),
    "softmax": Operator(strata_kernels.softmax, lambda z: z.softmax(-1), {"logits": LOGITS}, (LOGITS,), {}),
    "poly_norm": Operator(
        lambda x, w, b: strata_kernels.poly_norm(x, w, b, EPS), torch_poly_norm,
        {"x": X, "weight": (3,), "bias": ()}, (X,), {},
    ),
    "group_norm": Operator(
        lambda x, w, b: strata_kernels.group_norm(x, 2, w, b, EPS),
        lambda x, w, b: functional.group_norm(x, 2, w, b, EPS),
        {"x": (2, 4, 6), "weight": (4,), "bias": (4,)}, ((2, 4, 6),), {},
    ),
    "modulated_rms_norm": Operator(
        lambda x, s, t, w: strata_kernels.modulated_rms_norm(x, s, t, w, EPS),
        lambda x, s, t, w: torch_rms_norm(x, w) * (1 + s[:, None]) + t[:, None],
        {"x": X, "scale": (2, 8), "shift": (2, 8), "weight": D}, (X,), {},
        # PyTorch rounds what lies between.
        roundings=2,
    ),
    "modulated_layer_norm": Operator(
        lambda x, s, t, w, b: strata_kernels.modulated_layer_norm(x, s, t, w, b, EPS),
        lambda x, s, t, w, b: functional.layer_norm(x, w.shape, w, b, EPS) * (1 + s) + t,
        {"x": X, "scale": X, "shift": X, "weight": D, "bias": D}, (X,), {}, roundings=2,
    ),
    "sparsemax": Operator(strata_kernels.sparsemax, torch_sparsemax, {"logits": LOGITS}, (LOGITS,), {}),
    "jsd": Operator(
        strata_kernels.jsd, lambda z, t: torch_jsd(z, t).mean(), {"logits": LOGITS}, ((),), TEACHER
    ),
    "jsd of rows": Operator(
        lambda z, t: strata_kernels.jsd(z, t, reduction="none"), torch_jsd, {"logits": LOGITS}, ((2, 2),), TEACHER
    ),
    "kl_div": Operator(
        strata_kernels.kl_div, lambda z, t: torch_kl(z, t).mean(), {"logits": LOGITS}, ((),), TEACHER
    ),
    "tvd": Operator(
        strata_kernels.tvd, lambda z, t: (z.softmax(-1) - t.softmax(-1)).abs().sum(-1).mean() / 2,
        {"logits": LOGITS}, ((),), TEACHER,
    ),
    "tvd of probabilities": Operator(
        lambda p, q: strata_kernels.tvd(p, q, probabilities=True), lambda p, q: (p - q).abs().sum(-1).mean() / 2,
        {"probabilities": LOGITS}, ((),), TEACHER,
    ),
    "linear_cosine_distance": Operator(
        # Layouts of equal values would make both logits parallel, where the two parts of a gradient cancel.
        lambda *tensors: strata_kernels.linear_cosine_distance(*tensors, bias=DIFFERENT.to(tensors[0])),
        lambda x, w, tx, tw: (
            1 - torch.cosine_similarity(functional.linear(x, w, DIFFERENT.to(x)), tx @ tw.t(), -1).mean()
        ),
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), TEACHER_HEAD,
    ),
    "linear_jsd": Operator(
        strata_kernels.linear_jsd,
        lambda x, w, tx, tw: torch_jsd(functional.linear(x, w), functional.linear(tx, tw)).mean(),
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), TEACHER_HEAD,
    ),
    "linear_distillation": Operator(
        lambda *tensors: strata_kernels.linear_distillation(*tensors, beta=0.5).loss,
        lambda x, w, tx, tw, target: (
            functional.cross_entropy(functional.linear(x, w).flatten(0, 1), target.flatten())
            + torch_jsd(functional.linear(x, w), functional.linear(tx, tw))[target != -100].mean()
        ) / 2,
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), {**TEACHER_HEAD, **TARGET},
    ),
    "linear_kl_div": Operator(
        strata_kernels.linear_kl_div,
        lambda x, w, tx, tw: torch_kl(functional.linear(x, w), functional.linear(tx, tw)).mean(),
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), TEACHER_HEAD,
    ),
    "linear_topk_kl_div": Operator(
        lambda x, w, first, q: strata_kernels.linear_topk_kl_div(x, w, three_tokens(first), q, reduction="sum"),
        lambda x, w, first, q: torch_topk_kl(x, w, three_tokens(first), q),
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), TOP_K,
    ),
    "linear_preference": Operator(
        lambda *tensors: strata_kernels.linear_preference(*tensors).loss, torch_preference,
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), {**TARGET, "reference": torch.tensor([-3.0, -4.0])},
    ),
    "linear_kto": Operator(
        lambda x, w, target, ref, good: strata_kernels.linear_kto(x, w, target, ref, good > 0, 0 * ref[0]).loss,
        lambda x, w, target, ref, good: torch_kto(x, w, target, ref, good > 0),
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),),
        {**TARGET, "reference": torch.tensor([-3.0, -4.0]), "good": torch.tensor([1, 0])},
    ),
    "linear_grpo": Operator(
        lambda *tensors: strata_kernels.linear_grpo(*tensors).loss, torch_grpo,
        {"x": (2, 2, 8), "weight": (7, 8)}, ((),), {**TARGET, "advantages": torch.tensor([1.0, -0.5])},
    ),
    "linear_logprobs": Operator(
        lambda x, w, b, target: strata_kernels.linear_logprobs(x, w, target, bias=b),
        lambda *tensors: torch_log_probs(*tensors)[0], LINEAR, ((2, 2),), TARGET,
    ),
    "linear_logprobs_with_entropy": Operator(
        lambda x, w, b, target: tuple(strata_kernels.linear_logprobs_with_entropy(x, w, target, bias=b)),
        torch_log_probs, LINEAR, ((2, 2), (2, 2)), TARGET,
    ),
}  # fmt: skip
