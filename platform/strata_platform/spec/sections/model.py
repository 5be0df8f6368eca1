"""The sections `model` and `adapter`: the model, and which of its weights are trained."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from strata_platform.spec.describe import Allowed
from strata_platform.spec.sections.fields import Flag, Integer, Number, Section, Text, number

PRESETS = ("tiny-llama",)
Head = Literal["tokens", "score"]
SCORE = "score"
"""The module of a model that scores texts, by its name in transformers."""

CodeVersion = Annotated[
    str,
    Field(pattern=r"^([0-9a-f]{40}|sha256:[0-9a-f]{64})$"),
    Allowed("a full commit, or sha256: and a digest"),
]


def _names_or_regex(value: tuple[str, ...] | str) -> tuple[str, ...] | str:
    if not isinstance(value, str):
        if regex := next((name for name in value if re.search(r"[*+?|()\[\]^$\\{}]", name)), None):
            raise ValueError(f"{regex!r} is no end of a name; write a regular expression as text, outside of a list")
        return value
    if re.fullmatch(r"[\w-]+(\s*,\s*[\w-]+)*", value):
        listed = ", ".join(re.findall(r"[\w-]+", value))
        raise ValueError(
            "text is a regular expression for whole names, such as model.layers.0.self_attn.q_proj, which this cannot "
            f"match; for ends of names write [{listed}]"
        )
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"not a regular expression: {error}; correct it, or list ends of names, such as [q_proj, v_proj]"
        ) from None
    return value


Targets = Annotated[
    tuple[Text, ...] | Text,
    AfterValidator(_names_or_regex),
    Allowed("a list of text, or a regular expression"),
]


class Model(Section):
    """The model to train and where it comes from."""

    name: Text = Field(
        "tiny-llama", description="A preset (`tiny-llama`, trained from scratch), a Hub id, or a folder."
    )
    revision: Text | None = Field(
        None, description="Commit, tag or branch of a Hub model. Pin it for reproducible runs."
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="Initial weights. `pretrained`: those of the Hub model or folder. `random`: those that "
        "transformers' `from_config` draws for its `config.json`, from `seed`; weights are not read, and a folder "
        "needs none. A preset is always random.",
    )
    trust_remote_code: Flag | CodeVersion = Field(
        False,
        description="Run the Python code that comes with the model. For a Hub model: the full commit, which must also "
        "be in `revision`. For a folder: `true`, or `sha256:` and the digest of its Python files, which an error "
        "shows.",
    )
    tokenizer: Text | None = Field(
        None,
        description="Hub id or folder of the tokenizer; by default the model's. For a preset, one is trained on the "
        "data.",
    )
    add_special_tokens: tuple[Text, ...] = Field(
        (),
        description="Special tokens to add to the tokenizer. Embeddings and head get a row for each, initialized to "
        "the mean of the other rows, as in transformers.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Data type of weights and arithmetic. `auto` is bfloat16 on a GPU that supports it, and float32 "
        "elsewhere.",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        "auto",
        description="Attention implementation, by its transformers name. `auto` is `sdpa` where the model supports it, "
        "and `eager` elsewhere. On packed rows, `sdpa` uses varlen attention if possible, with FlashAttention 4 on "
        "Hopper GPUs if `flash-attn-4` is installed. FlashAttention 2 and 3 are used only if you name them. Models "
        "with attention sinks, such as gpt-oss, support `eager` and, with `auto`, varlen attention.",
    )
    freeze: tuple[Text, ...] = Field(
        (),
        description="Weights to freeze, by parts of their dotted names, such as `embed_tokens`, `layers.[0-3]` or "
        "`*norm`; `*` and `[0-9]` match characters within a part. A pattern without a match is an error.",
    )
    trainable: tuple[Text, ...] = Field(
        (), description="Weights to train, by the patterns of `freeze`; all others are frozen. Empty: all are trained."
    )

    _head: Head = PrivateAttr("tokens")

    @property
    def from_scratch(self) -> bool:
        """Whether the initial weights are random."""
        return self.init == "random" or self.name in PRESETS

    @property
    def head(self) -> Head:
        """What the last hidden states become: logits of tokens, or the score of a text. The objective decides it."""
        return self._head

    def with_head(self, head: Head) -> Model:
        """This section with that head."""
        changed = self.model_copy()
        changed._head = head
        return changed


class NoAdapter(Section):
    """Full fine-tuning: all weights are trained."""

    type: Literal["none"] = Field("none", description="All weights are trained.")


class Lora(Section):
    """LoRA, with PEFT's field names: trains two small matrices beside each linear layer and freezes all other weights.

    The adapter has the model's dtype. Checkpoints contain only the adapter; the exported model has it merged.
    """

    type: Literal["lora"] = Field("lora", description="Low-rank matrices are trained.")
    r: Integer = Field(16, ge=1, le=16384, description="Rank of the adapter's matrices.")
    lora_alpha: Number = Field(32, gt=0, le=1e6, description="The adapter's output is scaled by `lora_alpha / r`.")
    lora_dropout: Number = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout probability of the adapter's inputs in training. Objectives that compare answers, such as "
        "`dpo` and `reward`, train without dropout.",
    )
    target_modules: Targets = Field(
        (),
        description="Linear layers and embeddings that get an adapter: a list of ends of their names, or a regular "
        "expression that matches whole names, as in PEFT. Empty: all linear layers except the head; of a "
        "vision-language model, those of the language model.",
    )
    init_lora_weights: Literal["default", "pissa", "pissa_niter_4", "pissa_niter_16"] = Field(
        "default",
        description="Initial matrices. `default`: the adapter has no effect at first. `pissa`: the principal part of "
        "each weight, which is subtracted from the weight; `pissa_niter_4` and `pissa_niter_16` compute it "
        "approximately, in seconds.",
    )
    target_parameters: tuple[Text, ...] = Field(
        (),
        description="Expert weights that get an adapter, by the ends of their names, such as `gate_up_proj` and "
        "`down_proj`. Empty: none, because `target_modules` selects only linear layers, and expert weights are not in "
        "linear layers.",
    )
    use_dora: Flag = Field(
        False, description="DoRA: train the norm of each weight vector separately from its direction."
    )
    modules_to_save: tuple[Text, ...] = Field(
        (),
        description="Modules that are trained in full beside the adapter, by the ends of their names, such as "
        "`embed_tokens` and `lm_head`.",
    )
    init_from: Text | None = Field(
        None,
        description="Folder or Hub id of an adapter in PEFT's format to start from. Its settings must equal this "
        "section's.",
    )
    loraplus_lr_ratio: Annotated[float, Field(gt=0, le=1e4), BeforeValidator(number)] | None = Field(
        None,
        description="LoRA+: learning rate of the second matrix (B) as a multiple of the first one's (A); its authors "
        "recommend 16.",
    )
    quantization: Literal["none", "nf4"] = Field(
        "none",
        description="Quantize frozen weights to four bits with bitsandbytes (QLoRA): those of linear layers, and of "
        "experts that run the fused operator. Needs the extra `bitsandbytes`.",
    )
    use_rslora: Flag = Field(
        False, description="Scale the adapter's output by `lora_alpha / sqrt(r)` instead, for high ranks."
    )

    @property
    def starts_from_base(self) -> bool:
        """Whether the model without its adapter is the initial model throughout the run."""
        return not (self.modules_to_save or self.init_from or self.is_pissa)

    @property
    def is_pissa(self) -> bool:
        """Whether the matrices begin as a part of the weights."""
        return self.init_lora_weights != "default"
