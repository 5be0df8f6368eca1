"""The sections that `objective` may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from strata_platform.spec.describe import Allowed
from strata_platform.spec.sections.fields import (
    Arguments,
    Count,
    Flag,
    FunctionName,
    HostAndPort,
    Integer,
    Name,
    Number,
    ObjectName,
    Section,
    Text,
    number,
)


class Pretrain(Section):
    """Next-token prediction on every token."""

    type: Literal["pretrain"] = Field("pretrain", description="Loss on every token.")


class Sft(Section):
    """Supervised fine-tuning: only completions, or the assistant's turns, carry loss."""

    type: Literal["sft"] = Field("sft", description="Loss on completions and assistant turns.")


Reference = Literal["auto", "precomputed", "adapter"]
_REFERENCE = (
    "Where the reference model's log-probabilities come from: `precomputed` in one pass before training, or `adapter`, "
    "a forward pass with the adapter disabled in every step. `auto` takes the adapter if there is one, without "
    "`modules_to_save` and `init_from`."
)
_SMOOTHING = "Assumed share of pairs with swapped labels"

DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop",
]  # fmt: skip


class Dpo(Section):
    """Direct preference optimization: raise the likelihood of the chosen answer over the rejected one.

    An answer's reward is `beta` times the difference of its log-probability to the reference model's, the initial
    model.
    """

    type: Literal["dpo"] = Field("dpo", description="Prefer one of two answers.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Scale of the rewards.")
    loss: DpoLoss = Field(
        "sigmoid",
        description="`sigmoid` of the difference of rewards (DPO); `ipo` regresses the difference of "
        "log-probabilities per token to `1 / (2 beta)`, which prevents overfitting where one answer "
        "always wins. The page Preference tuning has the formulas of all.",
    )
    label_smoothing: Number = Field(
        0.0, ge=0, lt=0.5, description=f"{_SMOOTHING}, for `sigmoid`, `robust` and `exo_pair`."
    )
    discopop_tau: Annotated[float, Field(gt=0, le=1e3), BeforeValidator(number)] | None = Field(
        None, description="Temperature of the mixture of losses in `discopop`; by default 0.05."
    )
    reference: Reference = Field("auto", description=_REFERENCE)


class Kto(Section):
    """Kahneman-Tversky optimization: single answers, each of them good or bad.

    An answer's reward is as in `dpo`. Good answers are raised above, and bad ones lowered below, an estimate of the
    KL divergence from the reference model.
    """

    type: Literal["kto"] = Field("kto", description="Learn from answers that are good or bad.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Scale of the rewards.")
    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto",
        description="`apo_zero_unpaired` leaves the estimate of the divergence out, for good answers that are better "
        "than the model's own.",
    )
    desirable_weight: Number = Field(1.0, gt=0, le=1e3, description="Weight of good answers.")
    undesirable_weight: Number = Field(
        1.0,
        gt=0,
        le=1e3,
        description="Weight of bad answers. Where one kind is rarer, raise its weight, so that numbers times weights "
        "are about equal.",
    )
    reference: Reference = Field("auto", description=_REFERENCE)


class Orpo(Section):
    """Odds-ratio preference optimization: learn the chosen answer, and make its odds larger than the rejected one's.

    It has no reference model.
    """

    type: Literal["orpo"] = Field("orpo", description="Learn one answer, avoid the other.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Weight of the odds ratio; the paper's lambda.")


class Simpo(Section):
    """Simple preference optimization: the mean log-probability of an answer's tokens is its reward.

    It has no reference model.
    """

    type: Literal["simpo"] = Field("simpo", description="Prefer one of two answers, without a reference.")
    beta: Number = Field(2.0, gt=0, le=1e3, description="Scale of the rewards.")
    gamma: Number = Field(0.5, ge=0, le=1e3, description="Margin by which the chosen answer's reward should be larger.")
    label_smoothing: Number = Field(0.0, ge=0, lt=0.5, description=f"{_SMOOTHING}.")


class Cpo(Section):
    """Contrastive preference optimization: DPO without a reference model, plus cross entropy of the chosen answer."""

    type: Literal["cpo"] = Field("cpo", description="Prefer one of two answers, and learn it.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Scale of the rewards.")
    alpha: Number = Field(1.0, ge=0, le=1e3, description="Weight of the chosen answer's cross entropy, per token.")
    label_smoothing: Number = Field(0.0, ge=0, lt=0.5, description=f"{_SMOOTHING}.")


class Reward(Section):
    """A reward model: a score for a text, larger for the chosen of two answers (Bradley-Terry).

    The head of the model is replaced by one that computes a score. The exported model is one of
    `AutoModelForSequenceClassification`.
    """

    type: Literal["reward"] = Field("reward", description="Score answers.")
    center_coefficient: Number = Field(
        0.0,
        ge=0,
        le=1e3,
        description="Weight of the squared sum of both scores of a pair, which keeps scores around 0; 0.01 is usual.",
    )


