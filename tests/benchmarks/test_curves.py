"""The program that asks whether kernels change what a model learns: its specs are trained, and its table tells."""

import pytest

from benchmarks import curves
from benchmarks.curves import Curve, Run


@pytest.mark.parametrize("kind", curves.KINDS)
def test_a_run_has_the_model_and_the_rows_of_its_seed(kind, tmp_path):
    plain, kernels = (Run(kind, variant, 3).spec(tmp_path, 20) for variant in (curves.PLAIN, "kernels"))
    assert (plain.seed, plain.training.steps, plain.model.dtype) == (3, 20, "bfloat16")
    assert plain.model.name == kernels.model.name and plain.data == kernels.data and plain.name != kernels.name
    assert (plain.kernels.enabled, kernels.kernels.enabled) == (False, "auto")
    assert Run(kind, curves.PLAIN, 4).spec(tmp_path, 20).model.name != plain.model.name
    assert Run(kind, "plain, eager attention", 3).spec(tmp_path, 20).model.attention == "eager"


def test_a_table_compares_with_plain_of_the_same_seed():
    losses = {curves.PLAIN: (4.0, 3.0), "kernels": (4.5, 2.5)}
    runs = {
        Run("one", variant, seed): Curve([9.0] * 2 + [found] * 18, found)
        for variant, each in losses.items()
        for seed, found in enumerate(each)
    }
    plain, kernels = curves.table(runs)[2:]
    assert plain == "| one: plain | 4.0000, 3.0000 |"
    assert kernels == "| one: kernels | 4.5000, 2.5000 | 0.0000 ± 0.5000 | 0.0000 ± 0.5000 | 0.5000 ± 0.0000 |"
