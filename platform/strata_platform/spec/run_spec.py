"""The spec of a run, shared by the YAML file, the command line, notebooks and the docs.

Every field has a default, so `RunSpec()` is a complete run: it trains a small Llama from scratch on the docstrings of
Python's standard library. Objects are frozen and reject unknown fields; contradictions are rejected with both fields
named. Nothing here reads the environment or the disk.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, model_validator

from strata_platform.spec.describe import Allowed
from strata_platform.spec.problems import check
from strata_platform.spec.rules.contradictions import contradictions
from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.export import Export
from strata_platform.spec.sections.faults import Faults
from strata_platform.spec.sections.fields import (
    Arguments,
    Count,
    Flag,
    Folder,
    GpuResource,
    Integer,
    Name,
    Number,
    ObjectName,
    ObjectStoreUrl,
    Quantity,
    Section,
    Text,
    number,
)
from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.model import SCORE, Head, Lora, Model, NoAdapter
from strata_platform.spec.sections.objectives import (
    PREFERENCES,
    PROMPTED,
    Cpo,
    Custom,
    Distill,
    Dpo,
    Grpo,
    Kto,
    Orpo,
    Pretrain,
    Reward,
    Sft,
    Simpo,
    generates,
)
from strata_platform.spec.sections.parallel import Ddp, Deepspeed, Fsdp, Single
from strata_platform.spec.sections.training import Optimizer, Schedule, Training


class Callback(Section):
    """A callback of your own: a class based on `tasks.runtime.extensions.Callback`."""

    object: ObjectName = Field(description="The class, such as `my_package.callbacks:Notify`.")
    arguments: Arguments = Field({}, description="Keyword arguments for the class.")


class Runtime(Section):
    """The training framework, and callbacks during training."""

    framework: Literal["hf", "lightning", "torch"] = Field(
        "hf",
        description="`hf`: the Hugging Face Trainer; `lightning`: Lightning's Trainer; `torch`: a plain PyTorch loop. "
        "All reach the same losses.",
    )
    callbacks: Annotated[tuple[Callback, ...], Allowed("a list of sections, each with an object")] = Field(
        (), description="Callbacks of your own. Rank 0 calls them in this order."
    )


class Checkpoint(Section):
    """When checkpoints are saved, kept and uploaded, and whether a new attempt resumes."""

    every: Count | None = Field(
        None,
        description="Number of steps between checkpoints; 50 by default, without `per_epoch`. The last step is always "
        "saved.",
    )
    per_epoch: Count | None = Field(
        None,
        description="Number of checkpoints in each epoch, at equal distances up to its last step. Set this or `every`.",
    )
    keep_last: Count = Field(2, description="Number of newest checkpoints to keep.")
    keep_every: Count | None = Field(
        None,
        description="Also keep the checkpoints of steps that are multiples of this; must be a multiple of `every`.",
    )
    keep_best: Flag = Field(
        False,
        description="Also keep the checkpoint with the lowest validation loss of the evaluations during training. It "
        "is saved right after its evaluation, even if no checkpoint is due.",
    )
    load_best_model_at_end: Flag = Field(
        False,
        description="Evaluate and export the checkpoint of `keep_best` instead of the last one, as in Hugging Face's "
        "Trainer.",
    )
    on_sigterm: Literal["stop", "save"] = Field(
        "stop",
        description="`stop`: exit at once; the next attempt repeats the steps since the last checkpoint. `save`: "
        "finish the step and save, within the grace period; for this, the processes synchronize after every step.",
    )
    url: ObjectStoreUrl | None = Field(
        None,
        description="Object store, such as `s3://bucket/path`. Complete checkpoints and the logs of pods are uploaded "
        "to `<url>/<name>`. A start resumes from the newest checkpoint, on disk or in the store. Credentials come "
        "from the environment.",
    )
    url_timeout: Count = Field(900, description="Seconds that the store may be unavailable before the run ends.")
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="`auto` resumes from the newest complete checkpoint. `never` rejects a run folder that has a "
        "checkpoint, also after a preemption.",
    )

    @property
    def interval(self) -> int | None:
        """`every`, or its default; None with `per_epoch`."""
        return 50 if self.every is None and self.per_epoch is None else self.every


class Evaluation(Section):
    """Evaluation before, during and after training."""

    every: Count | None = Field(
        None,
        description="Steps between evaluations during training, which measure the validation loss. The last step is "
        "always evaluated then. By default there are no evaluations during training.",
    )
    per_epoch: Count | None = Field(
        None,
        description="Number of evaluations in each epoch, at equal distances up to its last step. Set this or `every`.",
    )
    during: tuple[Literal["samples", "tasks"], ...] = Field(
        (),
        description="What each evaluation during training does in addition to the validation loss: generate `samples`, "
        "score `tasks`. Training waits for both.",
    )
    early_stopping_patience: Count | None = Field(
        None,
        description="Stop training after this many consecutive evaluations without a lower validation loss, like "
        "Hugging Face's `EarlyStoppingCallback`.",
    )
    early_stopping_threshold: Number = Field(
        0.0, ge=0.0, description="Minimum decrease of the lowest validation loss that counts for early stopping."
    )
    samples: Integer = Field(
        3, ge=0, le=64, description="Number of prompts from the validation split for which answers are generated."
    )
    max_new_tokens: Integer = Field(48, ge=1, le=4096, description="Maximum tokens to generate per prompt.")
    max_batches: Count | None = Field(
        None, description="Maximum number of micro-batches of each source to evaluate on."
    )
    tasks: tuple[Text, ...] = Field(
        (),
        description="Tasks of lm-evaluation-harness to run before and after training, by name or as paths of your own "
        "YAML files; needs the extra `lm-eval`.",
    )
    few_shot: Annotated[int, Field(ge=0, le=64), BeforeValidator(number)] | None = Field(
        None,
        description="Number of few-shot examples before each question of a task; by default the task's own number.",
    )
    task_limit: Count | None = Field(None, description="Maximum number of examples per task.")

    @property
    def interval_field(self) -> str | None:
        """The field that asks for evaluations during training; None without any."""
        if self.per_epoch is not None:
            return "evaluation.per_epoch"
        return None if self.every is None else "evaluation.every"


class Topology(Section):
    """Pods and processes, in torchrun's terms."""

    nnodes: Integer = Field(1, ge=1, le=4096, description="Number of pods.")
    nproc_per_node: Integer = Field(1, ge=1, le=64, description="Processes per pod, one per GPU.")

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nnodes * self.nproc_per_node


