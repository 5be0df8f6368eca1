"""The loss of routers is that of all tokens of a step at once, as transformers computes it, however a step is split."""

import copy
import inspect
from types import FunctionType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from strata_kernels import patch_model
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.training import Training
from tasks.runtime.data import collate
from tasks.runtime.data.dataset import collate_flat
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.build import build_model
from tasks.runtime.objectives import build_objective, router_loss
from tasks.runtime.objectives.router_loss import RouterLoss, causal_model
from tasks.runtime.process.ranks import Processes
from tests.runtime.helpers.train_forked import launch

# Tokens, and how many of them have a label.
ROWS = ((10, 7), (4, 2), (8, 1), (10, 3))
SPLITS = {"one batch": (4,), "two": (2, 2), "uneven": (3, 1), "rows": (1, 1, 1, 1)}
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
         "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
COEFFICIENT = 0.5


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def spec(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, "initializer_range": 0.5}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SIZES, **balanced)).save_pretrained(folder)
    return RunSpec(model={"name": str(folder), "dtype": "float32"}, kernels={"enabled": False})


@pytest.fixture(scope="module")
def model(spec):
    return build_model(spec.model, spec.seed)


@pytest.fixture(scope="module")
def rows():
    torch.manual_seed(1)
    made = []
    for length, labelled in ROWS:
        tokens = torch.randint(1, 64, (length,))
        labels = tokens.where(torch.arange(length) >= length - labelled, -100)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": torch.arange(length)})
    return made


@pytest.fixture(scope="module")
def expected(model, rows):
    """Loss and gradients of all rows at once, by transformers."""
    whole = collate(rows)
    mask = torch.stack([torch.arange(10) < length for length, _ in ROWS]).long()
    output = model(input_ids=whole["input_ids"], position_ids=whole["position_ids"], labels=whole["labels"])
    balance = load_balancing_loss_func(output.router_logits, 4, 2, mask)
    # Its own balance counts padding.
    loss = output.loss + COEFFICIENT * (balance - output.aux_loss)
    return loss.detach(), balance.detach(), torch.autograd.grad(loss, list(model.parameters()))


def step_of(spec, model, rows, split, *, over="step", fused=False):
    """Loss, router loss and gradients of a step of micro-batches."""
    changed = RunSpec.model_validate({**spec.model_dump(), "training": {"router_loss": over}})
    objective, left = build_objective(changed, fused=fused), iter(rows)
    objective.prepare(SimpleNamespace(model=model, spec=changed, processes=Processes(), data=None))
    batches = [collate([next(left) for _ in range(size)]) for size in split]
    items = sum(objective.count(batch) for batch in batches)
    objective.before_step(model, batches, Processes())
    shares = [objective.micro_batch_loss(model, batch, items) for batch in batches]
    loss = sum(share.loss for share in shares)
    balance = sum(share.metrics["router_loss"] for share in shares)
    return loss.detach(), balance, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_step_has_the_loss_of_all_rows_at_once(spec, model, rows, expected, split):
    torch.testing.assert_close(step_of(spec, model, rows, split), expected)


@pytest.mark.parametrize("recomputed", ["none", "full", "per_op"])
def test_so_it_has_through_the_kernels_and_recomputed(spec, model, rows, expected, recomputed):
    other = copy.deepcopy(model).train()
    assert patch_model(other).counts["experts"] == 2
    checkpoint_activations(other, Training(steps=1, gradient_checkpointing=recomputed))
    torch.testing.assert_close(step_of(spec, other, rows, (2, 2), fused=True), expected, rtol=1e-4, atol=1e-5)


def test_running_counts_are_those_of_the_step_so_far(spec, model, rows, expected):
    torch.testing.assert_close(step_of(spec, model, rows, (4,), over="running"), expected)
    objective = RouterLoss(causal_model(model), "running")
    batches = [collate([row]) for row in rows]
    objective.begin_step(model, batches, Processes())
    logits = [model(batch["input_ids"], output_router_logits=True).router_logits for batch in batches]
    shares = [objective.share(own, batch) for own, batch in zip(logits, batches, strict=True)]
    tokens = sum(length for length, _ in ROWS)
    for number, share in enumerate(shares):
        chosen = torch.cat([torch.cat(own).softmax(-1).topk(2).indices for own in logits[: number + 1]]).flatten()
        frequency = torch.bincount(chosen, minlength=4) / (len(chosen) / 2)
        own = torch.cat(logits[number]).softmax(-1).sum(0) / (2 * tokens)
        torch.testing.assert_close(share, 4 * (frequency * own).sum())


@pytest.mark.parametrize("joined", [False, True], ids=["rows", "joined"])
def test_padding_is_told_by_its_document_and_not_by_its_id(joined):
    """A text may end in id 0 without a label, and a tokenizer's padding have another id."""
    texts = [[5, 6, 0, 0], [0, 7], [8, 8, 8, 8, 0]]
    labels = [[-100, 6, -100, -100], [-100, 7], [-100, -100, -100, 8, -100]]
    rows = [
        {"input_ids": torch.tensor(text), "labels": torch.tensor(label), "position_ids": torch.arange(len(text))}
        for text, label in zip(texts, labels, strict=True)
    ]
    rows[0] = {name: torch.cat([tensor, torch.tensor(more)]) for (name, tensor), more in zip(
        rows[0].items(), ([3, 3, 3], [-100] * 3, [0, 1, 2]), strict=True)}  # fmt: skip
    expected = [1, 1, 1, 1, 0, 0, 0, 1, 1, *[0] * 5 * (not joined), 1, 1, 1, 1, 1, *[0] * 2 * (not joined)]
    found = router_loss._tokens((collate_flat if joined else collate)(rows))
    assert found.tolist() == expected


def test_processes_that_share_rows_have_the_loss_of_whole_rows():
    launch(module="tests.runtime.helpers.split_router_loss")


def test_counting_draws_no_random_number_and_leaves_the_model_as_it_is(spec, model, rows):
    other = copy.deepcopy(model).train()
    other.model.layers[0].register_forward_hook(lambda *_: torch.rand(1) and None)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    RouterLoss(causal_model(other), "step").begin_step(other, [collate([row]) for row in rows], Processes())
    assert torch.equal(torch.random.get_rng_state(), before)
    step_of(spec, other, rows, (2, 2))
    assert other.router_aux_loss_coef == COEFFICIENT
    assert all(parameter.grad is None for parameter in other.parameters())


def test_a_model_without_the_formula_adds_its_own(model):
    own = inspect.unwrap(type(model).forward)
    scope = {"load_balancing_loss_func": lambda logits, *_: sum(each.mean() for each in logits)}
    other = copy.deepcopy(model)
    other.__class__ = type("Other", (type(model),), {"forward": FunctionType(own.__code__, scope)})
    assert causal_model(model) is model and causal_model(other) is None
