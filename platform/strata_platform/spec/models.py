"""The one description of a run: what the YAML file, the command line, the notebook and the docs all speak of.

Every field has a default, so `RunSpec()` is a complete run: a small Llama, trained from scratch on the docstrings of
Python's standard library. Objects are frozen and refuse unknown fields; what contradicts is refused with both fields
named. Nothing here reads the environment or the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, model_validator

from strata_platform.spec.check import Contradiction, check
from strata_platform.spec.objectives import Distill, Dpo, Pretrain, Sft
from strata_platform.spec.parallel import Ddp, Deepspeed, Fsdp, Single
from strata_platform.spec.section import (
    Count,
    Decay,
    Flag,
    Name,
    Number,
    Quantity,
    Section,
    Sources,
    Text,
    Whole,
    number,
)

PRESETS = ("tiny-llama",)
BUILTIN_SOURCES = ("python-docs",)


class Model(Section):
    """The model to train and where it comes from."""

    name: Text = Field("tiny-llama", description="Preset (`tiny-llama`, from scratch), Hub id, or folder.")
    revision: Text | None = Field(None, description="Commit, tag or branch of a Hub model. Pin it for repeatable runs.")
    tokenizer: Text | None = Field(
        None,
        description="Hub id or folder of the tokenizer; by default the model's own. A preset trains one on the data.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of weights and arithmetic. `auto` is bfloat16 on a GPU that has it, float32 elsewhere.",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        "sdpa", description="Attention implementation, by its transformers name."
    )


class Data(Section):
    """What to train on, and how rows become tokens."""

    source: Sources = Field(
        "python-docs",
        description="`python-docs` (built in), a Hub data set id, or files: path, glob or URL of "
        ".jsonl, .json, .parquet, .csv or .txt; several as a list.",
    )
    subset: Text | None = Field(None, description="Configuration name of a Hub data set.")
    split: Text = Field("train", description="Split of a Hub data set to train on.")
    revision: Text | None = Field(None, description="Commit, tag or branch of a Hub data set.")
    format: Literal["auto", "text", "prompt_completion", "chat", "preference"] = Field(
        "auto", description="Shape of a row. `auto` decides by the columns that are there."
    )
    text_column: Text = Field("text", description="Column of format `text`.")
    prompt_column: Text = Field("prompt", description="Prompt column of `prompt_completion` and `preference`.")
    completion_column: Text = Field("completion", description="Completion column of `prompt_completion`.")
    messages_column: Text = Field("messages", description="Column of format `chat`: a list of {role, content}.")
    chosen_column: Text = Field("chosen", description="Column of `preference`: the better answer, text or messages.")
    rejected_column: Text = Field("rejected", description="Column of `preference`: the other answer.")
    chat_template: Text | None = Field(
        None, description="Named chat template (`chatml`, `llama3`), or a .jinja file; by default the tokenizer's own."
    )
    sequence_length: Whole = Field(256, ge=8, le=1 << 20, description="Tokens in a row of a batch.")
    packing: Flag = Field(True, description="Put several samples into one row; none attends to another.")
    overlong: Literal["skip", "truncate", "error"] = Field(
        "skip",
        description="What to do with a sample longer than a row, or a pair of answers. Skips are counted and reported; "
        "plain text is split instead, under `pretrain` all of it.",
    )
    invalid: Literal["error", "skip"] = Field(
        "error", description="What to do with a row of the wrong type. Skips are counted and reported."
    )
    validation_fraction: Number = Field(0.05, ge=0.0, le=0.5, description="Share of samples held out for evaluation.")
    max_samples: Count | None = Field(None, description="Use only the first N samples of the source.")


class Optimizer(Section):
    """What turns gradients into steps, and how they are treated before."""

    type: Literal["adamw", "muon"] = Field(
        "adamw",
        description="`adamw`, fused; `muon`, which orthogonalizes the steps of weight matrices, and leaves embeddings, "
        "head and norms to AdamW.",
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

    @property
    def muon_momentum(self) -> float:
        """`momentum`, or the default."""
        return 0.95 if self.momentum is None else self.momentum


class Schedule(Section):
    """Learning rate over the run: linear warm-up, then the shape."""

    type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Shape after the warm-up; `wsd` stays at the peak and falls to 0 at the end."
    )
    warmup_ratio: Number = Field(0.05, ge=0, le=1, description="Share of the steps from 0 to the peak learning rate.")
    decay_ratio: Annotated[float, Field(gt=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Share of the steps in which `wsd` falls; by default 0.2."
    )

    @property
    def falling(self) -> float:
        """Share of the steps, the last ones, in which the rate falls; 0 where that has no beginning of its own."""
        if self.type != "wsd":
            return 0.0
        return 0.2 if self.decay_ratio is None else self.decay_ratio


class NoAdapter(Section):
    """All weights of the model learn."""

    type: Literal["none"] = Field("none", description="All weights learn.")


class Lora(Section):
    """LoRA by PEFT, whose names the fields have: two small matrices beside each linear layer learn, the rest does not.

    The adapter has the dtype of the model. Checkpoints hold it alone; the exported model has it merged in.
    """

    type: Literal["lora"] = Field("lora", description="Low-rank matrices learn.")
    r: Count = Field(16, description="Rank of the matrices.")
    lora_alpha: Number = Field(32, gt=0, description="The adapter's output is scaled by `lora_alpha / r`.")
    lora_dropout: Number = Field(0.0, ge=0, lt=1, description="Share of the adapter's inputs dropped in training.")
    target_modules: tuple[Text, ...] = Field(
        (), description="Linear layers to adapt, by the ends of their names; empty: all but the head."
    )
    use_dora: Flag = Field(False, description="DoRA: learn the length of each weight vector apart from its direction.")
    use_rslora: Flag = Field(False, description="Scale by `lora_alpha / sqrt(r)` instead, for high ranks.")


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
    gradient_checkpointing: Literal["none", "full", "selective", "per_op"] = Field(
        "none",
        description="What the backward pass computes again to save memory: `full` all of a layer, `selective` all of "
        "some layers, `per_op` all but a layer's matrix products and attention.",
    )
    gradient_checkpointing_every: Annotated[int, Field(ge=2), BeforeValidator(number)] | None = Field(
        None, description="Under `selective`, each so many layers one is recomputed; by default 2."
    )
    compile: Flag = Field(False, description="Compile each layer by `torch.compile`, while the first steps run.")

    @property
    def recomputed_every(self) -> int:
        """Each so many layers one is recomputed, in whole or in part; 0 for none of them."""
        if self.gradient_checkpointing == "selective":
            return self.gradient_checkpointing_every or 2
        return 0 if self.gradient_checkpointing == "none" else 1


class Runtime(Section):
    """What drives the training loop."""

    framework: Literal["hf", "lightning", "torch"] = Field(
        "hf",
        description="`hf`: the Hugging Face Trainer; `lightning`: Lightning's Trainer; `torch`: a plain PyTorch loop. "
        "All train the same.",
    )


class KernelStore(Section):
    """Compiled kernels that pods share. What is in it is run: whoever can write there can do what the pods can."""

    url: Text | None = Field(
        None, description="Folder that all pods mount, or an object store such as `s3://bucket/path`; none by default."
    )
    signing_key: Annotated[str, Field(pattern=r"^(env|file):.+$")] | None = Field(
        None,
        description="Where pods find the key, of 32 bytes or more, that archives are signed with: `env:NAME` or "
        "`file:PATH`. What it has not signed is refused.",
    )
    allow_unsigned: Flag = Field(False, description="Without a signing key: use archives that nobody has signed.")
    size_limit_mb: Count = Field(10240, description="MiB; beyond them, what was not used for longest is removed.")
    timeout: Annotated[float, Field(gt=0), BeforeValidator(number)] = Field(
        60.0, description="Seconds that a pod waits for the store in all; then it compiles."
    )


class Kernels(Section):
    """The fused operators, and compiling them before training starts."""

    enabled: Flag = Field(True, description="Patch the model with the fused operators.")
    exclude: tuple[Literal["rms_norm", "rope", "swiglu", "geglu", "relu_squared", "linear_cross_entropy"], ...] = Field(
        (), description="Operators to leave as the model has them."
    )
    warmup: Flag = Field(True, description="Compile the run's kernels once per pod before its processes start.")
    warmup_timeout: Count = Field(600, description="Seconds after which the warm-up is given up and training starts.")
    store: KernelStore = Field(default_factory=KernelStore, description="Compiled kernels that pods share.")


class Checkpoint(Section):
    """When state is saved, and what a new attempt does with it."""

    every: Count = Field(50, description="Steps between checkpoints; the last step is always saved.")
    keep_last: Count = Field(2, description="Complete checkpoints to keep.")
    keep_every: Count | None = Field(
        None, description="Keep those of the steps that are multiples of this, too; a multiple of `every`."
    )
    on_sigterm: Literal["stop", "save"] = Field(
        "stop",
        description="`stop` ends at once, and the steps since the last checkpoint are repeated; `save` ends the step "
        "and saves first, within the grace period, for which the processes exchange a message after every step.",
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="`auto` continues from the newest complete checkpoint; `never` refuses a folder that has any, also "
        "after a preemption.",
    )


class Faults(Section):
    """What is watched for while a run trains, and what then follows."""

    hang_timeout: Whole = Field(
        600,
        ge=0,
        le=1800,
        description="Seconds that a step may take; then every process leaves its stacks and ends, and the run is "
        "continued from its last checkpoint. The first step, and one that waits for a checkpoint, may take three "
        "times as long. 0: no limit.",
    )


class Evaluation(Section):
    """What is measured and shown before and after training."""

    samples: Whole = Field(3, ge=0, le=64, description="Prompts from the validation split to generate from.")
    max_new_tokens: Whole = Field(48, ge=1, le=4096, description="Tokens to generate per prompt.")
    max_batches: Count | None = Field(None, description="Evaluate on at most this many micro-batches.")


class Topology(Section):
    """Shape of the job, in torchrun's terms."""

    nnodes: Whole = Field(1, ge=1, le=4096, description="Pods.")
    nproc_per_node: Whole = Field(1, ge=1, le=64, description="Processes per pod, one per GPU.")

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nnodes * self.nproc_per_node