class Generation(Section):
    """How a model in training answers prompts."""

    max_new_tokens: Integer = Field(
        256, ge=1, le=1 << 20, description="Tokens of an answer at most; `data.sequence_length` counts them, too."
    )
    temperature: Number = Field(
        1.0, gt=0, le=100, description="Logits are divided by it, in the loss as well as when answers are drawn."
    )
    top_p: Number = Field(1.0, gt=0, le=1, description="Draw from the likeliest tokens with this probability together.")
    top_k: Integer = Field(0, ge=0, le=1 << 20, description="Draw from this many of the likeliest tokens; 0: from all.")
    stop: tuple[Text, ...] = Field(
        (), description="Texts that end an answer, beside the tokens that end a turn or a text."
    )
    batch_size: Count = Field(
        128, description="Answers that a process generates together, at most. Their keys and values take memory."
    )
    engine: Literal["embedded", "vllm"] = Field(
        "embedded",
        description="`embedded` generates with the weights that are trained; `vllm` hands them over to vLLM in the "
        "same process before it generates. The page Generation says which version of vLLM, and what was tested.",
    )
    server: HostAndPort | None = Field(
        None,
        description="Address of a server that runs the engine instead, on other GPUs, and gets the weights before it "
        "generates: `host:port` of `python -m tasks.runtime.generation.server`. See the page Generation server.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1), BeforeValidator(number)] | None = Field(
        None,
        description="Share of a GPU's memory for vLLM's weights, keys and values in the process that trains, 0.3 by "
        "default. They leave the GPU while the model learns.",
    )


class Distill(Section):
    """Distillation: match the output distribution of a teacher, a larger model with the same vocabulary.

    The teacher is a model that runs in each step, or its log-probabilities are in the data.
    """

    type: Literal["distill"] = Field("distill", description="Learn from a teacher.")
    teacher: Text | None = Field(
        None,
        description="Hub id or folder of the teacher, which is frozen. Without one, the data has the log-probabilities "
        "of its likeliest tokens, in the column `logprobs`; the page Distillation has the forms.",
    )
    teacher_revision: Text | None = Field(None, description="Commit, tag or branch of a teacher on the Hub.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="Divergence to minimize: `forward_kl` makes the student cover the teacher's whole distribution, "
        "`reverse_kl` its main mode; `jsd` is between them.",
    )
    beta: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Place of `jsd` between both: 0 is `forward_kl`, 1 is `reverse_kl`; by default 0.5."
    )
    temperature: Number = Field(1.0, gt=0, le=1e3, description="Temperature of both models' logits in the divergence.")
    weight: Number = Field(
        0.5, ge=0, le=1, description="Weight of the divergence in the loss; the rest is next-token cross entropy."
    )
    on_policy: Number = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of rows whose answer the student writes itself in each step, and the teacher then judges "
        "token by token; GKD's lambda.",
    )
    generation: Generation = Field(default_factory=Generation, description="How the student writes them.")


RewardName = Literal["exact_match", "regex", "numeric", "json_schema", "unit_tests"]


class RewardTerm(Section):
    """One reward of an answer: a function, or a reward model."""

    function: RewardName | FunctionName | None = Field(
        None,
        description="A function that ships with Strata, or one of your own, such as `my_package.rewards:short`. It is "
        "called with `prompts`, `completions`, `completion_ids` and the columns of the rows, by name, and returns a "
        "number for each answer. See [GRPO](grpo.md).",
    )
    model: Text | None = Field(
        None, description="Instead of a function: the folder or Hub id of a reward model, as `reward` exports it."
    )
    arguments: Arguments = Field({}, description="What else the function is called with, by name.")
    weight: Number = Field(1.0, ge=-1e6, le=1e6, description="Weight in the sum of the rewards of an answer.")
    name: Name | None = Field(None, description="Name in metrics; by default that of the function, or `model`.")
    seconds: Count = Field(60, description="Seconds that the function may take for the answers of a step.")

    @property
    def title(self) -> str:
        """The name in metrics."""
        return self.name or ("model" if self.function is None else self.function.rpartition(":")[2])


