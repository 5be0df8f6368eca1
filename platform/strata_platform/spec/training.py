"""How long and by what steps a run learns: the sections `training`, `optimizer` and `schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.fields import Count, Decay, Flag, Number, Section, number


class Training(Section):
    """How long, and how much at a time."""

    steps: Count | None = Field(
        None, description="Optimizer steps. Give this or `epochs`; with neither, two passes over the data."
    )
    epochs: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None, description="Passes over the data. Give this or `steps`."
    )
    micro_batch_size: Count = Field(4, description="Rows per process and forward pass.")
    gradient_accumulation_steps: Count = Field(1, description="Forward passes per optimizer step.")
    tokens_per_step: Count | None = Field(
        None,
        description="Tokens of all processes per optimizer step, padding included; says what "
        "`gradient_accumulation_steps` is, which is left out then.",
    )
    gradient_checkpointing: Literal["none", "full", "selective", "per_op"] = Field(
        "none",
        description="What the backward pass computes again to save memory: `full` all of a layer, `selective` all of "
        "some layers, `per_op` all but a layer's matrix products and attention.",
    )
    gradient_checkpointing_every: Annotated[int, Field(ge=2), BeforeValidator(number)] | None = Field(
        None, description="Under `selective`, each so many layers one is recomputed; by default 2."
    )
    compile: Flag = Field(False, description="Compile each layer by `torch.compile`, while the first steps run.")
    deterministic: Flag = Field(
        False,
        description="Take only algorithms of PyTorch that repeat bit for bit, for runs on GPUs that must. An operation "
        "that has none ends the run.",
    )

    @property
    def recomputed_every(self) -> int:
        """Each so many layers one is recomputed, in whole or in part; 0 for none of them."""
        if self.gradient_checkpointing == "selective":
            return self.gradient_checkpointing_every or 2
        return 0 if self.gradient_checkpointing == "none" else 1


class Optimizer(Section):
    """What turns gradients into steps, and how they are treated before."""

    type: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="`adamw`, fused; `adamw_8bit`, whose moments of weight matrices have eight bits, with the extra "
        "`bitsandbytes`; `muon`, which orthogonalizes the steps of weight matrices, and leaves embeddings, head and "
        "norms to AdamW.",
    )
    precision: Literal["fp32_master", "stochastic_rounding", "nearest"] = Field(
        "fp32_master",
        description="How bfloat16 weights take updates smaller than their rounding step. `fp32_master` keeps 16 more "
        "bits of each weight in the optimizer state, an exact fp32 master weight for 2 bytes. `stochastic_rounding` "
        "rounds each update up or down at random in proportion, for no memory; a run still repeats bit "
        "for bit. `nearest` loses small updates: at a learning rate of 1e-5 about 98 % of a pretrained model's weights "
        "never move. The first two also round bfloat16 moments stochastically. float32 weights lose nothing anyway.",
    )
    lr: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None,
        description="Peak learning rate; by default 2e-3 from scratch, 2e-5 for a pretrained model, "
        "2e-4 for an adapter, and a twentieth of that under `dpo`.",
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Decay rates of the two moments.")
    eps: Number = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: Number = Field(0.01, ge=0, description="Decoupled weight decay; biases and norms are left out.")
    momentum: Decay | None = Field(None, description="Decay rate of `muon`'s one moment; by default 0.95.")
    max_grad_norm: Number = Field(1.0, ge=0, description="Clip gradients to this global norm; 0 turns clipping off.")
    in_backward: Flag = Field(
        False,
        description="Take each weight's step in the backward pass, as soon as its gradient is there, and free that: "
        "less memory, and the update is hidden. Without clipping and accumulation only.",
    )
    paged: Flag = Field(
        False,
        description="Keep AdamW's moments in memory that gives way: where a GPU's lacks, as in the peak of a long row, "
        "the driver moves them to the host's, and steps are slower.",
    )

    @property
    def muon_momentum(self) -> float:
        """`momentum`, or the default."""
        return 0.95 if self.momentum is None else self.momentum


class Schedule(Section):
    """Learning rate over the run: linear warm-up, then the shape."""

    type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Shape after the warm-up; `wsd` stays at the peak and falls to 0 at the end."
    )
    warmup_ratio: Number = Field(
        0.05,
        ge=0,
        le=1,
        description="Share of the steps in which the learning rate rises to its peak; the first one learns, too.",
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Share of the steps in which `wsd` falls; by default 0.2."
    )

    @property
    def falling(self) -> float:
        """Share of the steps, the last ones, in which the rate falls; 0 where that has no beginning of its own."""
        if self.type != "wsd":
            return 0.0
        return 0.2 if self.decay_ratio is None else self.decay_ratio
