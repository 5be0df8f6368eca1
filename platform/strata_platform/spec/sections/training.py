"""Length, batch and optimizer steps of a run: the sections `training`, `optimizer` and `schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.sections.fields import Count, Decay, Flag, Integer, Number, Section, Text, number

# With as many, the error of a sum in bfloat16 is 1.1 times that of one backward pass: docs/benchmarks/precision.md.
MOST_BFLOAT16_SUMMANDS = 16


class Training(Section):
    """How long a run trains, and its batch size."""

    steps: Count | None = Field(
        None, description="Optimizer steps. Set this or `epochs`; with neither, the run has two epochs."
    )
    epochs: Annotated[float, Field(gt=0, le=1e6), BeforeValidator(number)] | None = Field(
        None, description="Passes over the data. Set this or `steps`."
    )
    micro_batch_size: Integer = Field(
        4,
        ge=1,
        le=65536,
        description="Rows per process and forward pass. Under `grpo`, answers; by default `objective.group_size`.",
    )
    gradient_accumulation_steps: Count = Field(1, description="Micro-batches per optimizer step.")
    tokens_per_step: Count | None = Field(
        None,
        description="Tokens of all processes per optimizer step, padding included. Set this instead of "
        "`gradient_accumulation_steps`, which is computed from it.",
    )
    gradient_accumulation_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Data type in which micro-batches add their gradients of bfloat16 weights. `float32` takes 2 more "
        f"bytes per trained weight. `auto` is `float32` for more than {MOST_BFLOAT16_SUMMANDS} micro-batches per step, "
        "whose sum in bfloat16 would lose small addends. float32 weights always use float32.",
    )
    gradient_checkpointing: Literal["none", "full", "attention", "selective", "per_op"] = Field(
        "none",
        description="What the backward pass recomputes to save memory. `full`: every layer. `attention`: every layer "
        "except the matrix products and attention operators in its attention module. `selective`: one in every "
        "`gradient_checkpointing_every` layers. `per_op`: every layer except its matrix products and attention "
        "operators.",
    )
    gradient_checkpointing_every: Annotated[int, Field(ge=2, le=10000), BeforeValidator(number)] | None = Field(
        None, description="Interval of `selective`: one of this many layers is recomputed; by default 2."
    )
    gradient_checkpointing_except_last: Annotated[int, Field(ge=0, le=10000), BeforeValidator(number)] = Field(
        0,
        description="Number of last layers that are not recomputed. The backward pass begins with them, before "
        "gradients take memory: without `optimizer.in_backward`, a few of them do not raise the peak.",
    )
    activation_offloading: Flag = Field(
        False,
        description="Keep the saved activations of recomputed layers in pinned host memory between the passes, for "
        "long rows. Copies overlap with computation. Needs `gradient_checkpointing: full`, `attention` or "
        "`selective`; has no effect without a GPU.",
    )
    router_loss: Literal["step", "running"] = Field(
        "step",
        description="With gradient accumulation: the tokens over which the router loss of a mixture of experts counts "
        "how often experts are used. `step`: all tokens of the step; an extra forward pass routes later micro-batches "
        "first. `running`: the step's tokens so far. Without accumulation, both are equal.",
    )
    neftune_noise_alpha: Annotated[float, Field(gt=0, le=1e4), BeforeValidator(number)] | None = Field(
        None,
        description="NEFTune: in training, add uniform noise to the embeddings, of at most this number divided by the "
        "square root of document length times width. Its authors use 5 to 15.",
    )
    compile: Flag = Field(False, description="Compile each layer with `torch.compile`, during the first steps.")
    cuda_graphs: Literal["auto"] | Flag = Field(
        "auto",
        description="Replay the passes of a micro-batch as CUDA graphs; losses are bit-identical. `auto`: if the host "
        "limits the speed of the first steps and the run supports graphs. `true`: a run that does not support them is "
        "rejected. Graphs need one process, packed rows, `pretrain` or `sft`, and no dropout inside the model.",
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="Multiply in FP8 in the linear layers except the head, where FP8 is faster. `tensorwise`: one "
        "scale per tensor. `rowwise`: one scale per row, which is more exact and slower. Trained weights, gradients "
        "and optimizer state keep their data type. Needs a GPU with FP8 (Ada, Hopper, Blackwell); emulated on CPUs.",
    )
    deterministic: Flag = Field(
        False,
        description="Use only PyTorch algorithms whose results are bit-identical in every run. An operation without "
        "such an algorithm ends the run.",
    )

    @property
    def sums_in_float32(self) -> bool:
        """Whether micro-batches add gradients of bfloat16 weights in float32."""
        if self.gradient_accumulation_dtype == "auto":
            return self.gradient_accumulation_steps > MOST_BFLOAT16_SUMMANDS
        return self.gradient_accumulation_dtype == "float32" and self.gradient_accumulation_steps > 1

    @property
    def recomputed_every(self) -> int:
        """Interval of recomputed layers, whole or in part: one of this many; 0 if none is recomputed."""
        if self.gradient_checkpointing == "selective":
            return self.gradient_checkpointing_every or 2
        return 0 if self.gradient_checkpointing == "none" else 1


class ParameterGroup(Section):
    """Weights with their own learning rate or weight decay, selected by name."""

    match: Text = Field(
        description="Consecutive whole parts of a weight's dotted name, such as `embed_tokens`, `layers.0` or "
        "`mlp.*_proj`; `*` and `[0-9]` match characters within a part. A pattern that matches no trained weight is an "
        "error.",
    )
    lr: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Peak learning rate of these weights; by default the run's."
    )
    weight_decay: Annotated[float, Field(ge=0, le=100), BeforeValidator(number)] | None = Field(
        None,
        description="Weight decay of all these weights, biases and norms included; by default that of the run, which "
        "leaves out biases and norms.",
    )


class Optimizer(Section):
    """The optimizer and gradient clipping."""

    type: Literal["adamw", "adamw_8bit", "muon", "adafactor", "lion", "schedule_free"] = Field(
        "adamw",
        description="`adamw`: fused AdamW. `adamw_8bit`: 8-bit moments for most weight matrices. `muon`: "
        "orthogonalizes the updates of weight matrices; embeddings, head and norms use AdamW. `adafactor`: PyTorch's, "
        "with second moments by row and column, and almost no state. `lion`: one moment, and updates of equal size; "
        "needs the extra `bitsandbytes`. `schedule_free`: AdamW that averages weights instead of decaying the "
        "learning rate; needs the extra `schedule-free`.",
    )
    precision: Literal["fp32_master", "stochastic_rounding", "nearest"] = Field(
        "fp32_master",
        description="How bfloat16 weights store updates smaller than their rounding step. `fp32_master` keeps 16 more "
        "bits of each weight in the optimizer state: an exact fp32 master weight for 2 more bytes. "
        "`stochastic_rounding` rounds each update up or down at random, in proportion, without more memory; runs "
        "still repeat bit for bit. `nearest` loses small updates: at a learning rate of 1e-5, about 98 % of a "
        "pretrained model's weights never change. The first two also round bfloat16 moments stochastically. float32 "
        "weights lose nothing.",
    )
    lr: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None,
        description="Peak learning rate. By default 2e-3 from scratch, 2e-5 for a pretrained model, 2e-4 for an "
        "adapter, and a twentieth of these for `dpo`, `orpo`, `simpo`, `cpo`, `kto` and `grpo`. `lion` has a tenth of "
        "that by default; `adafactor` has 1e-2 from scratch, 1e-3 for a pretrained model and 5e-2 for an adapter, "
        "relative to the size of the weights.",
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Decay rates of the two moments.")
    eps: Number = Field(1e-8, gt=0, le=1, description="Term added to the denominator of the update.")
    weight_decay: Number = Field(0.01, ge=0, le=100, description="Decoupled weight decay. Biases and norms have none.")
    groups: tuple[ParameterGroup, ...] = Field(
        (),
        description="Weights with their own learning rate or weight decay. A weight belongs to the first group that "
        "matches it.",
    )
    momentum: Decay | None = Field(None, description="Decay rate of the moment of `muon`; by default 0.95.")
    max_grad_norm: Number = Field(1.0, ge=0, description="Clip gradients to this global norm; 0: no clipping.")
    in_backward: Flag = Field(
        False,
        description="Update each weight in the backward pass, as soon as its gradient is computed, and free the "
        "gradient. This saves memory and overlaps the updates. Needs `single` or `fsdp`, no gradient accumulation, "
        "and under `fsdp` `max_grad_norm: 0`. Clipping estimates the norm: from the gradients so far, and the "
        "previous step's for the others.",
    )
    paged: Flag = Field(
        False,
        description="Keep AdamW's moments in managed memory. When GPU memory runs out, for example at the peak of a "
        "long row, the driver moves them to host memory, and steps are slower.",
    )

    @property
    def muon_momentum(self) -> float:
        """`momentum`, or the default."""
        return 0.95 if self.momentum is None else self.momentum


class Schedule(Section):
    """Learning rate over the run: a linear warm-up, then the shape of `type`."""

    type: Literal["constant", "linear", "cosine", "cosine_with_restarts", "wsd"] = Field(
        "cosine",
        description="Shape after the warm-up. `cosine_with_restarts` returns to the peak at the start of each cycle; "
        "`wsd` stays at the peak and decays in the last steps.",
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] | None = Field(
        None,
        description="Share of the steps in which the learning rate rises linearly from 0 (exclusive) to its peak; by "
        "default 0.05.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=10**9), BeforeValidator(number)] | None = Field(
        None, description="Number of warm-up steps. Set this or `warmup_ratio`."
    )
    min_lr_ratio: Number = Field(
        0.0,
        ge=0,
        lt=1,
        description="Learning rate at the end of the decay, as a share of the peak. `constant` has no decay.",
    )
    num_cycles: Annotated[int, Field(ge=1, le=10**6), BeforeValidator(number)] | None = Field(
        None, description="Number of cycles of `cosine_with_restarts` after the warm-up; by default 2."
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Share of the run's steps, at its end, in which `wsd` decays; by default 0.2."
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
