"""The sections `model` and `adapter`: the model to train, and which of its weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

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


class Model(Section):
    """The model to train and where it comes from."""

    name: Text = Field("tiny-llama", description="Preset (`tiny-llama`, from scratch), Hub id, or folder.")
    revision: Text | None = Field(
        None, description="Commit, tag or branch of a Hub model. Pin it for reproducible runs."
    )
    trust_remote_code: Flag | CodeVersion = Field(
        False,
        description="Code that the model brings, to be run: the full commit of a Hub model, also in `revision`; for a "
        "folder `true`, or `sha256:` and the digest of its Python files, which an error shows.",
    )
    tokenizer: Text | None = Field(
        None,
        description="Hub id or folder of the tokenizer; by default the model's. A preset trains one on the data.",
    )
    add_special_tokens: tuple[Text, ...] = Field(
        (),
        description="Special tokens to add to the tokenizer. Embeddings and head grow with it; their new rows begin at "
        "the mean of the others, as in transformers.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Data type of weights and arithmetic. `auto` is bfloat16 on a GPU that supports it, float32 "
        "elsewhere.",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        "auto",
        description="Attention implementation, by its transformers name; `auto` is `sdpa` where the model supports it, "
        "and `eager` elsewhere. On packed rows `sdpa` uses varlen attention if it can, with FlashAttention 4 on Hopper "
        "GPUs if `flash-attn-4` is installed. FlashAttention 2 and 3 are used only if you name them. Models with "
        "attention sinks, such as gpt-oss, support `eager` and, with `auto`, varlen attention.",
    )
    freeze: tuple[Text, ...] = Field(
        (),
        description="Weights to freeze, by parts of their dotted names; `*` and `[0-9]` match characters of one part: "
        "`embed_tokens`, `layers.[0-3]`, `*norm`. A pattern that matches nothing is an error.",
    )
    trainable: tuple[Text, ...] = Field(
        (), description="The reverse of `freeze`: only weights that match are trained; empty: all."
    )

    _head: Head = PrivateAttr("tokens")

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
    """LoRA, with PEFT's field names: two small matrices beside each linear layer are trained, everything else is
    frozen.

    The adapter has the model's dtype. Checkpoints hold only the adapter; the exported model has it merged.
    """

    type: Literal["lora"] = Field("lora", description="Low-rank matrices are trained.")
    r: Integer = Field(16, ge=1, le=16384, description="Rank of the matrices.")
    lora_alpha: Number = Field(32, gt=0, le=1e6, description="The adapter's output is scaled by `lora_alpha / r`.")
    lora_dropout: Number = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout probability of the adapter's inputs in training. Objectives that compare answers, such as "
        "`dpo` and `reward`, train without any dropout.",
    )
    target_modules: tuple[Text, ...] = Field(
        (),
        description="Linear layers, and the embeddings, to adapt, by the ends of their names; empty: all linear layers "
        "but the head.",
    )
    init_lora_weights: Literal["default", "pissa", "pissa_niter_4", "pissa_niter_16"] = Field(
        "default",
        description="How the matrices begin: `default` has no effect at first; `pissa` is the principal part of each "
        "weight, which is taken out of it; `pissa_niter_4` and `_16` compute that part roughly, in seconds.",
    )
    target_parameters: tuple[Text, ...] = Field(
        (),
        description="Weights of experts to adapt, by the ends of their names, such as `gate_up_proj` and `down_proj`; "
        "empty: none. They are not linear layers, so `target_modules` does not reach them.",
    )
    use_dora: Flag = Field(False, description="DoRA: train the norm of each weight vector apart from its direction.")
    modules_to_save: tuple[Text, ...] = Field(
        (),
        description="Modules to train whole beside the adapter, by the ends of their names, such as `embed_tokens` and "
        "`lm_head`.",
    )
    init_from: Text | None = Field(
        None,
        description="Folder or Hub id of an adapter to start from, as PEFT saves it. Its settings must be those of "
        "this section.",
    )
    loraplus_lr_ratio: Annotated[float, Field(gt=0, le=1e4), BeforeValidator(number)] | None = Field(
        None,
        description="LoRA+: learning rate of the second matrix (B) as a multiple of that of the first; its authors "
        "recommend 16.",
    )
    quantization: Literal["none", "nf4"] = Field(
        "none",
        description="Quantize the frozen weights of linear layers, and of experts that the kernels compute, to four "
        "bits (QLoRA) with bitsandbytes; needs the extra `bitsandbytes`.",
    )
    use_rslora: Flag = Field(False, description="Scale by `lora_alpha / sqrt(r)` instead, for high ranks.")

    @property
    def starts_from_base(self) -> bool:
        """Whether the model without its adapter is the initial model throughout the run."""
        return not (self.modules_to_save or self.init_from or self.is_pissa)

    @property
    def is_pissa(self) -> bool:
        """Whether the matrices begin as a part of the weights."""
        return self.init_lora_weights != "default"