class Resources(Section):
    """Resources that each pod of a remote run requests."""

    cpu: Quantity = Field("2", description="CPU cores per pod.")
    memory: Quantity = Field("8Gi", description="Memory per pod.")
    gpu: Integer = Field(
        0, ge=0, le=64, description="GPUs per pod; must equal `topology.nproc_per_node`, or be 0 to run on CPUs."
    )
    gpu_type: Text | None = Field(
        None,
        description="GPU model, as a value of the node label that Flyte's `gpu-device-node-label` names; without "
        "Flyte, of `nvidia.com/gpu.product` or `amd.com/gpu.product-name`.",
    )
    gpu_resource: GpuResource | None = Field(
        None,
        description="Without Flyte: Kubernetes resource of the GPUs, by default `nvidia.com/gpu`. It can also be "
        "`amd.com/gpu`, or one MIG slice such as `nvidia.com/mig-3g.40gb`. With Flyte, Flyte's configuration sets it.",
    )
    shared_memory: Quantity = Field("2Gi", description="Size of /dev/shm.")
    queue: Name | None = Field(
        None, description="Kueue queue; by default the queue `default`, if the namespace has one."
    )
    priority: Name | None = Field(None, description="Kueue priority class; by default the cluster's.")
    time_limit: Count | None = Field(
        None,
        description="Maximum seconds of training, over all attempts, on a cluster or on this machine. Ten minutes "
        "before the end, or a tenth of the limit if that is less, the log says so and a checkpoint is saved. At the "
        "end the run saves another one and stops without a retry. To continue, raise the limit and submit again. "
        "Kueue also ends an attempt that holds its machines for an hour longer than the limit.",
    )
    pod_template: Name | None = Field(
        None,
        description="PodTemplate for the pods, in their namespace. By default the one in Flyte's configuration; "
        "without Flyte, the one called `strata`.",
    )


class Tracking(Section):
    """Where metrics go in addition to `metrics.jsonl`, which always has every step."""

    report_to: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        ("tensorboard",),
        description="Trackers that receive every step. TensorBoard writes to the run's folder; for the others, "
        "environment variables set servers and keys.",
    )
    project: Text = Field("strata", description="Experiment in MLflow, project in Weights & Biases.")
    log_every: Count = Field(
        10,
        description="Steps between progress lines, and between reports to trackers. Trackers and `metrics.jsonl` "
        "receive every step.",
    )
    prometheus_port: Annotated[int, Field(ge=1024, le=65472), BeforeValidator(number)] | None = Field(
        None,
        description="Port on which the first process of a pod serves Prometheus metrics; the other processes use the "
        "following ports. By default there are no endpoints.",
    )


