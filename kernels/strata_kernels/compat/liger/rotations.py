"""Liger's rotary embeddings: autograd functions and functional forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...ops.rotary.rope import rope


class LigerRopeFunction:
    """`rope`."""

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q: [B, H, S, D], k: [B, K, S, D], cos, sin: [B or 1, S, R], or [..., R / 2] with `rotary_dim` = R."""
        return rope(q, k, cos, sin, rotary_dim=rotary_dim)


class LigerLlama4RopeFunction:
    """`rope` of interleaved pairs, with complex angles."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
        """q: [B, S, H, D], k: [B, S, K, D], freqs_cis: complex [B or 1, S, D / 2], or real [..., D]."""
        if not freqs_cis.is_complex():
            freqs_cis = torch.view_as_complex(freqs_cis.float().reshape(*freqs_cis.shape[:-1], -1, 2))
        return rope(q, k, freqs_cis, layout="bshd", interleaved=True)


class LigerQwen2VLMRopeFunction:
    """`rope` with M-RoPE: positions in time, height and width."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """q: [B, H, S, D], k: [B, K, S, D], cos, sin: [3, B, S, D]."""
        return rope(q, k, cos, sin, mrope_section=mrope_section)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` with one angle per pair."""
    return LigerRopeFunction.apply(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of vision towers. q, k: [S, H, D], cos, sin: [S, D]."""
    rotated = LigerRopeFunction.apply(q[None].transpose(1, 2), k[None].transpose(1, 2), cos.float(), sin.float())
    y_q, y_k = (y.transpose(1, 2)[0] for y in rotated)
    return y_q, y_k


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of Llama 4's text model. xq, xk: [B, S, H, D], freqs_cis: [B, S, D / 2], complex."""
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of Llama 4's vision tower. query, key: [B, S, H, D], freqs_ci: [S, D / 2], [S, 1, D / 2] or with batch.

    If the angles were cast to a real dtype, as `model.bfloat16()` does with the tower's buffer, their imaginary part is
    lost; as in transformers, queries and keys are then multiplied by the real part.
    """
    freqs = freqs_ci.to(query.device)
    freqs = freqs.reshape(-1, *freqs.shape[-3::2]) if freqs.dim() == 4 else freqs.reshape(1, -1, freqs.shape[-1])
    if not freqs.is_complex():
        freqs = torch.complex(freqs.float(), torch.zeros_like(freqs, dtype=torch.float32))
    return LigerLlama4RopeFunction.apply(query, key, freqs)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`rope` with M-RoPE: positions in time, height and width. q: [B, H, S, D], cos, sin: [3, B, S, D]."""
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section)


liger_rope: Callable[..., tuple[Tensor, Tensor]] = LigerRopeFunction.apply
liger_rotary_pos_emb: Callable[..., tuple[Tensor, Tensor]] = LigerRopeFunction.apply
liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb
