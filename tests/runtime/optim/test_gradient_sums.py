"""Gradients of many micro-batches: their sum in fp32, beside that of training in fp32."""

import pytest

from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.summed_gradients import error, step_of
from tests.runtime.helpers.train_forked import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    save_pretrained(folder / "pretrained", model={"dtype": "bfloat16"})
    return folder


@pytest.fixture(scope="module")
def exact(folder):
    return step_of(folder, "float32")


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_the_sum_of_many_micro_batches_has_the_error_of_one(folder, exact, framework):
    summed = error(step_of(folder, "bfloat16", framework), exact)
    rounded = error(step_of(folder, "bfloat16", framework, gradient_accumulation_dtype="bfloat16"), exact)
    print(summed, rounded)
    assert 0 < summed < 0.75 * rounded


def test_every_strategy_adds_in_float32(folder):
    launch(folder, module="tests.runtime.helpers.summed_gradients")
