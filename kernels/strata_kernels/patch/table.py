"""Table of transformers' model families: one row per `config.model_type`. Other families: `discover`.

All are decoders whose modeling file follows one naming scheme (`<Prefix>RMSNorm`, `<Prefix>MLP`,
`<Prefix>Attention`, `<Prefix>ForCausalLM`) and whose attention calls the module's `apply_rotary_pos_emb`. For
such a family, a new row needs no code; `tests/kernels/test_patch.py` trains a small model of every row, patched and
not.

Two operators are not used, because patched modules are still called by the family's code, with their hooks.
`qk_norm_rope`: attention calls two norms, then the rotation, which has neither their weights nor their inputs; fusion
would need a copy of every family's attention. `add_rms_norm` would need a copy of every family's layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..ops.experts.experts_arguments import Gate
from ..ops.norm.rms_norm import Cast

# Operators of gated feed-forward layers, and of ungated ones. A family of the table has one of them.
GATED = ("swiglu", "geglu")
UNGATED = ("relu_squared", "gelu", "silu")
ACTIVATIONS = (*GATED, *UNGATED)
OPERATORS = ("rms_norm", "layer_norm", "rope", *ACTIVATIONS, "experts", "linear_cross_entropy")


@dataclass(frozen=True)
class Norm:
    """The family's norm, `x̂ * (offset + weight)`.

    eps: name of the attribute with epsilon, or its value.
    offset, cast: as in `rms_norm`.
    center: LayerNorm, which may have a bias, instead of RMSNorm.
    """

    eps: str | float = "variance_epsilon"
    offset: float = 0.0
    cast: Cast = "llama"
    center: bool = False

    def eps_of(self, module: Any) -> float:
        """The epsilon of a norm module."""
        eps: float = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        return eps


@dataclass(frozen=True)
class Mlp:
    """The family's feed-forward layer; whether a module has this activation is checked on the module.

    operator: of `GATED` for `down_proj(act(gate_proj(x)) * up_proj(x))`, of `UNGATED` for `down_proj(act(up_proj(x)))`.
    packed: gate and up are the halves of one layer, named by `gate`, the gate first.
    activation: attribute of the activation; None if forward calls SiLU itself.
    gate_multiplier, multiplier: attributes of the factors of the gate and of the result; None for none.
    gate, up, down: attributes of the linear layers.
    """

    operator: str = "swiglu"
    packed: bool = False
    activation: str | None = "act_fn"
    gate_multiplier: str | None = None
    multiplier: str | None = None
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Experts:
    """The family's experts, whose weights are parameters [E, ...] of one module.

    gate_up, down: attributes of the weights; those of biases end in `_bias`.
    transposed: the weights are [E, H, 2 * I] and [E, I, H].
    activation: attribute of the gate's activation; None for SiLU.
    gate, alpha, limit, offset: as in `experts`.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    transposed: bool = False
    activation: str | None = "act_fn"
    gate: Gate = "halves"
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class ExpertsAdapter:
    """PEFT's wrapper of experts with an adapter of one of their weights (`target_parameters`)."""


@dataclass(frozen=True)
class Rope:
    """(name, kind of `ROTATIONS`) of the functions that rotate queries and keys in an attention's forward."""

    functions: tuple[tuple[str, str], ...] = (("apply_rotary_pos_emb", "halves"),)


@dataclass(frozen=True)
class Head:
    """How a causal model computes logits from hidden states.

    body, head: attributes of the model without its head, and of the head.
    softcap: config field of the softcap, or None.
    divisor, multiplier: config fields of the divisor and multiplier of logits, or None.
    balanced: the router loss, if enabled in the config, is `load_balancing_loss_func` of the modeling file.
    labelled: the body receives the labels, too (Gemma 3's mask depends on them).
    output: class of forward's output; None for `CausalLMOutputWithPast`.
    """

    body: str = "model"
    head: str = "lm_head"
    softcap: str | None = None
    divisor: str | None = None
    multiplier: str | None = None
    balanced: bool = False
    labelled: bool = False
    output: type | None = None


