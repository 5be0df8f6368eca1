"""Liger's other norms, tiled layers, distillation and policy losses, by Strata's operators: against their formulas."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strata_kernels.compat.liger import (
    chunked_distillation,
    cross_entropies,
    distributions,
    divergences,
    feed_forward,
    other_norms,
    policies,
)

B, T, H, V = 3, 4, 8, 11


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, *tensors: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad((y * rand(*y.shape, seed=9)).sum(), leaves)]


def agree(ours, theirs, *tensors: Tensor) -> None:
    torch.testing.assert_close(gradients(ours, *tensors), gradients(theirs, *tensors), rtol=1e-4, atol=1e-5)


X, W, BIAS = rand(B, T, H), rand(H, seed=1), rand(H, seed=2)


def test_norms() -> None:
    def rms(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (H,), w, 1e-6)

    for rows in (1, B, B * T):
        modulation = rand(rows, H, seed=3), rand(rows, H, seed=4)

        def theirs(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            of_rows = [t.repeat_interleave(B * T // len(t), 0).view(x.shape) for t in (scale, shift)]
            return rms(x, w) * (1 + of_rows[0]) + of_rows[1]

        agree(lambda x, w, s, t: other_norms.liger_modulated_rms_norm(x, w, s, t), theirs, X, W, *modulation)
    module = other_norms.LigerModulatedRMSNorm(H)
    torch.testing.assert_close(module(X, W), rms(X, module.weight) * (1 + W))
    images = rand(2, 6, 5)
    groups = other_norms.LigerGroupNorm(6, 3, bias=True)
    expected = F.group_norm(images, 3, groups.weight, groups.bias, 1e-6)
    torch.testing.assert_close(groups(images), expected)
    agree(
        lambda x, w, b: other_norms.liger_group_norm(x, w, b, 6, 3, 1e-5),
        lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5), images, rand(6), rand(6, seed=1),
    )  # fmt: skip
    poly, tanh = other_norms.LigerPolyNorm(), other_norms.LigerDyT(H)
    norm = lambda u: F.rms_norm(u, (H,), eps=1e-6)  # noqa: E731
    torch.testing.assert_close(poly(X), (norm(X**3) + norm(X**2) + norm(X)) / 3 + 1)
    torch.testing.assert_close(tanh(X), torch.tanh(X / 2))
    assert [*dict(tanh.named_parameters())] == ["alpha", "gamma", "beta"]
    assert other_norms.LigerDyT(H, beta=False).beta is None
    with pytest.raises(ValueError, match="must divide num_channels 6"):
        other_norms.LigerGroupNorm(6, 4)


def test_softmax() -> None:
    agree(distributions.liger_softmax, lambda x: x.softmax(-1), X)
    assert torch.equal(distributions.LigerSoftmax()(X), distributions.LigerSoftmaxFunction.apply(X))


@pytest.mark.parametrize("shards", [None, 1, 3])
@pytest.mark.parametrize(
    ("kind", "activation", "name"), [("SwiGLU", F.silu, "silu"), ("GEGLU", lambda x: F.gelu(x, approximate="tanh"),
                                                               "gelu_pytorch_tanh")]
)  # fmt: skip
def test_tiled_layers(kind, activation, name, shards) -> None:
    config = SimpleNamespace(hidden_size=H, intermediate_size=12, hidden_act=name)
    layer = getattr(feed_forward, f"LigerTiled{kind}MLP")(config, shards)
    plain = lambda m, x: m.down_proj(activation(m.gate_proj(x)) * m.up_proj(x))  # noqa: E731
    whole = lambda x: plain(layer, x)  # noqa: E731
    found = []
    for run in (whole, layer, lambda x: feed_forward.apply_tiled_mlp(plain, layer, x, shards)):
        layer.zero_grad()
        x = X.clone().requires_grad_()
        run(x).square().sum().backward()
        found.append([run(X).detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for one in found[1:]:
        torch.testing.assert_close(found[0], one, rtol=1e-4, atol=1e-5)
    config.hidden_act = "relu"
    with pytest.raises(ValueError, match="'relu' not supported"):
        type(layer)(config)


LABELS = torch.tensor([3, -100, 10, 0, 5, -100])
STUDENT, HEAD, TEACHER, TEACHER_HEAD = rand(6, H), rand(V, H, seed=1), rand(6, 5, seed=2), rand(V, 5, seed=3)
OF_HEAD, OF_TEACHER = rand(V, seed=4), rand(V, seed=5)


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("labels", [None, LABELS], ids=["all", "labels"])
def test_tvd(labels, reduction) -> None:
    q = rand(6, V, seed=7).softmax(-1)

    def theirs(p: Tensor) -> Tensor:
        rows = (p - q).abs() / 2
        counted = torch.ones(6, dtype=torch.bool) if labels is None else labels != -100
        rows = rows * counted[:, None]
        divisor = {"batchmean": counted.sum(), "mean": counted.sum() * V, "sum": 1}.get(reduction)
        return rows if divisor is None else rows.sum() / divisor

    p = rand(6, V, seed=6).softmax(-1)
    agree(lambda p: divergences.LigerTVDLoss(reduction)(p, q, labels), theirs, p)
    assert divergences.liger_tvd(p, q, labels, "sum") == divergences.LigerTVDLossFunction.apply(p, q, labels, "sum")
    with pytest.raises(ValueError, match="batchmean, mean, sum, none"):
        divergences.LigerTVDLoss("max")(p, q)


def test_cross_entropy_and_tvd() -> None:
    teacher = rand(6, V, seed=1)
    weights = rand(2, 6, seed=2)

    def theirs(z: Tensor) -> Tensor:
        labels = F.cross_entropy(z, LABELS, reduction="none")
        distance = (z.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2 * (LABELS != -100)
        return (torch.stack((labels, distance)) * weights).sum()

    agree(
        lambda z: (torch.stack(divergences.LigerFusedCETVDLoss()(z, teacher, LABELS)) * weights).sum(), theirs,
        rand(6, V),
    )  # fmt: skip


@pytest.mark.parametrize("hard", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["JSD", "CosineSimilarity"])
def test_distillation(kind, hard) -> None:
    loss = getattr(chunked_distillation, f"LigerFusedLinear{kind}Loss")(hard, 0.7, beta=0.4, temperature=2.0)
    counted = LABELS != -100

    def theirs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        z, t = F.linear(x, w, b), F.linear(TEACHER, TEACHER_HEAD, OF_TEACHER)
        if kind == "JSD":
            log_p, log_q = (z / 2).log_softmax(-1), (t / 2).log_softmax(-1)
            log_m = torch.logaddexp(log_p + math.log(0.6), log_q + math.log(0.4))
            kl = lambda of: F.kl_div(log_m, of, reduction="none", log_target=True).sum(-1)  # noqa: E731
            rows = 0.4 * kl(log_q) + 0.6 * kl(log_p)
        else:
            rows = 0.4 * (1 - F.cosine_similarity(z, t))
        return 0.7 * rows[counted].mean() + hard * F.cross_entropy(z, LABELS)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return loss(x, w, TEACHER, TEACHER_HEAD, LABELS, b, OF_TEACHER)

    agree(ours, theirs, STUDENT, HEAD, OF_HEAD)
    loss.return_soft_hard_loss = True
    whole, soft, labels = ours(STUDENT, HEAD, OF_HEAD)
    torch.testing.assert_close(whole, 0.7 * soft + hard * labels)
    torch.testing.assert_close(labels, F.cross_entropy(F.linear(STUDENT, HEAD, OF_HEAD), LABELS))


def test_a_teacher_of_more_tokens() -> None:
    """A padded vocabulary: Liger's student gives 0 to what it has not."""
    loss = chunked_distillation.LigerFusedLinearCosineSimilarityLoss(0.0, 1.0, beta=1.0)
    wide = rand(V + 3, 5, seed=3)
    z = F.pad(F.linear(STUDENT, HEAD), (0, 3))
    rows = 1 - F.cosine_similarity(z, F.linear(TEACHER, wide))
    torch.testing.assert_close(loss(STUDENT, HEAD, TEACHER, wide, LABELS), rows[LABELS != -100].mean())


