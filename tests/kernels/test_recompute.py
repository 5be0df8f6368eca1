"""Results that are computed again in the backward pass: the bits of a pass that keeps them, and their memory."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from strata_kernels import layer_norm, patch_model, qk_norm_rope, rms_norm, rope
from strata_kernels.ops.recompute import recomputing

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def model_of(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.float32).to(device)
    patch_model(model)
    return model.train()


def step(model: nn.Module, context: Callable, device: torch.device) -> list[torch.Tensor]:
    """The loss of a batch, and all gradients."""
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    with context():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "phi"])
def test_a_model_has_the_same_bits(kind, device) -> None:
    """Norms before projections; norms of heads; norms behind projections; a norm with a mean and a bias."""
    model = model_of(kind, device)
    kept, made = step(model, nullcontext, device), step(model, recomputing, device)
    assert all(torch.equal(*pair) for pair in zip(kept, made, strict=True))
    assert len(made) > 12 and all(x.abs().max() > 0 for x in made[:4])


def test_what_norms_and_rotations_give_is_not_kept(device, monkeypatch) -> None:
    """Seen from outside: what a projection read, and what attention read, are gone after the forward pass."""
    model = model_of("qwen3", device)
    layer = model.model.layers[0]
    seen: dict[str, weakref.ref] = {}

    def watch(name: str) -> Callable:
        return lambda module, args: seen.update({name: weakref.ref(args[0].untyped_storage())})

    layer.self_attn.q_proj.register_forward_pre_hook(watch("projections"))
    layer.mlp.gate_proj.register_forward_pre_hook(watch("gate"))
    layer.self_attn.o_proj.register_forward_pre_hook(watch("attention's result"))
    plain = functional.scaled_dot_product_attention

    def attention(q: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        seen.setdefault("rotated", weakref.ref(q.untyped_storage()))
        return plain(q, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    for context, gone in ((nullcontext, set()), (recomputing, {"projections", "gate", "rotated"})):
        seen.clear()
        tokens = torch.ones(2, 12, dtype=torch.long, device=device)
        with context():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        found = {name for name, ref in seen.items() if ref() is None}
        # Attention of a GPU may keep copies of what it has read.
        assert len(seen) == 4 and gone <= found <= gone | {"rotated"}
        del loss


def test_a_result_for_several_readers_is_computed_once(device) -> None:
    counts: list[int] = []
    x = torch.randn(4, 16, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y.sum()

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensors
            counts.append(y.data_ptr())
            return dy.expand_as(y) * y

    with recomputing():
        y = rms_norm(x, weight)
        pointer = y.data_ptr()
        total = Reads.apply(y) + Reads.apply(y.view(2, 32)) + Reads.apply(y)
    total.backward(retain_graph=True)
    assert len(set(counts)) == 1 and counts[0] != pointer
    first, x.grad = x.grad, None
    total.backward()
    assert torch.equal(x.grad, first)


def test_a_pass_without_a_backward_pass_is_freed(device) -> None:
    """As of a capture that fails. A node that saves its own result must not hold itself."""
    leaf = torch.randn(4, 8, device=device, requires_grad=True)
    with recomputing():
        y = rms_norm((leaf * 2).exp()).sigmoid()
        loss = y.sum()
    kept = weakref.ref(y.untyped_storage())
    del y, loss
    assert kept() is None


def test_what_has_changed_in_place_is_kept_or_refused(device) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    matrix = torch.randn(8, 8, device=device, requires_grad=True)

    def run(context: Callable) -> torch.Tensor:
        with context():
            y = layer_norm(x).mul_(2)
            loss = (y @ matrix).square().sum()
        return torch.autograd.grad(loss, matrix)[0]

    assert torch.equal(run(nullcontext), run(recomputing))
    with recomputing():
        h = x * 1
        y = rms_norm(h) @ matrix
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


def test_a_rotation_of_what_is_not_kept_anyway_stays(device) -> None:
    """Its arguments would take the memory of its results; behind norms, or fused with them, they are there anyway."""
    angles = torch.randn(1, 6, 4, device=device).repeat(1, 1, 2)
    leaf = torch.randn(1, 2, 6, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device)

    def alive(make: Callable) -> list[bool]:
        with recomputing():
            q, k = make(leaf * 1, leaf * 2)
            refs, total = [weakref.ref(x.untyped_storage()) for x in (q, k)], (q * k).sum()
        del q, k
        found = [ref() is not None for ref in refs]
        total.backward()
        return found

    assert alive(lambda q, k: rope(q, k, angles.cos(), angles.sin())) == [True, True]
    normed = lambda q, k: rope(rms_norm(q, weight), rms_norm(k, weight), angles.cos(), angles.sin())  # noqa: E731
    assert alive(normed) == [False, False]
    assert alive(lambda q, k: qk_norm_rope(q, k, weight, weight, angles.cos(), angles.sin())) == [False, False]


def test_within_checkpointed_layers_nothing_is_held(device) -> None:
    """They recompute by themselves, and keep their input alone."""
    model = model_of("qwen3", device)
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    seen: list[weakref.ref] = []
    norm = model.model.layers[0].post_attention_layernorm
    handle = norm.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0].untyped_storage())))
    tokens = torch.ones(2, 12, dtype=torch.long, device=device)
    with recomputing():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        assert len(seen) == 1 and seen[0]() is None
    handle.remove()
    loss.backward()
    made = step(model, recomputing, device)
    assert all(torch.equal(*pair) for pair in zip(made, step(model, nullcontext, device), strict=True))
