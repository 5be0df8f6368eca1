"""The part of a spec that decides the prepared data: the cache key of the data step."""

from __future__ import annotations

from pydantic import Field

from strata_platform.spec.data import Data
from strata_platform.spec.fields import Section
from strata_platform.spec.run_spec import RunSpec


class DataRecipe(Section):
    """Everything that the data step reads. Runs with equal recipes share their prepared data.

    A run that differs only in learning rate, batch or checkpoints has the same recipe. A task with the recipe as its
    input is therefore cached across such runs.
    """

    data: Data = Field(description="The spec's data section.")
    objective: str = Field(description="`objective.type`: which tokens carry loss.")
    model: str = Field(description="`model.name`: its tokenizer and chat template are the data's.")
    revision: str | None = Field(description="`model.revision`.")
    tokenizer: str | None = Field(description="`model.tokenizer`.")
    seed: int = Field(description="`seed`: decides the validation split.")
    fingerprint: str = Field(
        "", description="Digest of the contents of local files named by the recipe; empty when it names none."
    )

    @classmethod
    def from_spec(cls, spec: RunSpec, fingerprint: str = "") -> DataRecipe:
        """The part of `spec` that decides its data.

        >>> from strata_platform.spec.run_spec import Optimizer, RunSpec
        >>> DataRecipe.from_spec(RunSpec()) == DataRecipe.from_spec(RunSpec(optimizer=Optimizer(lr=1e-4)))
        True
        """
        return cls(
            data=spec.data,
            objective=spec.objective.type,
            model=spec.model.name,
            revision=spec.model.revision,
            tokenizer=spec.model.tokenizer,
            seed=spec.seed,
            fingerprint=fingerprint,
        )
