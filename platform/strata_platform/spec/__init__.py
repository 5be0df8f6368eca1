"""The description of a training run: `RunSpec`, how it is read and written, and the part that decides its data."""

from strata_platform.errors import Problem, SpecError
from strata_platform.spec.reading.load import dump_spec, load_spec
from strata_platform.spec.recipe import DataRecipe
from strata_platform.spec.run_spec import RunSpec
from strata_platform.spec.sections.kernels import KernelStore

__all__ = ["DataRecipe", "KernelStore", "Problem", "RunSpec", "SpecError", "dump_spec", "load_spec"]