class Resources(Section):
    """What each pod of a remote run asks for."""

    cpu: Quantity = Field("2", description="CPU cores.")
    memory: Quantity = Field("8Gi", description="Memory.")
    gpu: Whole = Field(0, ge=0, le=64, description="GPUs; 0 runs on the CPU.")
    gpu_type: Text | None = Field(
        None, description="GPU model, by the node label that Flyte's `gpu-device-node-label` names."
    )
    shared_memory: Quantity = Field("2Gi", description="Size of /dev/shm.")
    queue: Name | None = Field(
        None, description="Kueue queue to wait in; by default the one called `default`, where the cluster has it."
    )
    priority: Name | None = Field(None, description="Kueue priority class; by default the cluster's.")
    pod_template: Name | None = Field(
        None,
        description="PodTemplate of the cluster to start the pods from; by default the one that Flyte is set up with.",
    )


class Tracking(Section):
    """Where metrics go, beside the JSON lines that are always written."""

    report_to: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        ("tensorboard",),
        description="Trackers that are told of every step. TensorBoard writes to the run's folder; servers and keys of "
        "the others are environment variables.",
    )
    project: Text = Field("strata", description="MLflow's experiment and the project of Weights & Biases.")
    log_every: Count = Field(10, description="Steps between progress lines and reports; metrics have every step.")
    prometheus_port: Annotated[int, Field(ge=1024, le=65472), BeforeValidator(number)] | None = Field(
        None,
        description="Port on which a pod's first process serves metrics for Prometheus, and the others on the ports "
        "after it; by default none does.",
    )


