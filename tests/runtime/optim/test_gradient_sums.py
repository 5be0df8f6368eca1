"""Gradients of many micro-batches: their sum in fp32, beside transformers in fp64."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.runtime.optim.gradient_sums import GradientSums
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.summed_gradients import MICRO_BATCHES, error, exact_gradients
from tests.runtime.helpers.train_forked import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    save_pretrained(folder / "pretrained")
    config = AutoConfig.from_pretrained(folder / "pretrained", hidden_size=32, intermediate_size=64, dtype="bfloat16")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "pretrained")
    return folder


@pytest.fixture(scope="module")
def exact(folder):
    return exact_gradients(folder)


@pytest.fixture(scope="module")
def of_one_pass(folder, exact):
    return error(exact, folder, micro_batch_size=MICRO_BATCHES, gradient_accumulation_steps=1)


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_the_sum_of_many_micro_batches_has_the_error_of_one_pass(folder, exact, of_one_pass, framework):
    summed = error(exact, folder, framework)
    rounded = error(exact, folder, framework, gradient_accumulation_dtype="bfloat16")
    assert 0 < summed < 1.2 * of_one_pass < 0.75 * rounded


def test_every_strategy_adds_in_float32(folder):
    launch(folder, module="tests.runtime.helpers.summed_gradients")


def test_gradients_of_passes_with_and_without_cuda_graphs_are_added_together():
    """A graph's replay hands its gradients over; other passes call hooks. Weights may have different dtypes."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(8).to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    sums = GradientSums()
    sums.attach(parameters)
    given = [[torch.randn(8).to(parameter.dtype) for parameter in parameters] for _ in range(4)]
    for number, gradients in enumerate(given):
        with sums.backward_pass(last=number == 3):
            if number == 1:
                sums.add(dict(zip(parameters, gradients, strict=True)))
            else:
                torch.autograd.backward(parameters, gradients)
    for number, parameter in enumerate(parameters):
        expected = sum(gradients[number].double() for gradients in given)
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=2**-7, atol=2**-7)
        assert parameter.grad.dtype == parameter.dtype
    assert torch.allclose(parameters[1].grad, sum(gradients[1] for gradients in given), rtol=1e-6)


def test_what_is_captured_in_a_graph_stays_where_it_is():
    parameter, sums = nn.Parameter(torch.zeros(3)), GradientSums()
    sums.attach([parameter])
    with sums.backward_pass(last=False):
        with sums.paused():
            parameter.sum().backward()
        assert torch.equal(parameter.grad, torch.ones(3)) and sums.active
