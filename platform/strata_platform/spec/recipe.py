"""The part of a spec that decides the prepared data: the cache key of the data step."""

from __future__ import annotations

from pydantic import Field

from strata_platform.spec.run_spec import Objective, RunSpec
from strata_platform.spec.sections.data import Data, TrainOn
from strata_platform.spec.sections.fields import Flag, Section
from strata_platform.spec.sections.model import PRESETS
from strata_platform.spec.sections.objectives import PAIRED, Custom, Distill, Grpo


class DataRecipe(Section):
    """Everything that the data step reads. Runs with equal recipes share their prepared data.

    A run that differs only in learning rate, batch or checkpoints has the same recipe. A task with the recipe as its
    input is therefore cached across such runs.
    """

    data: Data = Field(description="The spec's data section, without weights and what else only training reads.")
    objective: str = Field(description="`objective.type`, or that with the same targets: which tokens carry loss.")
    model: str = Field(description="`model.name`: its tokenizer and chat template are the data's.")
    revision: str | None = Field(description="`model.revision`.")
    tokenizer: str | None = Field(description="`model.tokenizer`.")
    add_special_tokens: tuple[str, ...] = Field((), description="`model.add_special_tokens`.")
    seed: int = Field(description="`seed`: decides the validation split.")
    fingerprint: str = Field(
        "",
        description="Digest of the contents of local files named by the recipe; empty when it names none. Those of "
        "several sources are joined by commas.",
    )
    validation_only: Flag = Field(False, description="Whether all samples are held out for evaluation.")
    tokenizer_data: tuple[Data, ...] = Field(
        (), description="Sources to train the tokenizer on, where they are others than `data` alone."
    )

    @classmethod
    def from_spec(cls, spec: RunSpec, fingerprint: str = "") -> DataRecipe:
        """The part of `spec` that decides its data.

        >>> from strata_platform.spec.run_spec import Optimizer, RunSpec
        >>> DataRecipe.from_spec(RunSpec()) == DataRecipe.from_spec(RunSpec(optimizer=Optimizer(lr=1e-4)))
        True
        """
        data = spec.data.without_weights().for_preparation()
        if isinstance(spec.objective, Grpo):
            # Of a prompt, whose answer takes the rest.
            length = spec.data.sequence_length - spec.objective.generation.max_new_tokens
            data = data.model_copy(update={"sequence_length": length})
        return cls(
            data=data.model_copy(update={"train_on": _train_on(data, spec.objective)}),
            objective=_same_targets(spec.objective),
            model=spec.model.name,
            revision=spec.model.revision,
            tokenizer=spec.model.tokenizer,
            add_special_tokens=spec.model.add_special_tokens,
            seed=spec.seed,
            fingerprint=fingerprint,
        )

    @property
    def trains_tokenizer(self) -> bool:
        """Whether the model is a preset, which has no tokenizer, and `model.tokenizer` is not set."""
        return self.model in PRESETS and self.tokenizer is None

    def single_sources(self) -> tuple[DataRecipe, ...]:
        """The recipes of the single sources, each equal to that of a run that has no other source; or this recipe.

        A tokenizer that is trained on all sources makes them depend on each other.
        """
        sections = self.data.single_sources()
        if len(sections) == 1:
            return (self,)
        trained = (
            tuple(section.data for section in sections if not section.validation_only) if self.trains_tokenizer else ()
        )
        digests = self.fingerprint.split(",") if self.fingerprint else [""] * len(sections)
        found = []
        for (data, validation_only), digest in zip(sections, digests, strict=True):
            texts = () if trained == (data,) else trained
            changes = {"data": data, "validation_only": validation_only, "tokenizer_data": texts}
            found.append(self.model_copy(update=changes | {"fingerprint": self.fingerprint if texts else digest}))
        return tuple(found)


def _same_targets(objective: Objective) -> str:
    """The built-in objective that trains on the same tokens of the same data."""
    if isinstance(objective, Custom):
        return "pretrain" if objective.targets == "all" else "sft"
    if isinstance(objective, Distill) and objective.teacher is None:
        return "distill_logprobs"
    return "dpo" if objective.type in PAIRED and objective.type != "reward" else objective.type


def _train_on(data: Data, objective: Objective) -> TrainOn:
    if data.train_on is not None:
        return data.train_on
    return "all" if _same_targets(objective) == "pretrain" else "completions"
