"""What layers recompute and keep, and that compiling them changes no loss."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Lora
from strata_platform.spec.sections.training import Training
from tasks.runtime.models.activations import activation_checkpointing
from tasks.runtime.models.activations.kept_operators import KeptOperators
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.build import build_model, patch

# The compiler looks at it, and hides the warning by means that do not hide errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

TOKENS = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(0))


class Count(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name
        self.calls[name] = self.calls.get(name, 0) + 1
        return operator(*args, **(kwargs or {}))


def make_model(lora_dropout=None, **training):
    spec = RunSpec.model_validate({"training": training})
    model = build_model(spec.model, spec.seed)
    if lora_dropout is not None:
        add_adapter(model, Lora(type="lora", lora_dropout=lora_dropout), spec.seed)
        # Zeros of a new adapter would hide what its dropout does.
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    patch(model, spec.kernels)
    activation_checkpointing.checkpoint_activations(model, spec.training)
    activation_checkpointing.compile_layers(model, spec.training)
    return model.train()


def step(model):
    """Loss, and the gradients in one vector."""
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def backward_calls(model):
    """How often the backward pass calls each operator of the forward pass."""
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    with Count() as counted:
        loss.backward()
    return counted.calls


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("training", "norms", "attentions"),
    [
        ({}, 0, 0),
        ({"gradient_checkpointing": "full"}, 8, 4),
        ({"gradient_checkpointing": "selective"}, 4, 2),
        ({"gradient_checkpointing": "selective", "gradient_checkpointing_every": 3}, 4, 2),
        ({"gradient_checkpointing": "selective", "gradient_checkpointing_every": 9}, 2, 1),
        ({"gradient_checkpointing": "per_op"}, 8, 0),
        ({"gradient_checkpointing": "attention"}, 8, 0),
        ({"gradient_checkpointing": "full", "gradient_checkpointing_except_last": 3}, 2, 1),
        ({"gradient_checkpointing": "selective", "gradient_checkpointing_except_last": 2}, 2, 1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "none" if isinstance(value, dict) else None,
)
def test_what_the_backward_pass_computes_again(training, norms, attentions):
    """Of four layers with two norms each."""
    calls = backward_calls(make_model(**training))
    assert calls.get("strata::rms_norm", 0) == norms
    assert calls.get(ATTENTION, 0) == attentions


def test_products_are_kept_per_op():
    assert (
        backward_calls(make_model(gradient_checkpointing="per_op"))["aten::mm"]
        == backward_calls(make_model())["aten::mm"]
    )


def test_attention_keeps_its_products_and_recomputes_no_more_than_full():
    """Of four layers. The last product of a layer is behind all that the backward pass reads."""
    attention = backward_calls(make_model(gradient_checkpointing="attention"))
    full = backward_calls(make_model(gradient_checkpointing="full"))
    assert attention.pop("aten::mm") == full.pop("aten::mm") - 4 * 4
    assert {name: calls for name, calls in attention.items() if "strata" in name} == {
        name: calls for name, calls in full.items() if "strata" in name
    }


@pytest.mark.parametrize("kind", ["full", "attention", "per_op"])
def test_what_is_recomputed_has_the_same_bits(kind):
    loss, gradients = step(make_model())
    again, recomputed = step(make_model(gradient_checkpointing=kind))
    assert again == loss
    assert torch.equal(recomputed, gradients)


@pytest.mark.parametrize("kind", ["full", "attention", "per_op"])
def test_dropout_of_an_adapter_has_the_masks_of_the_forward_pass(kind):
    def seeded_step(seed, **training):
        model = make_model(lora_dropout=0.1, **training)
        torch.manual_seed(seed)
        return step(model)

    loss, gradients = seeded_step(1)
    again, recomputed = seeded_step(1, gradient_checkpointing=kind)
    assert again == loss
    assert torch.equal(recomputed, gradients)
    assert seeded_step(2)[0] != loss


@torch.library.custom_op("strata_test::attention", mutates_args=())
def attention(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """As attention on a GPU, it draws the numbers of its dropout itself."""
    mask = (torch.rand_like(x) >= dropout_p if dropout_p else torch.ones_like(x)).to(x)
    return x * mask, mask


attention.register_autograd(
    lambda ctx, dy, _: (dy * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class DrawingAttention(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return attention(x, self.rate)[0]


class DrawingLayer(GradientCheckpointingLayer):
    def __init__(self, rate):
        super().__init__()
        self.attention, self.linear = DrawingAttention(rate), nn.Linear(8, 8)

    def forward(self, x):
        return torch.dropout(self.linear(self.attention(x).sin()), 0.5, train=True)


@pytest.mark.parametrize("kind", ["attention", "per_op"])
@pytest.mark.parametrize("rate", [0.5, 0.0], ids=["dropout", "none"])
def test_attention_with_dropout_is_recomputed_so_that_later_dropout_has_its_masks(monkeypatch, kind, rate):
    monkeypatch.setattr(
        activation_checkpointing, "_SAVED", (*activation_checkpointing._SAVED, "strata_test::attention")
    )

    def gradients(**training):
        torch.manual_seed(0)
        model = nn.Sequential(*(DrawingLayer(rate) for _ in range(2)))
        activation_checkpointing.checkpoint_activations(model, Training(**training))
        loss = model(torch.ones(4, 8)).square().sum()
        with Count() as counted:
            loss.backward()
        return [p.grad for p in model.parameters()], counted.calls.get("strata_test::attention", 0)

    plain, _ = gradients()
    recomputed, calls = gradients(gradient_checkpointing=kind)
    assert all(map(torch.equal, recomputed, plain))
    assert calls == (2 if rate else 0)


class Scales(nn.Module):
    """Changes what its layer has given it."""

    def __init__(self, bias):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias)

    def forward(self, x):
        return self.layer(x).mul_(2)


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_what_is_kept_and_then_changed_in_place_is_refused(inside, bias, shape):
    """In the module that attends, or in the layer that it is in. Three-dimensional products are views of others."""
    module = Scales(bias) if inside else nn.Linear(4, 4, bias)
    kept = KeptOperators(frozenset({"aten::addmm", "aten::mm"}), [module])
    forward, again = kept.contexts()

    def run():
        with forward:
            y = module(torch.ones(shape))
        if not inside:
            y.mul_(2)
        with again:
            module(torch.ones(shape))

    with pytest.raises(ValueError, match=r"changes in place .* set .* to 'full'"):
        run()


def family(kind, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, use_cache=False, **{**sizes, **settings})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def loss_and_gradients(model):
    ids = torch.arange(24).view(2, 12) % 64
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_a_family_that_changes_scores_in_place_is_refused():
    model = family("falcon")
    activation_checkpointing.checkpoint_activations(model, Training(gradient_checkpointing="attention"))
    with pytest.raises(ValueError, match="changes in place"):
        loss_and_gradients(model)


def test_attention_in_a_module_of_attention_is_watched_once():
    settings = {"num_heads": 2, "num_layers": 2, "attention_types": [[["global"], 2]], "max_position_embeddings": 32}
    plain = loss_and_gradients(family("gpt_neo", **settings))
    model = family("gpt_neo", **settings)
    activation_checkpointing.checkpoint_activations(model, Training(gradient_checkpointing="attention"))
    loss, gradients = loss_and_gradients(model)
    assert torch.equal(loss, plain[0]) and all(map(torch.equal, gradients, plain[1]))


def test_layers_that_are_all_kept_are_refused():
    with pytest.raises(ValueError, match="except_last 4 leaves none of the model's 4 layers"):
        make_model(gradient_checkpointing="full", gradient_checkpointing_except_last=4)


def test_attention_without_a_layer_that_attends_is_refused():
    model = make_model()
    for layer in model.model.layers:
        layer.self_attn = nn.Identity()
    with pytest.raises(ValueError, match=r"gradient_checkpointing 'attention' .* set .* to 'full'"):
        activation_checkpointing.checkpoint_activations(model, Training(gradient_checkpointing="attention"))


def test_the_operators_of_torch_that_are_kept_exist():
    ours = [name for name in activation_checkpointing._SAVED if name.startswith("aten::")]
    assert [name for name in ours if not hasattr(torch.ops.aten, name.removeprefix("aten::"))] == []


@pytest.fixture
def without_code(monkeypatch):
    """The graphs of the compiler, without the C++ that it would make of them for half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("kind", ["per_op", "attention"])
