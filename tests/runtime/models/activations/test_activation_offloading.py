"""The inputs of recomputed layers are in host memory between the passes, and nothing else changes."""

import weakref

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime.models.activations import kept_operators
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.activations.activation_offloading import Offloading
from tasks.runtime.models.build import build_model, patch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OFFLOADED = {"gradient_checkpointing": "full", "activation_offloading": True}


def make_model(device, **training):
    spec = RunSpec.model_validate({"training": training})
    model = build_model(spec.model, spec.seed)
    patch(model, spec.kernels)
    checkpoint_activations(model, spec.training)
    return model.train().to(device)


def batch(device, seed=0, length=32):
    return torch.randint(0, 4096, (2, length), generator=torch.Generator().manual_seed(seed)).to(device)


def gradients(model, *batches):
    """Of all batches together, each with a pass of its own."""
    model.zero_grad()
    for tokens in batches:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def copies(monkeypatch):
    """The copies that are made, in order; also of small tensors."""
    made, to_host = [], Offloading.to_host
    monkeypatch.setattr(kept_operators, "_LEAST", 1)

    def note(self, tensor):
        made.append(to_host(self, tensor))
        return made[-1]

    monkeypatch.setattr(Offloading, "to_host", note)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("training", "offloaded"),
    [
        pytest.param(OFFLOADED, 3, id="full"),
        pytest.param({**OFFLOADED, "gradient_checkpointing": "attention"}, 3 * 7, id="attention"),
        pytest.param({**OFFLOADED, "gradient_checkpointing": "selective"}, 1, id="selective"),
        pytest.param({**OFFLOADED, "gradient_checkpointing_except_last": 2}, 1, id="except the last"),
    ],
)
def test_gradients_have_the_same_bits(device, training, offloaded, copies):
    """Of four layers, in steps of several passes and shapes. Attention has four products and two results."""
    steps = [[batch(device)], [batch(device, 1), batch(device, 2, length=48)], [batch(device, 3)]]
    plain, model = make_model(device, **{**training, "activation_offloading": False}), make_model(device, **training)
    for step in steps:
        for own, expected in zip(gradients(model, *step), gradients(plain, *step), strict=True):
            assert torch.equal(own, expected)
    if device == "cuda" and training["gradient_checkpointing"] == "attention":
        # There attention also gives the two states of its random generator.
        offloaded += 3 * 2
    assert len(copies) == offloaded * sum(map(len, steps))
    assert {copy._host.device.type for copy in copies} == {"cpu"}
    # Nothing of a step is kept on the device or in the chain of copies.
    assert all(copy._tensor is None and copy._layer._before is None for copy in copies)


def test_the_input_of_a_layer_is_let_go_in_the_forward_pass():
    model, alive = make_model("cpu", **OFFLOADED), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0])))
    tokens = batch("cpu")
    loss = model(input_ids=tokens, labels=tokens).loss
    assert [reference() is None for reference in alive] == [True, True, True, False]
    loss.backward()


def test_a_forward_pass_without_a_backward_pass_changes_nothing(copies):
    model, tokens = make_model("cpu", **OFFLOADED), batch("cpu")
    expected = [gradient.clone() for gradient in gradients(model, tokens)]
    model(input_ids=tokens, labels=tokens)
    with torch.no_grad():
        model(input_ids=tokens, labels=tokens)
    for own, other in zip(gradients(model, tokens), expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("training", "way_out"),
    [
        ({"activation_offloading": True}, "training.gradient_checkpointing is 'none'"),
        ({**OFFLOADED, "gradient_checkpointing": "per_op"}, "training.gradient_checkpointing is 'per_op'"),
        ({**OFFLOADED, "compile": True}, "set one of the two to false"),
    ],
)
def test_without_inputs_to_offload_it_is_refused(training, way_out):
    with pytest.raises(ValueError, match=rf"training.activation_offloading[\s\S]*{way_out}"):
        RunSpec.model_validate({"training": training})


def test_the_device_holds_what_two_layers_keep(copies):
    model, held = make_model("cpu", **OFFLOADED), []
    for layer in model.model.layers:
        hook = lambda *_: held.append([copy._tensor is not None for copy in copies])  # noqa: E731
        layer.register_forward_pre_hook(hook)
        layer.register_full_backward_hook(hook)
    gradients(model, batch("cpu"))
    assert max(map(sum, held)) == 2
    assert held[3] == [False, True, True]


@pytest.mark.gpu
def test_on_a_gpu_memory_does_not_grow_with_the_layers():
    def peak(**training):
        model, tokens = make_model("cuda", **training), batch("cuda", length=2048)
        gradients(model, tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(**OFFLOADED) < peak(gradient_checkpointing="full")
