"""The rotations of vision towers, as their modeling files write them, against the operator in their place."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import apply_multidimensional_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import vision_apply_rotary_emb
from transformers.models.pixtral.modeling_pixtral import apply_rotary_pos_emb as apply_pixtral
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from strata_kernels import patch_model
from strata_kernels.patch.forwards import ROTATIONS
from tests.kernels.helpers.tiny_models import build_tiny

BATCH, PATCHES, HEADS, FEATURES = 2, 7, 3, 16
DTYPES = (torch.float32, torch.bfloat16)


def angles(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def tables(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos(), angle.sin()


def twice(angle: Tensor) -> Tensor:
    return torch.cat((angle, angle), -1)


def heads(*shape: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Queries and keys as views of one projection."""
    qkv = torch.randn(*shape[:-2], 3, *shape[-2:], generator=torch.Generator().manual_seed(4)).to(device, dtype)
    return [qkv.select(-3, i) for i in (0, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(), (1,), (BATCH,)], ids=["patches", "one row", "rows"])
def test_halves_of_patches(dtype, batch, device, compare) -> None:
    """Qwen-VL and GLM-V; Muse has batch rows of queries, but none of angles."""
    cos, sin = (x.to(device) for x in tables(twice(angles(PATCHES, FEATURES // 2))))
    compare(
        lambda q, k: ROTATIONS["halves_of_patches"](q, k, cos, sin),
        lambda q, k: apply_rotary_pos_emb_vision(q, k, cos, sin),
        heads(*batch, PATCHES, HEADS, FEATURES, dtype=dtype, device=device),
        # The tower's goes through fp32.
        exact=lambda q, k: apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=-2),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_without_batch_rows(dtype, device, compare) -> None:
    """Pixtral gives cos and sin [S, D] an axis in front."""
    cos, sin = (x.to(device, dtype) for x in tables(twice(angles(PATCHES, FEATURES // 2))))
    compare(
        lambda q, k: ROTATIONS["halves"](q, k, cos, sin, unsqueeze_dim=0),
        lambda q, k: apply_pixtral(q, k, cos.to(q.dtype), sin.to(q.dtype), unsqueeze_dim=0),
        [x.transpose(1, 2) for x in heads(1, PATCHES, HEADS, FEATURES, dtype=dtype, device=device)],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", [2, 4])
def test_halves_by_axis(dtype, axes, device, compare) -> None:
    """Gemma 4."""
    places = torch.zeros(BATCH, PATCHES, axes, dtype=torch.long, device=device)
    angle = angles(BATCH, PATCHES, FEATURES // 2).chunk(axes, -1)
    cos, sin = (x.to(device, dtype) for x in tables(torch.cat([twice(part) for part in angle], -1)))
    q, _ = heads(BATCH, PATCHES, HEADS, FEATURES, dtype=dtype, device=device)
    for x in (q, q.contiguous()):
        compare(
            lambda x: ROTATIONS["halves_by_axis"](x, cos, sin, places),
            lambda x: apply_multidimensional_rope(x, cos.to(x.dtype), sin.to(x.dtype), places),
            [x],
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_complex_of_patches(dtype, device, compare) -> None:
    """Llama 4."""
    angle = angles(PATCHES, 1, FEATURES // 2)
    table = torch.polar(torch.ones_like(angle), angle).to(device)

    def exact(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        pairs = [torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
        return tuple(torch.view_as_real(x * table[None]).flatten(3) for x in pairs)

    compare(
        lambda q, k: ROTATIONS["complex_of_patches"](q, k, table),
        lambda q, k: vision_apply_rotary_emb(q, k, table),
        heads(BATCH, PATCHES, HEADS, FEATURES, dtype=dtype, device=device),
        exact=exact,
    )


def test_complex_of_patches_whose_imaginary_part_a_cast_has_dropped(device, compare) -> None:
    """`model.to(torch.bfloat16)` does that to the buffer of Llama 4's tower."""
    table = angles(PATCHES, 1, FEATURES // 2).cos().bfloat16().to(device)
    compare(
        lambda q, k: ROTATIONS["complex_of_patches"](q, k, table),
        lambda q, k: vision_apply_rotary_emb(q, k, table),
        heads(BATCH, PATCHES, HEADS, FEATURES, dtype=torch.float32, device=device),
        exact=lambda q, k: tuple(x * table.double().repeat_interleave(2, -1)[None] for x in (q, k)),
    )


def of_grid(tower: nn.Module, device: torch.device) -> Tensor:
    """Two images of different sizes."""
    grid = torch.tensor([[1, 2, 4], [1, 2, 2]], device=device)
    width = tower.patch_embed.proj.weight[0].numel()
    return tower(torch.ones(12, width, device=device) * torch.arange(12, device=device)[:, None], grid)[0]


def of_pixels(tower: nn.Module, device: torch.device) -> Tensor:
    return tower(torch.linspace(-1, 1, 2 * 3 * 64, device=device).reshape(2, 3, 8, 8)).last_hidden_state


def of_sizes(tower: nn.Module, device: torch.device) -> Tensor:
    sizes = torch.tensor([[8, 8], [8, 4]])
    pixels = torch.linspace(-1, 1, 2 * 3 * 64, device=device).reshape(2, 3, 8, 8)
    return tower(pixels, image_sizes=sizes).last_hidden_state


TOWERS = {"qwen2_vl": of_grid, "llama4": of_pixels, "mistral3": of_sizes}


@pytest.mark.parametrize("model_type", TOWERS)
def test_towers_train_through_the_kernels(model_type, device) -> None:
    model = build_tiny(model_type).to(device)
    tower = next(m for path, m in model.named_modules() if path.endswith(("visual", "vision_tower", "vision_model")))

    def gradients() -> tuple[Tensor, ...]:
        y = TOWERS[model_type](tower, device)
        incoming = torch.linspace(0.5, 1, y.numel(), device=device).reshape(y.shape)
        reached = list(tower.parameters())
        return y.detach(), *torch.autograd.grad(y, reached, incoming, allow_unused=True)

    expected = gradients()
    assert any("vis" in path for path in patch_model(model).replaced["rope"])
    for given, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=2e-5, rtol=1e-3)
