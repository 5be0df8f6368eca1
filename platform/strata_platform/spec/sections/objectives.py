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
    "Where the reference model's log-probabilities come from. `precomputed`: one pass over the data before training. "
    "`adapter`: a forward pass with the adapter disabled, in every step. `auto` is `adapter` if the model without its "
    "adapter is the initial model, and `precomputed` otherwise."
)
_SMOOTHING = "Assumed share of pairs with swapped labels"

DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop",
]  # fmt: skip


class Dpo(Section):
    """Direct preference optimization: raise the likelihood of the chosen answer over the rejected one.

    An answer's reward is `beta` times its log-probability minus that of the reference model, which is the initial
    model.
    """

    type: Literal["dpo"] = Field("dpo", description="Prefer one of two answers.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Scale of the rewards.")
    loss: DpoLoss = Field(
        "sigmoid",
        description="`sigmoid`: the DPO loss, on the difference of the two rewards. `ipo` regresses the difference of "
        "the log-probabilities per token to `1 / (2 beta)`, which prevents overfitting where one answer always wins. "
        "The page Preference tuning has the formulas of all losses.",
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

    An answer's reward is that of `dpo`. Training raises the rewards of good answers above an estimate of the KL
    divergence from the reference model, and lowers those of bad answers below it.
    """

    type: Literal["kto"] = Field("kto", description="Learn from answers that are good or bad.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Scale of the rewards.")
    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto",
        description="`kto`, or `apo_zero_unpaired`: the same without the estimate of the divergence, for good answers "
        "that are better than the model's own.",
    )
    desirable_weight: Number = Field(1.0, gt=0, le=1e3, description="Weight of the loss of good answers.")
    undesirable_weight: Number = Field(
        1.0,
        gt=0,
        le=1e3,
        description="Weight of the loss of bad answers. If one kind is rarer, raise its weight, so that count times "
        "weight is about equal for both.",
    )
    reference: Reference = Field("auto", description=_REFERENCE)


class Orpo(Section):
    """Odds-ratio preference optimization: learn the chosen answer, and raise its odds above the rejected one's.

    There is no reference model.
    """

    type: Literal["orpo"] = Field("orpo", description="Learn the chosen answer and avoid the rejected one.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Weight of the odds-ratio term; lambda in the paper.")


class Simpo(Section):
    """Simple preference optimization: an answer's reward is `beta` times the mean log-probability of its tokens.

    There is no reference model.
    """

    type: Literal["simpo"] = Field("simpo", description="Prefer one of two answers, without a reference model.")
    beta: Number = Field(2.0, gt=0, le=1e3, description="Scale of the rewards.")
    gamma: Number = Field(
        0.5, ge=0, le=1e3, description="Margin by which the chosen answer's reward should exceed the rejected one's."
    )
    label_smoothing: Number = Field(0.0, ge=0, lt=0.5, description=f"{_SMOOTHING}.")


class Cpo(Section):
    """Contrastive preference optimization: DPO without a reference model, plus cross entropy of the chosen answer."""

    type: Literal["cpo"] = Field("cpo", description="Prefer one of two answers, and learn the chosen one.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Scale of the difference of log-probabilities.")
    alpha: Number = Field(1.0, ge=0, le=1e3, description="Weight of the chosen answer's cross entropy per token.")
    label_smoothing: Number = Field(0.0, ge=0, lt=0.5, description=f"{_SMOOTHING}.")


class Reward(Section):
    """A reward model: a score for a text, larger for the chosen one of two answers (Bradley-Terry).

    A head that computes one score replaces the model's head. You load the exported model with
    `AutoModelForSequenceClassification`.
    """

    type: Literal["reward"] = Field("reward", description="Train a reward model.")
    center_coefficient: Number = Field(
        0.0,
        ge=0,
        le=1e3,
        description="Weight of the squared sum of a pair's two scores, which keeps scores around 0; 0.01 is a usual "
        "value.",
    )


class Generation(Section):
    """How a model in training generates answers."""

    max_new_tokens: Integer = Field(
        256,
        ge=1,
        le=1 << 20,
        description="Maximum tokens of an answer. Prompt and answer together must fit into `data.sequence_length`.",
    )
    temperature: Number = Field(
        1.0, gt=0, le=100, description="Sampling temperature. The loss divides logits by it, too."
    )
    top_p: Number = Field(
        1.0, gt=0, le=1, description="Sample only from the most likely tokens whose probabilities sum to this."
    )
    top_k: Integer = Field(
        0, ge=0, le=1 << 20, description="Sample only from this many most likely tokens; 0: from all."
    )
    stop: tuple[Text, ...] = Field(
        (), description="Texts that end an answer, in addition to the tokens that end a turn or a text."
    )
    batch_size: Count = Field(
        128,
        description="Maximum number of answers that a process generates at once. Their keys and values need memory.",
    )
    engine: Literal["embedded", "vllm"] = Field(
        "embedded",
        description="`embedded` generates with the model in training; `vllm` copies its weights to vLLM in the same "
        "process before it generates. The page Generation has the version of vLLM, and what was tested.",
    )
    server: HostAndPort | None = Field(
        None,
        description="Address `host:port` of a server that runs the engine on other GPUs and receives the weights "
        "before it generates: `python -m tasks.runtime.generation.server`. See the page Generation server.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1), BeforeValidator(number)] | None = Field(
        None,
        description="Share of a GPU's memory for vLLM's weights, keys and values in the training process; by default "
        "0.3. vLLM frees this memory while the model learns.",
    )


class Distill(Section):
    """Distillation: match the output distribution of a teacher, a larger model with the same vocabulary.

    The teacher runs in each step, or its log-probabilities are in the data.
    """

    type: Literal["distill"] = Field("distill", description="Learn from a teacher.")
    teacher: Text | None = Field(
        None,
        description="Hub id or folder of the teacher, which is frozen. Without this field, the column `logprobs` of "
        "the data must have log-probabilities of the teacher's most likely tokens; the page Distillation has the "
        "forms.",
    )
    teacher_revision: Text | None = Field(None, description="Commit, tag or branch of a teacher on the Hub.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="Divergence to minimize: with `forward_kl`, the student covers the teacher's whole distribution; "
        "with `reverse_kl`, its main mode. `jsd` interpolates between the two.",
    )
    beta: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] | None = Field(
        None, description="Interpolation of `jsd`: 0 is `forward_kl`, 1 is `reverse_kl`; by default 0.5."
    )
    temperature: Number = Field(
        1.0, gt=0, le=1e3, description="The divergence divides the logits of both models by this."
    )
    weight: Number = Field(
        0.5,
        ge=0,
        le=1,
        description="Weight of the divergence in the loss. The weight of next-token cross entropy is 1 minus this.",
    )
    on_policy: Number = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of rows whose answer the student generates in each step; the teacher then scores its "
        "tokens. Lambda in GKD.",
    )
    generation: Generation = Field(default_factory=Generation, description="How the student generates answers.")


RewardName = Literal["exact_match", "regex", "numeric", "json_schema", "unit_tests"]


class RewardTerm(Section):
    """One reward of an answer: a function, or a reward model."""

    function: RewardName | FunctionName | None = Field(
        None,
        description="A function that ships with Strata, or one of your own, such as `my_package.rewards:short`. Its "
        "keyword arguments are `prompts`, `completions`, `completion_ids` and the columns of the rows; it returns a "
        "number for each answer. See [GRPO](grpo.md).",
    )
    model: Text | None = Field(
        None, description="Folder or Hub id of a reward model, as `reward` exports it, instead of a function."
    )
    arguments: Arguments = Field({}, description="Further keyword arguments for the function.")
    weight: Number = Field(
        1.0, ge=-1e6, le=1e6, description="Weight of this reward in the sum that an answer receives."
    )
    name: Name | None = Field(None, description="Name in metrics; by default the function's name, or `model`.")
    seconds: Count = Field(
        60, description="Maximum seconds of a call of the function, which scores a step's answers of one process."
    )

    @property
    def title(self) -> str:
        """The name in metrics."""
        return self.name or ("model" if self.function is None else self.function.rpartition(":")[2])


class Grpo(Section):
    """Group relative policy optimization: prefer answers with a higher reward than others to the same prompt.

    In every step, the model generates a group of answers to each prompt. An answer's advantage is its reward relative
    to the mean reward of its group.
    """

    type: Literal["grpo"] = Field("grpo", description="Learn from rewards of generated answers.")
    rewards: Annotated[
        tuple[RewardTerm, ...], Field(min_length=1), Allowed("a list of sections, each with a function or a model")
    ] = Field(description="The rewards of an answer.")
    group_size: Integer = Field(8, ge=2, le=4096, description="Number of answers to each prompt.")
    generation: Generation = Field(default_factory=Generation, description="How answers are generated.")
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"] = Field(
        "dapo",
        description="`dapo`, `bnpo` and `cispo` average over the tokens of the step. `grpo`, `gspo` and `sapo` average "
        "over the tokens of an answer, then over answers. `dr_grpo` divides by answers times `max_new_tokens`. `gspo` "
        "uses the probability ratio of the whole answer; `cispo` and `sapo` limit ratios in another way than "
        "clipping. The page GRPO has the formulas.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="Divide advantages by the standard deviation of the rewards in the `group` or in the whole step "
        "(`batch`), or not at all (`none`).",
    )
    beta: Number = Field(
        0.0,
        ge=0,
        le=1e3,
        description="Weight of the KL divergence from the reference model, which is the initial model.",
    )
    epsilon: Number = Field(0.2, gt=0, le=1e3, description="Probability ratios are clipped at 1 minus this.")
    epsilon_high: Annotated[float, Field(gt=0, le=1e3), BeforeValidator(number)] | None = Field(
        None,
        description="Probability ratios are clipped at 1 plus this; by default `epsilon`. For `cispo`, the maximum "
        "ratio itself, by default 5.",
    )
    delta: Annotated[float, Field(gt=1, le=1e3), BeforeValidator(number)] | None = Field(
        None, description="Maximum probability ratio of tokens with a negative advantage; by default no limit."
    )
    num_iterations: Integer = Field(1, ge=1, le=100, description="Number of optimizer steps on the same answers.")
    generate_ahead: Flag = Field(
        False,
        description="Generate the answers of the next step before the current step trains, or with a server during it, "
        "so that reward functions score them while the model trains. These answers come from weights that are one "
        "step old; `importance_cap` corrects for that. Answers are not generated ahead for the first step and for the "
        "first one after a checkpoint.",
    )
    overlong: Literal["unrewarded", "mask", "rewarded"] = Field(
        "unrewarded",
        description="How an answer counts that `max_new_tokens` truncated. `unrewarded`: its reward is 0, or lower if "
        "its own reward or the lowest one of its group is negative. `mask`: it has its reward, but its tokens carry "
        "no loss. `rewarded`: like any other answer.",
    )
    filter_groups: Flag = Field(
        False, description="Leave groups whose rewards are all equal out of the step's averages."
    )
    replacement_rounds: Integer = Field(
        0,
        ge=0,
        le=1000,
        description="With `filter_groups`: maximum number of rounds in which a step replaces groups whose rewards are "
        "all equal by other prompts (DAPO's dynamic sampling; verl's `max_num_gen_batches` also counts the first "
        "draw). Such groups that remain after the last round are left out, and the log reports them.",
    )
    importance_cap: Annotated[float, Field(gt=0, le=1e3), BeforeValidator(number)] | None = Field(
        None,
        description="Truncated importance sampling: weight tokens by their probability in training divided by their "
        "probability in generation, at most this number. By default 2 with `generate_ahead`, the engine `vllm` or a "
        "server, and otherwise off.",
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
    """An objective of your own: a class based on one of `tasks.runtime.extensions`.

    Python must be able to import the class wherever the run trains.
    """

    type: Literal["custom"] = Field("custom", description="Your own loss.")
    object: ObjectName = Field(description="The class, such as `my_package.losses:FocalLoss`.")
    arguments: Arguments = Field({}, description="Keyword arguments for the class.")
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
