"""Length, batch and optimizer steps of a run: the sections `training`, `optimizer` and `schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.sections.fields import Count, Decay, Flag, Integer, Number, Section, Text, number


class Training(Section):
    """How long a run trains, and its batch size."""

    steps: Count | None = Field(
        None, description="Optimizer steps. Give this or `epochs`; with neither, the run has two epochs."
    )
    epochs: Annotated[float, Field(gt=0, le=1e6), BeforeValidator(number)] | None = Field(
        None, description="Passes over the data. Give this or `steps`."
    )
    micro_batch_size: Integer = Field(
        4,
        ge=1,
        le=65536,
        description="Rows per process and forward pass; under `grpo` answers, by default `objective.group_size`.",
    )
    gradient_accumulation_steps: Count = Field(1, description="Forward passes per optimizer step.")
    tokens_per_step: Count | None = Field(
        None,
        description="Tokens of all processes per optimizer step, padding included. `gradient_accumulation_steps` "
        "follows from it; leave that out.",
    )
    gradient_checkpointing: Literal["none", "full", "attention", "selective", "per_op"] = Field(
        "none",
        description="What the backward pass recomputes to save memory: `full` every layer, `attention` every layer "
        "except the matrix products of its attention, `selective` whole layers at an interval, `per_op` every layer "
        "except its matrix products and attention.",
    )
    gradient_checkpointing_every: Annotated[int, Field(ge=2, le=10000), BeforeValidator(number)] | None = Field(
        None, description="Interval of `selective`: one of this many layers is recomputed; by default 2."
    )
    gradient_checkpointing_except_last: Annotated[int, Field(ge=0, le=10000), BeforeValidator(number)] = Field(
        0,
        description="Number of last layers that are not recomputed. The backward pass begins with them, before there "
        "are gradients: without `optimizer.in_backward`, some of them do not raise the peak.",
    )
    activation_offloading: Flag = Field(
        False,
        description="Keep what recomputed layers keep in pinned host memory between the passes, copied while the GPU "
        "computes: for long rows. Needs `gradient_checkpointing: full`, `attention` or `selective`; no effect "
        "without a GPU.",
    )
    router_loss: Literal["step", "running"] = Field(
        "step",
        description="Tokens over which the router loss of a mixture counts the use of experts, with "
        "`gradient_accumulation_steps`: `step` all of the step, whose later micro-batches are first routed in a "
        "forward pass of their own; `running` those of the step so far. Without accumulation both are exact.",
    )
    neftune_noise_alpha: Annotated[float, Field(gt=0, le=1e4), BeforeValidator(number)] | None = Field(
        None,
        description="NEFTune: uniform noise on the embeddings in training, of at most this number over the square root "
        "of document length x width; its authors use 5 to 15.",
    )
    compile: Flag = Field(False, description="Compile each layer with `torch.compile`, during the first steps.")
    cuda_graphs: Literal["auto"] | Flag = Field(
        "auto",
        description="Replay the passes of a micro-batch as CUDA graphs, with the same losses bit for bit: `auto` where "
        "the first steps are bound by the host and the run supports it; `true` refuses a run that does not. Graphs are "
        "for one process, packed rows and `pretrain` or `sft`, without dropout.",
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="Multiply in FP8 in the linear layers except the head, where that is faster: `tensorwise` with one "
        "scale for each tensor, `rowwise` with one for each row, which is more exact and slower. Weights, gradients "
        "and optimizer stay as they are. Needs a GPU with FP8 (Ada, Hopper, Blackwell); emulated on CPUs.",
    )
    deterministic: Flag = Field(
        False,
        description="Use only PyTorch algorithms that repeat bit for bit. An operation that has none ends the run.",
    )

    @property
    def recomputed_every(self) -> int:
        """Interval of recomputed layers, whole or in part: one of this many; 0 if none is recomputed."""
        if self.gradient_checkpointing == "selective":
            return self.gradient_checkpointing_every or 2
        return 0 if self.gradient_checkpointing == "none" else 1


class ParameterGroup(Section):
    """Weights with a learning rate or weight decay of their own, selected by name."""

    match: Text = Field(
        description="Whole parts of a weight's dotted name, next to each other; `*` and `[0-9]` stand for characters "
        "of a part: `embed_tokens`, `layers.0`, `mlp.*_proj`. A pattern that matches no trained weight is an error.",
    )
    lr: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Peak learning rate of these weights; by default that of the run."
    )
    weight_decay: Annotated[float, Field(ge=0, le=100), BeforeValidator(number)] | None = Field(
        None,
        description="Weight decay of all of these weights, also of biases and norms; by default as for the others.",
    )


class Optimizer(Section):
    """The optimizer, and what happens to gradients before it."""

    type: Literal["adamw", "adamw_8bit", "muon", "adafactor", "lion", "schedule_free"] = Field(
        "adamw",
        description="`adamw`: fused. `adamw_8bit`: moments of weight matrices take eight bits. "
        "`muon`: orthogonalizes the updates of weight matrices and uses AdamW for embeddings, head and "
        "norms. `adafactor`: PyTorch's; second moments by rows and columns, almost no state. `lion`: one moment, and "
        "updates of one size; needs the extra `bitsandbytes`. `schedule_free`: AdamW that averages weights in place of "
        "a schedule; needs the extra `schedule-free`.",
    )
    precision: Literal["fp32_master", "stochastic_rounding", "nearest"] = Field(
        "fp32_master",
        description="How bfloat16 weights take updates smaller than their rounding step. `fp32_master` keeps 16 more "
        "bits of each weight in the optimizer state: an exact fp32 master weight for 2 bytes. `stochastic_rounding` "
        "rounds each update up or down at random in proportion and needs no memory; a run still repeats bit "
        "for bit. `nearest` loses small updates: at a learning rate of 1e-5 about 98 % of a pretrained model's weights "
        "never move. The first two also round bfloat16 moments stochastically. float32 weights lose nothing anyway.",
    )
    lr: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None,
        description="Peak learning rate; by default 2e-3 from scratch, 2e-5 for a pretrained model, "
        "2e-4 for an adapter, and a twentieth of that for preferences, such as `dpo`. A tenth for `lion`; 1e-2 for "
        "`adafactor`, relative to the size of the weights.",
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Decay rates of the two moments.")
    eps: Number = Field(1e-8, gt=0, le=1, description="Added to the denominator.")
    weight_decay: Number = Field(
        0.01, ge=0, le=100, description="Decoupled weight decay; biases and norms are left out."
    )
    groups: tuple[ParameterGroup, ...] = Field(
        (),
        description="Weights with a learning rate or weight decay of their own. A weight belongs to the first group "
        "that matches it.",
    )
    momentum: Decay | None = Field(None, description="Decay rate of the moment of `muon`; by default 0.95.")
    max_grad_norm: Number = Field(1.0, ge=0, description="Clip gradients to this global norm; 0 turns clipping off.")
    in_backward: Flag = Field(
        False,
        description="Update each weight in the backward pass, as soon as its gradient is computed, and free the "
        "gradient: less memory, and updates overlap. Needs no gradient accumulation, and under `fsdp` `max_grad_norm` "
        "0. Clips by an estimate of the norm: the gradients so far, and the step before's for the others.",
    )
    paged: Flag = Field(
        False,
        description="Keep AdamW's moments in managed memory: when GPU memory runs out, for example at the peak of a "
        "long row, the driver moves them to host memory, and steps are slower.",
    )

    @property
    def muon_momentum(self) -> float:
        """`momentum`, or the default."""
        return 0.95 if self.momentum is None else self.momentum


class Schedule(Section):
    """Learning rate over the run: linear warm-up, then the shape."""

    type: Literal["constant", "linear", "cosine", "cosine_with_restarts", "wsd"] = Field(
        "cosine",
        description="Shape after the warm-up. `cosine_with_restarts` jumps back to the peak at the start of each "
        "cycle; `wsd` stays at the peak and decays at the end.",
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] | None = Field(
        None,
        description="Share of the steps in which the learning rate rises from 0 (exclusive) to its peak; by default "
        "0.05.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=10**9), BeforeValidator(number)] | None = Field(
        None, description="Steps of the warm-up. Give this or `warmup_ratio`."
    )
    min_lr_ratio: Number = Field(
        0.0,
        ge=0,
        lt=1,
        description="Where the decay ends, as a share of the peak learning rate. `constant` has no decay.",
    )
    num_cycles: Annotated[int, Field(ge=1, le=10**6), BeforeValidator(number)] | None = Field(
        None, description="Cycles of `cosine_with_restarts` after the warm-up; by default 2."
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Share of the steps in which `wsd` decays; by default 0.2."
    )

    @property
    def cycles(self) -> int:
        """`num_cycles`, or the default."""
        return 2 if self.num_cycles is None else self.num_cycles

    @property
    def warmup_share(self) -> float:
        """`warmup_ratio`, or the default; 0 if `warmup_steps` states the warm-up."""
        if self.warmup_steps is not None:
            return 0.0
        return 0.05 if self.warmup_ratio is None else self.warmup_ratio

    @property
    def falling(self) -> float:
        """Share of the last steps in which `wsd` decays; 0 for the other shapes, which decay from the warm-up on."""
        if self.type != "wsd":
            return 0.0
        return 0.2 if self.decay_ratio is None else self.decay_ratio
