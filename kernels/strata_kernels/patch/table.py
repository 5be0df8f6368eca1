"""Which transformers models can be patched, and how they differ: one row per `config.model_type`.

All of them are decoders whose modeling file follows one naming scheme (`<Prefix>RMSNorm`, `<Prefix>MLP`,
`<Prefix>Attention`, `<Prefix>ForCausalLM`) and whose attention calls the module's `apply_rotary_pos_emb`. A new row
needs no code where that holds; `tests/kernels/test_patch.py` trains a small model of every row, patched and not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ops.rms_norm import Cast

OPERATORS = ("rms_norm", "rope", "swiglu", "linear_cross_entropy")


@dataclass(frozen=True)
class Norm:
    """How the family writes RMSNorm: `x̂ * (offset + weight)`, where it rounds, and the attribute that holds epsilon."""

    eps: str = "variance_epsilon"
    offset: float = 0.0
    cast: Cast = "llama"


@dataclass(frozen=True)
class Row:
    """One model family.

    swiglu: its MLP is `down_proj(act_fn(gate_proj(x)) * up_proj(x))` with nothing around it; whether `act_fn` is SiLU
        is seen on the module.
    softcap: the config's field with the cap on the head's logits, where it has one.
    """

    model_type: str
    prefix: str
    norm: Norm = field(default_factory=Norm)
    swiglu: bool = True
    softcap: str | None = None

    @property
    def module(self) -> str:
        """The modeling file's module."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that the family has a place for."""
        return tuple(name for name in OPERATORS if self.swiglu or name != "swiglu")


_GEMMA_NORM = Norm(eps="eps", offset=1.0, cast="gemma")

ROWS = {
    row.model_type: row
    for row in (
        Row("llama", "Llama"),
        Row("mistral", "Mistral"),
        Row("ministral", "Ministral"),
        Row("qwen2", "Qwen2"),
        Row("qwen3", "Qwen3"),
        Row("smollm3", "SmolLM3"),
        Row("gemma", "Gemma", norm=_GEMMA_NORM, swiglu=False),
        Row("gemma2", "Gemma2", norm=_GEMMA_NORM, swiglu=False, softcap="final_logit_softcapping"),
    )
}
