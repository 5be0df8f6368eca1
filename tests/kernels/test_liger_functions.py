"""Liger's functions, modules and losses, by Strata's operators: against PyTorch and transformers."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb, vision_apply_rotary_emb
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from strata_kernels.compat.liger import cross_entropies, distributions, feed_forward, norms, rotations

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_local_experts": 4,
    "hidden_act": "silu",
}


def gradients(function, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results of `function`, then the gradients of those tensors that can have one."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    sum((r * torch.arange(1.0, r.numel() + 1).reshape(r.shape).to(r.dtype).cos()).sum() for r in results).backward()
    return (*(r.detach() for r in results), *(t.grad for t in leaves if t.requires_grad))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, Y, W, V = rand(3, 5, 16), rand(5, 3, 16).reshape(3, 5, 16), rand(16), rand(1, 16)[0]


def rms_norm(x, w, offset=0.0):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (offset + w)


@pytest.mark.parametrize(
    ("ours", "expected", "tensors"),
    [
        (lambda x, w: norms.LigerRMSNormFunction.apply(x, w, 1e-6), rms_norm, (X, W)),
        (
            lambda x, w: norms.LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", False, True),
            lambda x, w: rms_norm(x, w, 1.0),
            (X, W),
        ),
        (
            lambda x, r, w: norms.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", True),
            lambda x, r, w: (rms_norm(x + r, w), x + r),
            (X, Y, W),
        ),
        (
            lambda x, w, b: norms.LigerLayerNormFunction.apply(x, w, b, 1e-5),
            lambda x, w, b: F.layer_norm(x, (16,), w, b, 1e-5),
            (X, W, V),
        ),
        (
            lambda a, b: feed_forward.LigerSiLUMulFunction.apply(a, b, 0.5, 0.7),
            lambda a, b: F.silu(0.5 * a) * b * 0.7,
            (X, Y),
        ),
        (
            lambda y: feed_forward.LigerFusedGateUpSiLUMulFunction.apply(y, True),
            lambda y: F.silu(y[..., :8]) * y[..., 8:],
            (X,),
        ),
        (feed_forward.LigerGELUMulFunction.apply, lambda a, b: F.gelu(a, approximate="tanh") * b, (X, Y)),
        (feed_forward.LigerReLUSquaredFunction.apply, lambda x: F.relu(x).square(), (X,)),
        (
            lambda *t: feed_forward.LigerMLPFunction.apply(*t, 0.5, 0.7),
            lambda x, g, u, d: F.linear(F.silu(0.5 * F.linear(x, g)) * F.linear(x, u), d) * 0.7,
            (X, rand(24, 16), rand(16, 24).T, rand(16, 24)),
        ),
    ],
    ids=["rms norm", "gemma", "add", "layer norm", "swiglu", "packed", "geglu", "relu²", "mlp"],
)
def test_function(ours, expected, tensors) -> None:
    before = [t.clone() for t in tensors]
    torch.testing.assert_close(gradients(ours, *tensors), gradients(expected, *tensors), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_sparsemax() -> None:
    """The nearest distribution: what lies above a threshold, at which the rest is one in all."""
    x = X.transpose(1, 2)
    got = distributions.LigerSparsemax(1)(x)
    ordered = x.sort(1, descending=True).values
    sums, counts = ordered.cumsum(1) - 1, torch.arange(1, 17)[:, None]
    size = (ordered * counts > sums).sum(1, keepdim=True)
    torch.testing.assert_close(got, (x - sums.gather(1, size - 1) / size).clamp(min=0))
    assert torch.equal(distributions.liger_sparsemax(X), got.transpose(1, 2))


@pytest.mark.parametrize("mode", ["llama", "gemma", "none", 0, 1, -1])
def test_the_result_has_the_dtype_of_the_input(mode) -> None:
    assert norms.LigerRMSNormFunction.apply(X.bfloat16(), W, 1e-6, 0.0, mode).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="casting_mode"):
        norms.LigerRMSNormFunction.apply(X, W, 1e-6, 0.0, "lama")


def angles(*shape: int) -> torch.Tensor:
    return rand(*shape, 4).repeat(*([1] * len(shape)), 2)


def test_rotations() -> None:
    q, k, angle = rand(2, 4, 5, 8), rand(2, 2, 5, 8), angles(2, 5)
    cos, sin = angle.cos(), angle.sin()
    want = gradients(lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), q, k)
    got = gradients(lambda q, k: rotations.liger_rotary_pos_emb(q, k, cos, sin, None, 1), q, k)
    torch.testing.assert_close(got, want)
    once = gradients(lambda q, k: rotations.liger_rotary_pos_emb_gpt_oss(q, k, cos[..., :4], sin[..., :4]), q, k)
    torch.testing.assert_close(once, want)
    flat = rotations.liger_rotary_pos_emb_vision(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    torch.testing.assert_close([x.transpose(0, 1) for x in flat], [x[0] for x in want[:2]])

    sections = angles(3, 2, 5)
    settings = (sections.cos(), sections.sin(), [1, 2, 1])
    # Of Qwen2-VL: each pair rotates by the position in time, height or width.
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(x.split([1, 2, 1] * 2, dim=-1))], dim=-1) for x in settings[:2]
    )
    want = gradients(lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), q, k)
    torch.testing.assert_close(gradients(lambda q, k: rotations.liger_qwen2vl_mrope(q, k, *settings), q, k), want)


@pytest.mark.parametrize("with_batch", [True, False])
def test_rotations_of_llama4(with_batch) -> None:
    q, k, angle = rand(2, 5, 4, 8), rand(2, 5, 2, 8), rand(1, 5, 4)
    freqs = torch.polar(torch.ones(1, 5, 4), angle).expand(2, -1, -1)
    want = gradients(lambda q, k: apply_rotary_emb(q, k, freqs), q, k)
    torch.testing.assert_close(
        gradients(lambda q, k: rotations.liger_llama4_text_rotary_pos_emb(q, k, freqs), q, k), want
    )
    parts = torch.view_as_real(freqs).flatten(-2)
    torch.testing.assert_close(rotations.LigerLlama4RopeFunction.apply(q, k, parts), want[:2])
    # The vision tower's buffer, [S, 1, D / 2], and what is left of it in a model that was cast.
    for of_tower in (freqs[0][:, None], freqs[0][:, None].real.bfloat16()):
        of_tower = of_tower[None].transpose(0, 1).transpose(0, 1) if with_batch else of_tower
        want = vision_apply_rotary_emb(q, k, of_tower)
        torch.testing.assert_close(rotations.liger_llama4_vision_rotary_pos_emb(q, k, of_tower), want)


@pytest.mark.parametrize(
    ("ours", "theirs", "config"),
    [
        (feed_forward.LigerSwiGLUMLP, LlamaMLP, AutoConfig.for_model("llama", **SMALL)),
        (feed_forward.LigerGEGLUMLP, GemmaMLP, AutoConfig.for_model("gemma", hidden_size=16, intermediate_size=24)),
        (feed_forward.LigerPhi3SwiGLUMLP, Phi3MLP, AutoConfig.for_model("phi3", pad_token_id=0, **SMALL)),
    ],
)
def test_feed_forward_layers_load_the_weights_of_transformers(ours, theirs, config) -> None:
    theirs, ours = theirs(config), ours(config)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(gradients(ours, X), gradients(theirs, X))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_experts_load_the_weights_of_transformers() -> None:
    config = AutoConfig.for_model("mixtral", **SMALL)
    config._experts_implementation = "eager"
    theirs, ours = MixtralExperts(config), feed_forward.LigerExperts(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    ours.load_state_dict(theirs.state_dict())
    index, weight = torch.randint(4, (15, 2)), torch.rand(15, 2)
    x = X.reshape(15, 16)
    want = gradients(lambda x, w: theirs(x, index, w), x, weight)
    torch.testing.assert_close(gradients(lambda x, w: ours(x, index, w), x, weight), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours(X, index.reshape(3, 5, 2), weight.reshape(3, 5, 2)).reshape(15, 16), want[0])


@pytest.mark.parametrize(("ours", "theirs"), [("", LlamaRMSNorm), ("ForGemma", GemmaRMSNorm)])
def test_norms_load_the_weights_of_transformers(ours, theirs) -> None:
    theirs, ours = theirs(16, eps=1e-5), getattr(norms, f"LigerRMSNorm{ours}")(16, eps=1e-5)
    nn.init.normal_(theirs.weight, 0.5, 0.2)
    ours.load_state_dict(theirs.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(ours.to(dtype)(X.to(dtype)), theirs.to(dtype)(X.to(dtype)))


def test_other_modules() -> None:
    norm = norms.LigerLayerNorm(16, eps=1e-5, bias=True)
    torch.testing.assert_close(norm(X), F.layer_norm(X, (16,), norm.weight, norm.bias, 1e-5))
    assert norms.LigerRMSNormForGemma4(16, with_scale=False)(X).square().mean(-1).allclose(torch.ones(3, 5))
    with pytest.raises(ValueError, match="init_fn"):
        norms.LigerRMSNorm(16, init_fn="one")
    with pytest.raises(ValueError, match="gelu"):
        feed_forward.LigerSwiGLUMLP(SimpleNamespace(**{**SMALL, "hidden_act": "gelu"}))
    wide = SimpleNamespace(**SMALL, use_double_wide_mlp=True, num_hidden_layers=4, num_kv_shared_layers=2)
    sizes = [feed_forward.LigerGEGLUMLPForGemma4(wide, layer).up_proj.out_features for layer in range(4)]
    assert sizes == [24, 24, 48, 48]
    scaled = SimpleNamespace(**SMALL, mlp_bias=True, mlp_multipliers=(0.5, 0.7))
    mlp = feed_forward.LigerFalconH1SwiGLUMLP(scaled)
    want = mlp.down_proj(F.silu(0.5 * mlp.gate_proj(X)) * mlp.up_proj(X)) * 0.7
    torch.testing.assert_close(mlp(X), want)


LOGITS, TARGET = 3 * rand(7, 11), torch.tensor([1, 10, -100, 3, 3, -100, 0])
CLASSES = torch.rand(11, generator=torch.Generator().manual_seed(0)) + 0.5


def reference(logits, *, weight=None, smoothing=0.0, z=0.0, softcap=None, reduction="mean", target=TARGET):
    """Loss, z-loss: by PyTorch."""
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    counted = target != -100
    z_loss = z * logits.logsumexp(-1).square() * counted
    if reduction != "none":
        z_loss = z_loss.sum() / (counted.sum() if reduction == "mean" else 1)
    loss = F.cross_entropy(logits, target, weight, label_smoothing=smoothing, reduction=reduction)
    return loss + z_loss, z_loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z": 1e-2, "softcap": 5.0}, {"weight": CLASSES}], ids=str)
def test_losses(reduction, options) -> None:
    weight, smoothing = options.get("weight"), options.get("smoothing", 0.0)
    z, softcap = options.get("z", 0.0), options.get("softcap")
    arguments = (-100, z, smoothing, reduction, softcap)
    want = gradients(lambda x: reference(x, reduction=reduction, **options)[0], LOGITS)
    got = gradients(lambda x: cross_entropies.LigerCrossEntropyFunction.apply(x, TARGET, weight, *arguments)[0], LOGITS)
    torch.testing.assert_close(got, want)

    x, head, bias = rand(7, 16), rand(11, 16), rand(11)
    want = gradients(lambda x, h, b: reference(F.linear(x, h, b), reduction=reduction, **options)[0], x, head, bias)
    linear = cross_entropies.LigerFusedLinearCrossEntropyFunction.apply
    got = gradients(lambda x, h, b: linear(x, h, TARGET, b, weight, *arguments)[0], x, head, bias)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_asked_for_beside_the_loss(reduction) -> None:
    asked = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    loss = cross_entropies.LigerCrossEntropyLoss(lse_square_scale=1e-2, reduction=reduction, **asked)
    head = torch.eye(11)
    linear = cross_entropies.LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-2, reduction=reduction, **asked)
    want_loss, want_z = reference(LOGITS, z=1e-2, reduction=reduction)
    right = ((LOGITS.argmax(-1) == TARGET) & (TARGET != -100)).float()
    for got in (loss(LOGITS, TARGET), linear(head, LOGITS, TARGET)):
        torch.testing.assert_close(got.loss, want_loss)
        torch.testing.assert_close(got.z_loss, want_z, atol=1e-6, rtol=1e-4)
        assert torch.equal(got.predicted_tokens, torch.where(TARGET == -100, -1, LOGITS.argmax(-1)))
        torch.testing.assert_close(got.token_accuracy, right if reduction == "none" else right.sum() / 5)


def test_the_loss_has_ligers_dtype() -> None:
    assert cross_entropies.liger_cross_entropy(LOGITS.bfloat16(), TARGET).dtype == torch.bfloat16
    assert cross_entropies.liger_fused_linear_cross_entropy(rand(7, 16), rand(11, 16), TARGET).dtype == torch.float32


@pytest.mark.parametrize("weight", [None, CLASSES], ids=["", "weight"])
def test_the_mean_over_no_target_is_zero(weight) -> None:
    nothing = torch.full_like(TARGET, -100)
    x = LOGITS.clone().requires_grad_()
    loss = cross_entropies.liger_cross_entropy(x, nothing, weight)
    head = cross_entropies.liger_fused_linear_cross_entropy(x, torch.eye(11), nothing, ce_weight=weight)
    (loss + head).backward()
    assert loss == head == 0 and not x.grad.any()


def test_tokens_scaled_by_their_probability() -> None:
    x, head = rand(7, 16), rand(11, 16)
    got = gradients(
        lambda x, h: cross_entropies.liger_fused_linear_cross_entropy(x, h, TARGET, use_token_scaling=True), x, head
    )

    def want(x, head):
        nll = F.cross_entropy(F.linear(x, head), TARGET, reduction="none")
        return (nll * (-nll).detach().exp()).sum() / 5

    torch.testing.assert_close(got, gradients(want, x, head))


def test_a_program_that_chooses_an_implementation() -> None:
    from strata_kernels.compat.liger import dispatched

    torch.testing.assert_close(dispatched.rms_norm(X, W, impl="nvidia-cutile", mode="chunked"), rms_norm(X, W))
    assert copy.copy(dispatched.swiglu)(X, Y, backend="triton").shape == X.shape
