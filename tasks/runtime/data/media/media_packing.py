"""Which families keep the sequences of a row apart when these have images or audio, and the refusal of the others."""

from __future__ import annotations

MEDIA_PACKING = frozenset((
    "gemma3", "gemma4", "glm4v", "idefics3", "internvl", "llama4", "llava", "llava_onevision", "mistral3", "paligemma",
    "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral",
))  # fmt: skip
"""Families that are known to keep the sequences of a packed row apart, with their images or audio."""

IN_ROWS_OF_THEIR_OWN = frozenset(("mllama",))
"""Families whose batches have each sequence of such a row in a row of its own, as cross-attention to images needs."""


def require_separate_media(model_type: str, name: str, *, packing: bool, pairs: str | None) -> None:
    """Raises ValueError if rows hold several sequences with images or audio and the family does not keep these apart.

    pairs: `objective.type` if it puts both answers of a pair into one row.
    """
    apart = MEDIA_PACKING if packing else MEDIA_PACKING | IN_ROWS_OF_THEIR_OWN
    if not (packing or pairs) or model_type in apart:
        return
    field = "data.packing is true" if packing else f"objective.type {pairs!r} shares rows"
    raise ValueError(
        f"{field}, but model.name {name!r} is of type {model_type}, and sequences with images or audio are known to be "
        f"kept apart in {', '.join(sorted(apart))} only; "
        f"{'set data.packing to false' if packing else 'choose one of these'}"
    )
