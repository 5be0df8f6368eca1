"""The sections that `objective` may be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strata_platform.spec.fields import Arguments, Number, ObjectName, Section, Text


class Pretrain(Section):
    """Next-token prediction on every token."""

    type: Literal["pretrain"] = Field("pretrain", description="Loss on every token.")


class Sft(Section):
    """Supervised fine-tuning: only completions, or the assistant's turns, carry loss."""

    type: Literal["sft"] = Field("sft", description="Loss on completions and assistant turns.")


class Dpo(Section):
    """Direct preference optimization: raise the likelihood of the chosen answer over the rejected one.

    An answer's reward is `beta` times the difference of its log-probability to the reference model's, the initial
    model.
    """

    type: Literal["dpo"] = Field("dpo", description="Prefer one of two answers.")
    beta: Number = Field(0.1, gt=0, le=1e3, description="Scale of the rewards.")
    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid",
        description="`sigmoid` of the difference of rewards (DPO); `ipo` regresses the difference of "
        "log-probabilities per token to `1 / (2 beta)`, which prevents overfitting where one answer "
        "always wins.",
    )
    label_smoothing: Number = Field(
        0.0, ge=0, lt=0.5, description="Assumed share of pairs with swapped labels, for `sigmoid`."
    )
    reference: Literal["auto", "precomputed", "adapter"] = Field(
        "auto",
        description="Where the reference model's log-probabilities come from: `precomputed` in one pass before "
        "training, or `adapter`, a forward pass with the adapter disabled in every step. `auto` takes the "
        "adapter if there is one, without `modules_to_save` and `init_from`.",
    )


class Distill(Section):
    """Distillation: match the output distribution of a teacher, a larger model with the same vocabulary."""

    type: Literal["distill"] = Field("distill", description="Learn from a teacher.")
    teacher: Text = Field(description="Hub id or folder of the teacher, which is frozen.")
    teacher_revision: Text | None = Field(None, description="Commit, tag or branch of a teacher on the Hub.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="Divergence to minimize: `forward_kl` makes the student cover the teacher's whole distribution, "
        "`reverse_kl` its main mode; `jsd` is between them.",
    )
    temperature: Number = Field(1.0, gt=0, le=1e3, description="Temperature of both models' logits in the divergence.")
    weight: Number = Field(
        0.5, ge=0, le=1, description="Weight of the divergence in the loss; the rest is next-token cross entropy."
    )


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