class Grpo(Section):
    """Group relative policy optimization: make answers likelier that a reward prefers to others to the same prompt.

    The model answers each prompt several times in every step. An answer's advantage is its reward relative to those of
    its group.
    """

    type: Literal["grpo"] = Field("grpo", description="Learn from rewards of generated answers.")
    rewards: Annotated[
        tuple[RewardTerm, ...], Field(min_length=1), Allowed("a list of sections, each with a function or a model")
    ] = Field(description="What answers are rewarded for.")
    group_size: Integer = Field(8, ge=2, le=4096, description="Answers to each prompt.")
    generation: Generation = Field(default_factory=Generation, description="How prompts are answered.")
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"] = Field(
        "dapo",
        description="`dapo` and `bnpo` average over the tokens of the step, `grpo` over those of an answer and then "
        "over answers, `dr_grpo` divides by `max_new_tokens`; `gspo` takes the ratio of the whole answer; `cispo` and "
        "`sapo` bound ratios otherwise. The page GRPO has the formulas.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="Divide advantages by the standard deviation of rewards in the group, or in the step."
    )
    beta: Number = Field(
        0.0, ge=0, le=1e3, description="Weight of the KL divergence from the reference model, the initial one."
    )
    epsilon: Number = Field(0.2, gt=0, le=1e3, description="How far below 1 a ratio counts.")
    epsilon_high: Annotated[float, Field(gt=0, le=1e3), BeforeValidator(number)] | None = Field(
        None,
        description="How far above 1 a ratio counts; by default `epsilon`. For `cispo` the largest ratio itself, by "
        "default 5.",
    )
    delta: Annotated[float, Field(gt=1, le=1e3), BeforeValidator(number)] | None = Field(
        None, description="Largest ratio that counts where the advantage is negative; by default there is none."
    )
    num_iterations: Integer = Field(1, ge=1, le=100, description="Optimizer steps for the same answers.")
    generate_ahead: Flag = Field(
        False,
        description="Generate the answers of the next step before a step learns from its own, or with a server while "
        "it learns, so that functions score them while the model learns. Their weights are then one step old, and "
        "tokens are weighed as "
        "`importance_cap` says. The first step, and the one after a checkpoint, generate for themselves.",
    )
    overlong: Literal["unrewarded", "mask", "rewarded"] = Field(
        "unrewarded",
        description="An answer that `max_new_tokens` cut has a reward of 0, or its own or the lowest of its group "
        "where that is negative; or is rewarded like others, but `mask`: no token of it is learned; or learned.",
    )
    filter_groups: Flag = Field(
        False, description="Leave groups whose rewards are all equal out of the means over the step."
    )
    replacement_rounds: Integer = Field(
        0,
        ge=0,
        le=1000,
        description="With `filter_groups`: how often a step draws other prompts in the place of groups whose rewards "
        "are all equal, until none is left: DAPO's dynamic sampling. verl's `max_num_gen_batches` counts the first "
        "draw, too. What is left after the last round is left out, and the log says so.",
    )
    importance_cap: Annotated[float, Field(gt=0, le=1e3), BeforeValidator(number)] | None = Field(
        None,
        description="Weigh tokens by the probability that training computes over that which generation computed, at "
        "most this number; by default all count the same, and with `generate_ahead`, the engine `vllm` or a server it "
        "is 2.",
    )

    @property
    def largest_weight(self) -> float | None:
        """`importance_cap`, or its default."""
        generation = self.generation
        differs = self.generate_ahead or generation.engine != "embedded" or generation.server is not None
        return 2.0 if self.importance_cap is None and differs else self.importance_cap

    @property
    def highest_ratio(self) -> float:
        """`epsilon_high`, or its default."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 5.0 if self.loss == "cispo" else self.epsilon


class Custom(Section):
    """An objective of your own, a class based on one of `tasks.runtime.extensions`.

    Python must be able to import it wherever the run trains.
    """

    type: Literal["custom"] = Field("custom", description="Your own loss.")
    object: ObjectName = Field(description="The class, such as `my_package.losses:FocalLoss`.")
    arguments: Arguments = Field({}, description="What the class is called with, by name.")
    targets: Literal["completions", "all"] = Field(
        "completions",
        description="Tokens that carry loss: `completions` and assistant turns, as for `sft`, or `all`, as for "
        "`pretrain`.",
    )


def generates(objective: object) -> bool:
    """Whether the model answers prompts in training, so that rows are not packed."""
    return isinstance(objective, Grpo) or (isinstance(objective, Distill) and objective.on_policy > 0)


PAIRED = ("dpo", "orpo", "simpo", "cpo", "reward")
"""Objectives that compare the two answers of a pair."""
LABELLED = ("kto",)
"""Objectives that read single answers, each with a label."""
PROMPTED = ("grpo",)
"""Objectives that read prompts and generate the answers."""
WITH_REFERENCE = ("dpo", "kto")
"""Objectives that compare the model with the one before training."""
PREFERENCES = ("dpo", "orpo", "simpo", "cpo", "kto")
"""Objectives that make better answers likelier."""
