"""The one description of a training run: its models, its errors, how it is read and documented."""

from strata_platform.spec.models import RunSpec
from strata_platform.spec.recipe import DataRecipe

__all__ = ["DataRecipe", "RunSpec"]