# Description of the forward of a patched module.
Recipe = Norm | Mlp | Experts | ExpertsAdapter | Rope | Head


@dataclass(frozen=True)
class Row:
    """One model family.

    mlp: None if no operator computes the feed-forward layer.
    interleaved: the rotation pairs adjacent features instead of the halves of a head.
    softcap: config field of the softcap, or None.
    divisor, multiplier: config fields of the divisor and multiplier of logits, or None.
    folder: folder of the modeling file, if it differs from the model type.
    """

    model_type: str
    prefix: str
    norm: Norm = field(default_factory=Norm)
    mlp: Mlp | None = field(default_factory=Mlp)
    interleaved: bool = False
    softcap: str | None = None
    divisor: str | None = None
    multiplier: str | None = None
    folder: str | None = None

    @property
    def module(self) -> str:
        """Module name of the modeling file."""
        folder = self.folder or self.model_type
        return f"transformers.models.{folder}.modeling_{folder}"

    def recipe(self, operator: str) -> Recipe:
        """The recipe of a module of this family for `operator`."""
        if operator == "rms_norm":
            return self.norm
        if operator == "rope":
            return Rope((("apply_rotary_pos_emb", "neighbors" if self.interleaved else "halves"),))
        if operator == "linear_cross_entropy":
            return Head(softcap=self.softcap, divisor=self.divisor, multiplier=self.multiplier)
        assert self.mlp is not None
        return self.mlp

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that are applied to this family."""
        return tuple(
            name
            for name in OPERATORS
            if name not in (*ACTIVATIONS, "layer_norm", "experts")
            or (self.mlp is not None and name == self.mlp.operator)
        )

    @property
    def unsupported(self) -> tuple[str, ...]:
        """The activation operators, if none computes the family's feed-forward layer."""
        return () if self.mlp is not None else ACTIVATIONS


_GEMMA_NORM = Norm(eps="eps", offset=1.0, cast="gemma")
_OLMO_NORM = Norm(cast="gemma")
_GEGLU = Mlp("geglu")
_PACKED = Mlp(packed=True, activation="activation_fn", gate="gate_up_proj")
_SCALED = Mlp(gate_multiplier="gate_multiplier", multiplier="down_multiplier")

ROWS = {
    row.model_type: row
    for row in (
        Row("llama", "Llama"),
        Row("mistral", "Mistral"),
        Row("ministral", "Ministral"),
        Row("ministral3", "Ministral3"),
        Row("qwen2", "Qwen2"),
        Row("qwen3", "Qwen3"),
        Row("smollm3", "SmolLM3"),
        Row("gemma", "Gemma", norm=_GEMMA_NORM, mlp=_GEGLU),
        Row("gemma2", "Gemma2", norm=_GEMMA_NORM, mlp=_GEGLU, softcap="final_logit_softcapping"),
        Row("gemma3_text", "Gemma3", norm=_GEMMA_NORM, mlp=_GEGLU, softcap="final_logit_softcapping", folder="gemma3"),
        Row("vaultgemma", "VaultGemma", norm=_GEMMA_NORM, mlp=_GEGLU, softcap="final_logit_softcapping"),
        Row("olmo2", "Olmo2", norm=_OLMO_NORM),
        Row("olmo3", "Olmo3", norm=_OLMO_NORM),
        Row("phi3", "Phi3", mlp=_PACKED),
        Row("glm", "Glm", mlp=_PACKED, interleaved=True),
        Row("glm4", "Glm4", mlp=_PACKED, interleaved=True),
        Row("granite", "Granite", divisor="logits_scaling"),
        Row("helium", "Helium", norm=_OLMO_NORM, interleaved=True),
        Row("ernie4_5", "Ernie4_5", interleaved=True),
        Row("exaone4", "Exaone4"),
        Row("hunyuan_v1_dense", "HunYuanDenseV1"),
        Row("cwm", "Cwm"),
        Row("arcee", "Arcee", mlp=Mlp("relu_squared")),
        Row("falcon_h1", "FalconH1", mlp=_SCALED, multiplier="lm_head_multiplier"),
        Row("apertus", "Apertus", mlp=None),
    )
}