Objective = Annotated[Pretrain | Sft | Dpo | Distill, Field(discriminator="type")]
Adapter = Annotated[NoAdapter | Lora, Field(discriminator="type")]
Parallel = Annotated[Single | Ddp | Fsdp | Deepspeed, Field(discriminator="type")]


class RunSpec(Section):
    """A training run, whole. Every field has a default."""

    name: Name = Field("finetune", description="Name of the run: lower-case letters, digits and dashes.")
    output: Text = Field("out", description="Folder, the same for every attempt; the run writes to `<output>/<name>`.")
    seed: Whole = Field(0, ge=0, lt=2**32, description="Seed of initialization, data order and dropout.")
    model: Model = Field(default_factory=Model, description="What is trained.")
    data: Data = Field(default_factory=Data, description="What it is trained on.")
    objective: Objective = Field(default_factory=Sft, description="What is minimized.")
    adapter: Adapter = Field(default_factory=NoAdapter, description="Which weights learn.")
    training: Training = Field(default_factory=Training, description="Length and batch.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="Optimizer.")
    schedule: Schedule = Field(default_factory=Schedule, description="Learning-rate schedule.")
    parallel: Parallel = Field(default_factory=Single, description="How the work is split over processes.")
    runtime: Runtime = Field(default_factory=Runtime, description="Training framework.")
    kernels: Kernels = Field(default_factory=Kernels, description="Fused operators.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Checkpoints.")
    faults: Faults = Field(default_factory=Faults, description="Hangs.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Evaluation before and after.")
    topology: Topology = Field(default_factory=Topology, description="Pods and processes.")
    resources: Resources = Field(default_factory=Resources, description="Requests of each pod.")
    tracking: Tracking = Field(default_factory=Tracking, description="Metrics.")

    @model_validator(mode="wrap")
    @classmethod
    def _all_problems(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return check(cls, value, handler, cls._contradictions)

    @property
    def peak_lr(self) -> float:
        """`optimizer.lr`, or the default: new weights bear a hundred times the rate of old ones, adapters ten times.

        Preferences are told by small differences, which a twentieth of it suffices for.
        """
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        share = 0.05 if self.objective.type == "dpo" else 1.0
        if self.adapter.type != "none":
            return 2e-4 * share
        return (2e-3 if self.model.name in PRESETS else 2e-5) * share

    @property
    def model_parts(self) -> int:
        """Processes that one copy of weights, gradients and optimizer state is split over."""
        return self.topology.world_size // self.parallel.replicas if self.parallel.type == "fsdp" else 1

    @property
    def rows_per_step(self) -> int:
        """Rows that all processes read for one optimizer step."""
        training = self.training
        return training.micro_batch_size * training.gradient_accumulation_steps * self.topology.world_size

    @property
    def passes(self) -> float | None:
        """Passes over the data: None when `training.steps` decides the length."""
        if self.training.steps is not None:
            return None
        return self.training.epochs if self.training.epochs is not None else 2.0

    def _contradictions(self) -> Iterator[Contradiction]:
        training, topology = self.training, self.topology
        yield Contradiction(
            training.steps is not None and training.epochs is not None,
            ("training.steps", "training.epochs"),
            "contradicts training.epochs; give one of them",
        )
        yield Contradiction(
            training.gradient_checkpointing_every is not None and training.gradient_checkpointing != "selective",
            ("training.gradient_checkpointing_every", "training.gradient_checkpointing"),
            f"set, but training.gradient_checkpointing is '{training.gradient_checkpointing}'; set that to "
            "'selective', or leave training.gradient_checkpointing_every out",
        )
        yield Contradiction(
            self.parallel.type == "single" and topology.world_size > 1,
            ("parallel.type", "topology.nproc_per_node", "topology.nnodes"),
            f"'single' contradicts a topology of {topology.world_size} processes; set parallel.type to 'ddp', "
            "'fsdp' or 'deepspeed', or topology.nnodes and topology.nproc_per_node to 1",
        )
        yield Contradiction(
            self.parallel.type in ("fsdp", "deepspeed") and topology.world_size == 1,
            ("parallel.type", "topology.nproc_per_node", "topology.nnodes"),
            f"'{self.parallel.type}' splits the model over processes, and topology.nproc_per_node x topology.nnodes is "
            "1; raise one of them, or set parallel.type to 'single'",
        )
        yield Contradiction(
            self.parallel.type == "deepspeed" and self.parallel.offload_param != "none" and self.parallel.stage < 3,
            ("parallel.offload_param", "parallel.stage"),
            "set, but only parallel.stage 3 splits the weights; set parallel.stage to 3, or leave "
            "parallel.offload_param out",
        )
        yield Contradiction(
            self.parallel.type == "deepspeed" and self.parallel.stage == 3 and training.compile,
            ("training.compile", "parallel.stage"),
            "makes a graph of each layer, and parallel.stage 3 gathers and frees weights inside of them; set "
            "training.compile to false, parallel.stage to 2, or parallel.type to 'fsdp'",
        )
        yield from self._contradictions_of_fsdp()
        yield from self._contradictions_of_muon()
        yield from self._contradictions_of_in_backward()
        yield Contradiction(
            0 < self.resources.gpu < topology.nproc_per_node,
            ("resources.gpu", "topology.nproc_per_node"),
            f"{self.resources.gpu} is less than topology.nproc_per_node {topology.nproc_per_node}; "
            "each process needs a GPU of its own",
        )
        yield Contradiction(
            self.resources.gpu_type is not None and self.resources.gpu == 0,
            ("resources.gpu_type", "resources.gpu"),
            "set, but resources.gpu is 0; set resources.gpu, or leave resources.gpu_type out",
        )
        yield from self._objective_contradictions()
        yield from self._store_contradictions()
        yield Contradiction(
            self.model.name in PRESETS and self.model.revision is not None,
            ("model.revision", "model.name"),
            f"set, but model.name '{self.model.name}' is a preset and has none; leave model.revision out",
        )
        yield Contradiction(
            self.adapter.type != "none" and self.model.name in PRESETS,
            ("adapter.type", "model.name"),
            f"'{self.adapter.type}' adapts a pretrained model, and model.name '{self.model.name}' is a preset, "
            "trained from scratch; set model.name to a Hub id or a folder, or adapter.type to 'none'",
        )
        keep_every, every = self.checkpoint.keep_every, self.checkpoint.every
        yield Contradiction(
            keep_every is not None and keep_every % every != 0,
            ("checkpoint.keep_every", "checkpoint.every"),
            f"{keep_every} is not a multiple of checkpoint.every {every}, and no other step is saved; "
            f"set it to one, for example {every * 10}",
        )
        yield Contradiction(
            self.schedule.decay_ratio is not None and self.schedule.type != "wsd",
            ("schedule.decay_ratio", "schedule.type"),
            f"set, but schedule.type '{self.schedule.type}' decays in a way of its own; set schedule.type to 'wsd', or "
            "leave schedule.decay_ratio out",
        )
        yield Contradiction(
            self.schedule.warmup_ratio + self.schedule.falling > 1,
            ("schedule.warmup_ratio", "schedule.decay_ratio", "schedule.type"),
            f"{self.schedule.warmup_ratio} and schedule.decay_ratio {self.schedule.falling} are more than all steps; "
            "lower one of them",
        )
        yield Contradiction(
            self.model.attention.startswith("flash") and self.model.dtype == "float32",
            ("model.dtype", "model.attention"),
            f"'float32' contradicts model.attention '{self.model.attention}', which has no float32; "
            "set model.dtype to 'bfloat16', or model.attention to 'sdpa'",
        )
        yield from (
            Contradiction(
                self.data.source in BUILTIN_SOURCES and value is not None,
                (f"data.{field}", "data.source"),
                f"set, but data.source '{self.data.source}' is built in and has none; leave data.{field} out",
            )
            for field, value in (("subset", self.data.subset), ("revision", self.data.revision))
        )

    def _store_contradictions(self) -> Iterator[Contradiction]:
        store = self.kernels.store
        yield Contradiction(
            store.url is not None and (store.signing_key is not None) == store.allow_unsigned,
            ("kernels.store.signing_key", "kernels.store.allow_unsigned", "kernels.store.url"),
            "contradicts kernels.store.allow_unsigned; archives are signed or they are not: leave one of them out"
            if store.allow_unsigned
            else "missing, and kernels.store.url has archives that are run; give a key, or set "
            "kernels.store.allow_unsigned if nobody else can write there",
        )
        yield Contradiction(
            store.url is None and (store.signing_key is not None or store.allow_unsigned),
            ("kernels.store.url", "kernels.store.signing_key", "kernels.store.allow_unsigned"),
            "missing, and there is no store without it; set it, or leave kernels.store.signing_key and "
            "kernels.store.allow_unsigned out",
        )
        yield Contradiction(
            store.url is not None and not (self.kernels.enabled and self.kernels.warmup),
            ("kernels.store.url", "kernels.warmup", "kernels.enabled"),
            "set, but only the warm-up asks the store, and kernels.warmup or kernels.enabled is false; set them to "
            "true, or leave kernels.store.url out",
        )

    def _objective_contradictions(self) -> Iterator[Contradiction]:
        objective, source, format = self.objective, self.data.source, self.data.format
        yield Contradiction(
            objective.type == "sft" and format == "text",
            ("data.format", "objective.type"),
            "'text' has no completions, which objective.type 'sft' needs; set objective.type to 'pretrain', "
            "or data.format to 'prompt_completion' or 'chat'",
        )
        yield Contradiction(
            (format == "preference") != (objective.type == "dpo") and format != "auto",
            ("data.format", "objective.type"),
            f"'{format}' does not go with objective.type '{objective.type}': format 'preference', pairs of answers, is "
            "what 'dpo' needs and no other can use; set data.format to 'auto', or objective.type to suit the data",
        )
        yield Contradiction(
            objective.type == "dpo" and source in BUILTIN_SOURCES,
            ("data.source", "objective.type"),
            f"'{source}' has no pairs of answers, which objective.type 'dpo' needs; set data.source to a Hub data set "
            "or to files with the columns prompt, chosen and rejected",
        )
        yield Contradiction(
            objective.type == "distill" and objective.teacher in PRESETS,
            ("objective.teacher",),
            "a preset is trained from scratch and has nothing to teach; give a Hub id or the folder of a trained model",
        )
        if objective.type != "dpo":
            return
        yield Contradiction(
            objective.reference == "adapter" and self.adapter.type == "none",
            ("objective.reference", "adapter.type"),
            "'adapter' is switched off for the reference, and adapter.type is 'none'; set adapter.type to 'lora', or "
            "objective.reference to 'precomputed'",
        )
        yield Contradiction(
            objective.loss == "ipo" and objective.label_smoothing > 0,
            ("objective.label_smoothing", "objective.loss"),
            "set, but objective.loss 'ipo' has none; leave objective.label_smoothing out, or set objective.loss to "
            "'sigmoid'",
        )

    def _contradictions_of_fsdp(self) -> Iterator[Contradiction]:
        if self.parallel.type != "fsdp":
            return
        replicas, processes = self.parallel.replicas, self.topology.world_size
        fields = ("parallel.replicas", "topology.nproc_per_node", "topology.nnodes")
        yield Contradiction(
            processes % replicas != 0,
            fields,
            f"{replicas} does not divide the {processes} processes of topology.nproc_per_node x topology.nnodes; set "
            "parallel.replicas to a divisor, such as topology.nnodes",
        )
        yield Contradiction(
            replicas == processes > 1,
            fields,
            f"{replicas} copies leave each of the processes of topology.nproc_per_node x topology.nnodes a whole one; "
            "lower parallel.replicas, or set parallel.type to 'ddp'",
        )

    def _contradictions_of_muon(self) -> Iterator[Contradiction]:
        yield Contradiction(
            self.optimizer.momentum is not None and self.optimizer.type != "muon",
            ("optimizer.momentum", "optimizer.type"),
            f"set, but optimizer.type '{self.optimizer.type}' has two moments, whose rates are optimizer.betas; set "
            "optimizer.type to 'muon', or leave optimizer.momentum out",
        )
        if self.optimizer.type != "muon":
            return
        yield Contradiction(
            self.adapter.type != "none",
            ("optimizer.type", "adapter.type"),
            f"'muon' orthogonalizes the steps of whole weight matrices, and under adapter.type '{self.adapter.type}' "
            "only factors of changes to them learn; set optimizer.type to 'adamw'",
        )
        yield Contradiction(
            self.parallel.type not in ("single", "ddp", "fsdp"),
            ("optimizer.type", "parallel.type"),
            f"'muon' needs whole matrices, which parallel.type '{self.parallel.type}' cuts into flat parts; set "
            "parallel.type to 'fsdp', or optimizer.type to 'adamw'",
        )
        if self.parallel.type == "fsdp":
            yield Contradiction(
                self.parallel.cpu_offload,
                ("optimizer.type", "parallel.cpu_offload"),
                "'muon' multiplies matrices that are split over GPUs, and parallel.cpu_offload has them in host "
                "memory; set parallel.cpu_offload to false, or optimizer.type to 'adamw'",
            )
            yield Contradiction(
                self.optimizer.in_backward,
                ("optimizer.in_backward", "optimizer.type"),
                "takes steps between the backward pass's messages, and optimizer.type 'muon' sends its own under "
                "parallel.type 'fsdp'; set optimizer.in_backward to false, or optimizer.type to 'adamw'",
            )

    def _contradictions_of_in_backward(self) -> Iterator[Contradiction]:
        if not self.optimizer.in_backward:
            return
        yield Contradiction(
            self.optimizer.max_grad_norm > 0,
            ("optimizer.in_backward", "optimizer.max_grad_norm"),
            f"takes steps before all gradients are known, and optimizer.max_grad_norm {self.optimizer.max_grad_norm} "
            "clips by the norm of all; set optimizer.max_grad_norm to 0, or optimizer.in_backward to false",
        )
        yield Contradiction(
            self.training.gradient_accumulation_steps > 1,
            ("optimizer.in_backward", "training.gradient_accumulation_steps"),
            "takes a step in every backward pass, and training.gradient_accumulation_steps "
            f"{self.training.gradient_accumulation_steps} makes several of them one step; set "
            "training.gradient_accumulation_steps to 1, or optimizer.in_backward to false",
        )
        yield Contradiction(
            self.parallel.type not in ("single", "fsdp"),
            ("optimizer.in_backward", "parallel.type"),
            f"takes steps when a process has its gradients, and parallel.type '{self.parallel.type}' averages them "
            "over the processes after that; set parallel.type to 'fsdp', or optimizer.in_backward to false",
        )
        yield Contradiction(
            self.parallel.type == "fsdp" and self.parallel.cpu_offload,
            ("optimizer.in_backward", "parallel.cpu_offload"),
            "takes steps while gradients travel to the host memory that parallel.cpu_offload wants them in; set one of "
            "the two to false",
        )
