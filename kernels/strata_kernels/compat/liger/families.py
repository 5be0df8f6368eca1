"""The functions `apply_liger_kernel_to_*` of Liger 0.8.5: parameters and model types.

Parameters are listed in Liger's order; `!` marks one that is False by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

# Parameter → the operators of `patch_model` that it enables.
OPERATORS_OF = {
    "rope": ("rope",),
    "rms_norm": ("rms_norm",),
    "layer_norm": ("layer_norm",),
    "swiglu": ("swiglu", "experts"),
    "geglu": ("geglu", "experts"),
    "relu_squared": ("relu_squared", "experts"),
    "fused_linear_cross_entropy": ("linear_cross_entropy",),
}
FLAGS = (*OPERATORS_OF, "cross_entropy")

_HEAD = "!cross_entropy fused_linear_cross_entropy"
_SWIGLU = f"rope {_HEAD} rms_norm swiglu model"
_GEGLU = f"rope {_HEAD} rms_norm geglu model"
# Families for whose rotations or experts Liger has no kernel.
_NO_ROPE = f"!rope {_HEAD} rms_norm swiglu model"
_NO_SWIGLU = f"rope {_HEAD} rms_norm !swiglu model"


@dataclass(frozen=True)
class Family:
    """One function.

    Attributes:
        name: the function's name after `apply_liger_kernel_to_`.
        parameters: see the module's docstring.
        types: its model types.
    """

    name: str
    parameters: str
    types: tuple[str, ...]

    @property
    def defaults(self) -> dict[str, Any]:
        """Flag → default, without `model` and `**kwargs`."""
        names = [name for name in self.parameters.split() if name.lstrip("!") in FLAGS]
        return {name.lstrip("!"): not name.startswith("!") for name in names}

    @property
    def signature(self) -> Signature:
        """The signature of Liger's function."""
        return Signature([self._parameter(name) for name in self.parameters.split()], return_annotation=None)

    def _parameter(self, name: str) -> Parameter:
        if name == "**kwargs":
            return Parameter("kwargs", Parameter.VAR_KEYWORD)
        default = None if name == "model" else self.defaults[name.lstrip("!")]
        return Parameter(name.lstrip("!"), Parameter.POSITIONAL_OR_KEYWORD, default=default)


def _family(name: str, parameters: str = _SWIGLU, types: str = "") -> Family:
    return Family(name, parameters, tuple(types.split()) or (name,))


FAMILIES = {
    family.name: family
    for family in (
        _family("llama"),
        _family("llama4", f"{_SWIGLU} layer_norm", "llama4_text llama4"),
        _family("mllama", f"rope {_HEAD} layer_norm rms_norm swiglu model", "mllama mllama_text_model"),
        _family("granite", "rope cross_entropy !fused_linear_cross_entropy rms_norm swiglu model"),
        _family("smollm3"),
        _family("ministral"),
        _family("mistral"),
        _family("mixtral"),
        _family("nemotron", f"relu_squared {_HEAD} model **kwargs"),
        _family("muse_glimmer", f"rope {_HEAD} layer_norm rms_norm swiglu model"),
        _family("gemma", _GEGLU),
        _family("gemma2", _GEGLU),
        _family("gemma3_text", _GEGLU),
        _family("gemma3", f"rope {_HEAD} layer_norm rms_norm geglu model"),
        _family("gemma4_text", f"!rope {_HEAD} rms_norm geglu model"),
        _family("gemma4", f"!rope {_HEAD} !layer_norm rms_norm geglu model"),
        _family("paligemma", f"rope {_HEAD} layer_norm rms_norm geglu model"),
        _family("qwen2"),
        _family("qwen3"),
        _family("qwen3_moe"),
        _family("qwen2_vl", f"rope {_HEAD} rms_norm layer_norm swiglu model", "qwen2_vl qwen2_vl_text"),
        _family("qwen2_5_vl", types="qwen2_5_vl qwen2_5_vl_text"),
        _family("qwen3_vl", _NO_SWIGLU, "qwen3_vl qwen3_vl_text"),
        _family("qwen3_vl_moe", types="qwen3_vl_moe qwen3_vl_moe_text"),
        _family("qwen3_next", _NO_ROPE),
        _family("qwen3_5", _NO_ROPE, "qwen3_5 qwen3_5_text"),
        _family("qwen3_5_moe", _NO_ROPE, "qwen3_5_moe qwen3_5_moe_text"),
        _family("gpt_oss", _NO_SWIGLU),
        _family("phi3"),
        _family("olmo2"),
        _family("olmo3"),
        _family("glm4", _NO_ROPE),
        _family("glm4v", _NO_ROPE),
        _family("glm4v_moe", _NO_ROPE),
        _family("llava", f"{_HEAD} model **kwargs"),
        _family("pixtral", "rope rms_norm swiglu model"),
        _family("internvl", f"{_HEAD} rms_norm layer_norm model **kwargs"),
        _family("smolvlm", f"{_HEAD} rms_norm layer_norm model **kwargs"),
        _family("falcon_h1"),
        _family("hunyuan_v1_dense"),
        _family("hunyuan_v1_moe"),
        _family("deepseek_v2", _NO_ROPE),
        _family("deepseek_v3", _NO_ROPE),
        _family("deepseek_v4", f"!rope {_HEAD} rms_norm !swiglu model"),
        _family("exaone4"),
    )
}
FAMILY_OF = {model_type: family for family in FAMILIES.values() for model_type in family.types}


def settings_of(family: Family | None, given: dict[str, Any]) -> dict[str, bool]:
    """Flag → value, from the caller or a default.

    A False default only means that Liger has no kernel, so it is ignored, except for the two losses.

    Raises:
        ValueError: both losses are on.
    """
    settings = {name: bool(value) for name, value in given.items() if name in FLAGS}
    if family is not None:
        decided = {name: on for name, on in family.defaults.items() if on or name.endswith("cross_entropy")}
        settings = {**decided, **settings}
    if settings.get("cross_entropy") and settings.get("fused_linear_cross_entropy"):
        raise ValueError(
            "cross_entropy and fused_linear_cross_entropy cannot both be True: the second computes the loss without "
            "logits, the first from logits"
        )
    return settings


def excluded(settings: dict[str, bool]) -> tuple[str, ...]:
    """`exclude` for `patch_model`: the operators for which all flags are False."""
    switched: dict[str, list[bool]] = {}
    for name, on in settings.items():
        for operator in OPERATORS_OF.get(name, ()):
            switched.setdefault(operator, []).append(on)
    return tuple(operator for operator, flags in switched.items() if not any(flags))
