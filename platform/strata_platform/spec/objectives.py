"""What can be minimized: the sections that `objective` may be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strata_platform.spec.fields import Number, Section, Text


class Pretrain(Section):
    """Next-token prediction on every token."""

    type: Literal["pretrain"] = Field("pretrain", description="Loss on every token.")


class Sft(Section):
    """Supervised fine-tuning: the loss is on completions, or on the assistant's turns, alone."""

    type: Literal["sft"] = Field("sft", description="Loss on what the model is to say.")


class Dpo(Section):
    """Direct preference optimization: of two answers, make the chosen one likelier than the model had it at first.

    An answer's reward is `beta` times how much its log-probability has grown since the start of training.
    """

    type: Literal["dpo"] = Field("dpo", description="Prefer one of two answers.")
    beta: Number = Field(0.1, gt=0, description="How much a change of an answer's log-probability counts.")
    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid",
        description="`sigmoid` of the difference of rewards (DPO); `ipo` draws the difference of log-probabilities per "
        "token to `1 / (2 beta)`, which holds the model back where one answer always wins.",
    )
    label_smoothing: Number = Field(
        0.0, ge=0, lt=0.5, description="Share of the pairs that may be the wrong way round, for `sigmoid`."
    )
    reference: Literal["auto", "precomputed", "adapter"] = Field(
        "auto",
        description="Where the first model's log-probabilities come from: `precomputed` in one pass before training, "
        "or the `adapter` is switched off for a forward pass in every step. `auto` takes the adapter if there is one.",
    )


class Distill(Section):
    """Distillation: learn the distributions of a teacher, a larger model of the same vocabulary."""

    type: Literal["distill"] = Field("distill", description="Learn from a teacher.")
    teacher: Text = Field(description="Hub id or folder of the model to learn from; it is frozen.")
    teacher_revision: Text | None = Field(None, description="Commit, tag or branch of a teacher on the Hub.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="What is made small: `forward_kl` wants the teacher's whole distribution covered, `reverse_kl` its "
        "main part met; `jsd` is between them.",
    )
    temperature: Number = Field(1.0, gt=0, description="Both models' logits are divided by it for the divergence.")
    weight: Number = Field(
        0.5, ge=0, le=1, description="Share of the divergence in the loss; the rest is the next token's."
    )
