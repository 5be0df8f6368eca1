"""How known families of transformers are patched: one row per `config.model_type`. Others: `discover`.

All of them are decoders whose modeling file follows one naming scheme (`<Prefix>RMSNorm`, `<Prefix>MLP`,
`<Prefix>Attention`, `<Prefix>ForCausalLM`) and whose attention calls the module's `apply_rotary_pos_emb`. A new row
needs no code where that holds; `tests/kernels/test_patch.py` trains a small model of every row, patched and not.

Two operators find no place here, since a module that is patched keeps being called as the family calls it, with its
hooks. `qk_norm_rope`: attention calls two norms and then the rotation, which knows neither their weights nor their
inputs; fusing them would take a copy of every family's attention. `add_rms_norm`: would take a copy of every family's
layer, and a norm that is called no longer or whose result changes its type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..ops.experts.experts_arguments import Gate
from ..ops.norm.rms_norm import Cast

# Activations of feed-forward layers with a gate, and of those without one. A family of the table has one of them.
GATED = ("swiglu", "geglu")
UNGATED = ("relu_squared", "gelu", "silu")
ACTIVATIONS = (*GATED, *UNGATED)
OPERATORS = ("rms_norm", "layer_norm", "rope", *ACTIVATIONS, "experts", "linear_cross_entropy")


@dataclass(frozen=True)
class Norm:
    """How the family writes RMSNorm: `x̂ * (offset + weight)`, where it rounds, and epsilon.

    eps: the attribute that holds epsilon, or epsilon itself.
    center: the mean is subtracted, as in LayerNorm, which may have a bias.
    """

    eps: str | float = "variance_epsilon"
    offset: float = 0.0
    cast: Cast = "llama"
    center: bool = False

    def eps_of(self, module: Any) -> float:
        """The epsilon of a norm of the family."""
        eps: float = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        return eps


@dataclass(frozen=True)
class Mlp:
    """How the family writes its feed-forward layer; whether it is built with that activation is seen on the module.

    operator: of `GATED` for `down_proj(act(gate_proj(x)) * up_proj(x))`, of `UNGATED` for `down_proj(act(up_proj(x)))`,
        with nothing around it.
    packed: gate and up are the halves of one layer, named by `gate`, the gate first.
    activation: the attribute that holds the activation; None if the forward calls SiLU by itself.
    gate_multiplier, multiplier: attributes with what the gate and the layer's result are multiplied by, if they are.
    gate, up, down: the attributes that hold the linear layers.
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
    """How the family writes its experts, whose weights are parameters [E, ...] of one module.

    gate_up, down: the attributes that hold the weights; those of biases end in `_bias`.
    transposed: the weights are [E, H, 2 * I] and [E, I, H].
    activation: the attribute that holds the activation of the gate; None for SiLU.
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
    """PEFT's wrapper of experts that adapts one of their weights (`target_parameters`)."""


@dataclass(frozen=True)
class Rope:
    """The functions by which an attention's forward rotates queries and keys, each with the kind of its rotation."""

    functions: tuple[tuple[str, str], ...] = (("apply_rotary_pos_emb", "halves"),)


@dataclass(frozen=True)
class Head:
    """How a causal model makes logits of the hidden states.

    body, head: the attributes that hold the model without its head, and the head.
    softcap: the config's field with the cap on the logits, where it has one.
    divisor, multiplier: the config's field by which the logits are divided or multiplied, where there is one.
    balanced: its loss of routers, where the config asks for it, is `load_balancing_loss_func` of the modeling file.
    labelled: the body is given the labels too (Gemma 3's builds its mask by them).
    output: the class of the forward's output; None for `CausalLMOutputWithPast`.
    """

    body: str = "model"
    head: str = "lm_head"
    softcap: str | None = None
    divisor: str | None = None
    multiplier: str | None = None
    balanced: bool = False
    labelled: bool = False
    output: type | None = None


# What a patched module computes.
Recipe = Norm | Mlp | Experts | ExpertsAdapter | Rope | Head


@dataclass(frozen=True)
class Row:
    """One model family.

    mlp: None for a feed-forward layer of another kind.
    interleaved: the rotation pairs adjacent features instead of the halves of a head.
    softcap: the config's field with the cap on the logits; None for no cap.
    divisor, multiplier: the config's fields by which logits are divided and multiplied; None for neither.
    folder: the folder of the modeling file, if it differs from the model type.
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
        """The modeling file's module."""
        folder = self.folder or self.model_type
        return f"transformers.models.{folder}.modeling_{folder}"

    def recipe(self, operator: str) -> Recipe:
        """What a module of this family that runs `operator` computes."""
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
        """The operators that the engine replaces in this family."""
        return tuple(
            name
            for name in OPERATORS
            if name not in (*ACTIVATIONS, "layer_norm", "experts")
            or (self.mlp is not None and name == self.mlp.operator)
        )

    @property
    def unsupported(self) -> tuple[str, ...]:
        """The activations, if the family has a feed-forward layer of another kind."""
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