def test_scaled_cross_entropy() -> None:
    function = cross_entropies.LigerFusedLinearScaledCrossEntropyFunction
    z = F.linear(STUDENT, HEAD) / 0.7
    nll, entropy = function.apply(STUDENT, HEAD, LABELS, 0.7, -100, 1, True)
    torch.testing.assert_close(nll, F.cross_entropy(z, LABELS, reduction="none"))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=z).entropy() * (LABELS != -100))
    torch.testing.assert_close(function.apply(STUDENT, HEAD, LABELS, 0.7), nll)
    with pytest.raises(ValueError, match="selective_log_softmax"):
        function.apply(STUDENT, HEAD, LABELS, selected_token_ids=LABELS)


IDS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
ADVANTAGES = torch.tensor([1.5, -0.7, 0.4])
OLD, REFERENCE = -3 + 0.5 * rand(B, T, seed=4), -3 + 0.5 * rand(B, T, seed=5)
# What stands where there is no token must not overflow.
OLD[0, 3], REFERENCE[1, 2:] = -500.0, 500.0
SAMPLING = torch.tensor([0.5, 1.2, 0.9])
POLICIES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo, two-sided": {"loss_type": "bnpo", "delta": 1.5},
    "dr_grpo of answers": {
        "loss_type": "dr_grpo", "max_completion_length": 6, "importance_sampling_level": "sequence"
    },
    "dapo of a step": {"num_items_in_batch": 20, "use_bias_correction_kl": True},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}  # fmt: skip