Objective = Annotated[
    Pretrain | Sft | Dpo | Kto | Orpo | Simpo | Cpo | Reward | Distill | Grpo | Custom, Field(discriminator="type")
]
Adapter = Annotated[NoAdapter | Lora, Field(discriminator="type")]
Parallel = Annotated[Single | Ddp | Fsdp | Deepspeed, Field(discriminator="type")]


class RunSpec(Section):
    """A training run. Every field has a default."""

    name: Name = Field("finetune", description="Name of the run: lower-case letters, digits and dashes.")
    output: Folder = Field(
        "out",
        description="Folder for runs, the same in every attempt; the run writes to `<output>/<name>`. To copy results "
        "to an object store, set `checkpoint.url` and `export.url`.",
    )
    seed: Integer = Field(
        0,
        ge=0,
        lt=2**32,
        description="Seed of the initialization, the data order and dropout. It also decides which samples "
        "`data.validation_fraction` holds out.",
    )
    model: Model = Field(default_factory=Model, description="The model to train.")
    data: Data = Field(default_factory=Data, description="The training data.")
    objective: Objective = Field(default_factory=Sft, description="The training objective.")
    adapter: Adapter = Field(default_factory=NoAdapter, description="Which weights are trained.")
    training: Training = Field(default_factory=Training, description="Length and batch size.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning-rate schedule.")
    parallel: Parallel = Field(
        default_factory=Single, description="How the model and the batch are split over processes."
    )
    runtime: Runtime = Field(default_factory=Runtime, description="Training framework and callbacks.")
    kernels: Kernels = Field(default_factory=Kernels, description="Fused operators and their compilation.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Checkpoints.")
    faults: Faults = Field(default_factory=Faults, description="Health checks, hangs, and steps to skip.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Evaluation before, during and after.")
    export: Export = Field(default_factory=Export, description="Formats and destinations of the trained model.")
    topology: Topology = Field(default_factory=Topology, description="Pods and processes.")
    resources: Resources = Field(default_factory=Resources, description="Resources that each pod requests.")
    tracking: Tracking = Field(default_factory=Tracking, description="Metrics and trackers.")

    @model_validator(mode="after")
    def _count_micro_batches(self) -> Self:
        """Compute `training.gradient_accumulation_steps` from `training.tokens_per_step`, unless both are set."""
        training = self.training
        if training.tokens_per_step and "gradient_accumulation_steps" not in training.model_fields_set:
            micro_batches, rest = divmod(training.tokens_per_step, self.tokens_per_forward)
            if micro_batches and not rest:
                counted = training.model_copy(update={"gradient_accumulation_steps": micro_batches})
                # The model is frozen, but this validator is a part of its construction.
                object.__setattr__(self, "training", counted)
        return self

    @model_validator(mode="after")
    def _score_texts(self) -> Self:
        """Give the model of a reward the head of one, which is trained whole beside an adapter."""
        head: Head = "score" if self.objective.type == "reward" else "tokens"
        # The model is frozen, but this validator is a part of its construction.
        if self.model.head != head:
            object.__setattr__(self, "model", self.model.with_head(head))
        if head == "score" and isinstance(self.adapter, Lora) and SCORE not in self.adapter.modules_to_save:
            saved = (*self.adapter.modules_to_save, SCORE)
            object.__setattr__(self, "adapter", self.adapter.model_copy(update={"modules_to_save": saved}))
        return self

    @model_validator(mode="after")
    def _complete_prompts(self) -> Self:
        """Prompts are not packed: their answers come later. By default a forward pass has those of one prompt."""
        if not generates(self.objective):
            return self
        # The model is frozen, but this validator is a part of its construction.
        if "packing" not in self.data.model_fields_set:
            object.__setattr__(self, "data", self.data.model_copy(update={"packing": False}))
        if isinstance(self.objective, Grpo) and "micro_batch_size" not in self.training.model_fields_set:
            size = {"micro_batch_size": self.objective.group_size}
            object.__setattr__(self, "training", self.training.model_copy(update=size))
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _all_problems(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return check(cls, value, handler, contradictions)

    @property
    def peak_lr(self) -> float:
        """`optimizer.lr`, or the default: 2e-3 from scratch, 2e-4 for adapters, 2e-5 for pretrained weights.

        A twentieth of that for preference objectives and GRPO, which learn small differences between answers. For Lion
        a tenth, because each of its updates has the size of AdamW's largest. Adafactor's rates are relative to the
        weights: 1e-2 from scratch, as in PyTorch, 1e-3 for pretrained weights, and 5e-2 for adapters, whose second
        matrices begin at 0: a size below 1e-3 counts as 1e-3.
        """
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        scale = 0.05 if self.objective.type in (*PREFERENCES, *PROMPTED) else 1.0
        if self.optimizer.type == "adafactor":
            if self.adapter.type != "none":
                return 5e-2 * scale
            return (1e-2 if self.model.from_scratch else 1e-3) * scale
        if self.optimizer.type == "lion":
            scale *= 0.1
        if self.adapter.type != "none":
            return 2e-4 * scale
        return (2e-3 if self.model.from_scratch else 2e-5) * scale

    @property
    def fused_loss(self) -> bool:
        """Whether the kernel layer computes the loss from hidden states, without materializing logits."""
        return bool(self.kernels.enabled) and "linear_cross_entropy" not in self.kernels.exclude

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen weights under an adapter are quantized."""
        return isinstance(self.adapter, Lora) and self.adapter.quantization != "none"

    @property
    def packs_experts(self) -> bool:
        """Whether the weights of experts are quantized, too: only the fused operator takes them."""
        fused = bool(self.kernels.enabled) and "experts" not in self.kernels.exclude
        return self.is_quantized and fused and not self.training.compile

    @property
    def dp_size(self) -> int:
        """Data-parallel size: processes, or tensor- and context-parallel groups, that read rows of their own."""
        return self.topology.world_size // (self.parallel.tensor_parallel * self.parallel.context_parallel)

    @property
    def nonfinite(self) -> Literal["skip", "rollback", "stop"]:
        """`faults.nonfinite`, or its default."""
        return self.faults.nonfinite or ("stop" if self.optimizer.in_backward else "skip")

    @property
    def model_shards(self) -> int:
        """Processes that one replica of weights, gradients and optimizer state is sharded over."""
        return self.topology.world_size // self.parallel.replicas if self.parallel.type == "fsdp" else 1

    @property
    def rows_per_step(self) -> int:
        """Global batch size: rows that all processes read for one optimizer step."""
        training = self.training
        return training.micro_batch_size * training.gradient_accumulation_steps * self.dp_size

    @property
    def steps_of_rows(self) -> int:
        """Optimizer steps, one after the other, that read the same rows."""
        return self.objective.num_iterations if isinstance(self.objective, Grpo) else 1

    @property
    def steps_per_row(self) -> Fraction:
        """Optimizer steps that a row of the data takes part in: rows that are prompts have a group of answers, and
        several steps learn from them. It is exact, because an error of rounding would move the end of an epoch.
        """
        if isinstance(self.objective, Grpo):
            return Fraction(self.objective.group_size * self.steps_of_rows, self.rows_per_step)
        return Fraction(1, self.rows_per_step)

    def is_saved(self, step: int, rows: int | None) -> bool:
        """Whether `checkpoint.every` or `checkpoint.per_epoch` asks for a checkpoint after `step`; `rows`: of the
        data, as far as they are known.
        """
        return self._is_due(step, self.checkpoint.interval, self.checkpoint.per_epoch, rows)

    def is_evaluated(self, step: int, rows: int | None) -> bool:
        """Whether `evaluation.every` or `evaluation.per_epoch` asks for an evaluation after `step`."""
        return self._is_due(step, self.evaluation.every, self.evaluation.per_epoch, rows)

    def _is_due(self, step: int, every: int | None, per_epoch: int | None, rows: int | None) -> bool:
        """A function of the step and of what all attempts of a run share: all save and evaluate after the same ones."""
        if per_epoch is None:
            return every is not None and step % every == 0
        assert rows is not None, "the spec is rejected with data.streaming"
        # Each part of an epoch is due after the step that completes it. Parts shorter than a step share steps.
        part = rows * self.steps_per_row / per_epoch
        return step // part > (step - 1) // part

    @property
    def tokens_per_forward(self) -> int:
        """Tokens of one forward pass on all processes, with packed rows."""
        return self.rows_per_step // self.training.gradient_accumulation_steps * self.data.sequence_length

    @property
    def epochs(self) -> float | None:
        """Epochs, possibly fractional; None when `training.steps` sets the length."""
        if self.training.steps is not None:
            return None
        return self.training.epochs if self.training.epochs is not None else 2.0