def test_a_compiled_layer_computes_what_it_did_eagerly(without_code, kind):
    loss, gradients = step(make_model())
    compiled_loss, compiled = step(make_model(compile=True, gradient_checkpointing=kind))
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(compiled, gradients, rtol=1e-4, atol=1e-6)


def test_a_compiled_layer_keeps_attention_and_its_products(without_code):
    """Of four layers. Graphs leave out the last product of a layer, which nothing of the backward pass reads."""
    calls = {
        kind: backward_calls(make_model(compile=True, gradient_checkpointing=kind)) for kind in ("full", "attention")
    }
    assert calls["full"].pop(ATTENTION) == 4 and ATTENTION not in calls["attention"]
    assert calls["attention"]["aten::mm"] == calls["full"]["aten::mm"] - 4 * 4
    assert calls["attention"].get("strata::rms_norm", 0) == calls["full"].get("strata::rms_norm", 0) == 8


def test_equal_layers_are_compiled_once(monkeypatch):
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **options: real(forward, backend=note, **options))
    step(make_model(compile=True))
    assert len(graphs) == 1


def test_a_layer_that_is_no_graph_is_refused(monkeypatch):
    def breaks(self, x):
        torch._dynamo.graph_break()
        return x

    model = make_model()
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", breaks)
    activation_checkpointing.compile_layers(model, Training(compile=True))
    with pytest.raises(ValueError, match=r"training\.compile is true, but .* Set training\.compile to false"):
        step(model)


@pytest.mark.parametrize("training", [{"compile": True}, {"gradient_checkpointing": "full"}])
def test_a_model_that_does_not_tell_its_layers_is_refused(training):
    settings = Training(**training)
    field = f"training.{next(iter(training))}"
    with pytest.raises(ValueError, match=rf"{field} needs the model's layers, and Linear .* set {field} to"):
        activation_checkpointing.checkpoint_activations(nn.Linear(2, 2), settings)
        activation_checkpointing.compile_layers(nn.Linear(2, 2), settings)


def test_without_gradients_nothing_is_prepared_for_recomputation(monkeypatch):
    """It would save random states, which a CUDA graph of generation cannot."""
    model, calls = make_model(gradient_checkpointing="full"), []
    monkeypatch.setattr(activation_checkpointing, "checkpoint", lambda *args, **kwargs: calls.append(args))
    with torch.no_grad():
        model(input_ids=TOKENS)
    assert calls == []