def formula(log_p: Tensor, o: dict) -> tuple[Tensor, Tensor, Tensor]:
    """(the loss, means of the divergence and of what is cut off) in the words of the papers."""
    kind, high = o.get("loss_type", "dapo"), o.get("epsilon_high", 0.2)
    difference = (log_p - OLD).where(MASK > 0, 0.0)
    if o.get("importance_sampling_level") == "sequence":
        difference = ((difference * MASK).sum(1) / MASK.sum(1))[:, None].expand(B, T)
    ratio, advantage = difference.exp(), ADVANTAGES[:, None]
    cut = torch.zeros(B, T, dtype=torch.bool)
    if kind == "cispo":
        terms, cut = -ratio.detach().clamp(max=high) * advantage * log_p, (ratio > high) & (advantage > 0)
    elif kind == "sapo":
        tau = torch.where(advantage > 0, 1.0, 1.05)
        terms = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    elif kind == "vespo":
        k, rate = torch.where(advantage >= 0, 2.0, 3.0), torch.where(advantage >= 0, 3.0, 2.0)
        w = ((difference.detach() * MASK).sum(1, keepdim=True) + SAMPLING[:, None].log()).exp()
        terms = -(w**k * (rate - rate * w).exp()) * advantage * log_p
    else:
        bounded = ratio.clamp(max=o["delta"]) if "delta" in o else ratio
        terms = -torch.minimum(bounded * advantage, ratio.clamp(0.8, 1 + high) * advantage)
        cut = ((ratio < 0.8) & (advantage < 0)) | ((ratio > 1.2) & (advantage > 0))
    terms = terms if kind == "vespo" else terms * SAMPLING[:, None]
    further = (REFERENCE - log_p).where(MASK > 0, 0.0)
    kl = further.exp() - further - 1
    kl = kl * ratio if o.get("use_bias_correction_kl") else kl
    terms = (terms + 0.04 * kl) * MASK
    loss = {
        "grpo": lambda: (terms.sum(1) / MASK.sum(1)).mean(), "sapo": lambda: (terms.sum(1) / MASK.sum(1)).mean(),
        "dr_grpo": lambda: terms.sum() / (B * 6),
    }.get(kind, lambda: terms.sum() / o.get("num_items_in_batch", MASK.sum()))()  # fmt: skip
    return loss, *((t.detach() * MASK).sum() / MASK.sum() for t in (kl, cut))


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name) -> None:
    options = dict(POLICIES[name])
    items = options.pop("num_items_in_batch", None)
    module = policies.LigerFusedLinearGRPOLoss(temperature=0.9, **options)
    head = rand(V, H, seed=1)

    def ours(x: Tensor, w: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return module(
            x, w, IDS, MASK, ADVANTAGES, None, REFERENCE, OLD, vllm_is_ratio=SAMPLING, num_items_in_batch=items
        )

    def theirs(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        log_p = (F.linear(x, w) / 0.9).log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
        return formula(log_p, POLICIES[name])

    agree(lambda *t: ours(*t)[0], lambda *t: theirs(*t)[0], X, head)
    torch.testing.assert_close(ours(X, head)[1], theirs(X, head)[1:])
    if "epsilon_high" in options:
        options["eps_high"] = options.pop("epsilon_high")

    def of_logits(x: Tensor, w: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits = F.pad(F.linear(x, w), (0, 0, 0, 1))
        given = {"eps_high": 0.2, **options, "reduce": True, "vllm_is_ratio": SAMPLING, "num_items_in_batch": items}
        return policies.triton_grpo_loss(logits, OLD, REFERENCE, IDS, ADVANTAGES, MASK, **given)

    agree(lambda *t: of_logits(*t)[0], lambda *t: theirs(*t)[0], X, head)
    torch.testing.assert_close(of_logits(X, head)[1], list(theirs(X, head)[1:]))


def test_policies_of_single_tokens_and_wrong_options() -> None:
    logits = rand(B, T + 1, V)
    losses, kl, clipped = policies.triton_grpo_loss(logits, None, None, IDS, ADVANTAGES, MASK, beta=0.0)
    torch.testing.assert_close(losses, -ADVANTAGES[:, None].expand(B, T) * MASK)
    assert kl is None and not clipped.any()
    # Only sapo looks at its temperatures.
    apply = policies.LigerFusedLinearGRPOFunction.apply
    apply(X, rand(V, H, seed=1), IDS, MASK, ADVANTAGES, use_ref_model=False, sapo_temperature_neg=0.0)
    # As TRL's: the mean over all positions, weighed by the lengths of the answers.
    luspo = policies.triton_grpo_loss(
        logits, None, None, IDS, ADVANTAGES, MASK, beta=0.0, loss_type="luspo", reduce=True
    )
    torch.testing.assert_close(luspo[0], (losses * MASK.sum(1, keepdim=True)).mean())
    for options, message in (
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "not supported for loss_type='cispo'"),
        ({"loss_type": "ppo"}, "Unknown loss type: ppo"),
        ({"importance_sampling_level": "batch"}, "Possible values are"),
        *(({"loss_type": kind, "delta": 2.0}, f"delta .* loss_type='{kind}'") for kind in ("cispo", "sapo", "vespo")),
        ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, "must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            policies.triton_grpo_loss(logits, OLD, REFERENCE, IDS, ADVANTAGES, MASK, **options)
        module = policies.LigerFusedLinearGRPOLoss
        with pytest.raises(ValueError, match=message):
            module(**options)(X, rand(V, H, seed=1), IDS, MASK, ADVANTAGES, None, REFERENCE, OLD)
    with pytest.raises(ValueError, match="delta must be positive"):
        module(delta=0.0)
