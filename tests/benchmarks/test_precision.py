"""The program that compares losses: its runs are valid, and its plain loops are AdamW on fp32 copies of the weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks import float8_by_name, precision
from tasks.runtime.models import float8

ignored = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
# Fewer than 1/256 of a weight, which bf16 weights alone would lose.
RATE, STEPS = 1e-4, 3
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    settings = {**SIZES, "num_hidden_layers": 1, "vocab_size": 64, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(tmp_path / "start")
    return tmp_path


def spec_of(folder, name):
    arguments = SimpleNamespace(out=folder, model=folder / "start", seed=0, steps=STEPS, lr=RATE, length=16)
    return precision.spec_of(arguments, name)


@pytest.mark.parametrize("name", precision.ROWS)
def test_every_row_has_a_valid_spec(name, folder):
    spec, row = spec_of(folder, name), precision.ROWS[name]
    assert spec.training.float8 == (row.float8 if isinstance(row, precision.Ours) else "none")


@ignored
@pytest.mark.parametrize(
    "name", [pytest.param(name) for name, row in precision.ROWS.items() if isinstance(row, precision.Plain)]
)
def test_a_plain_loop_keeps_updates_that_bf16_loses(name, folder, monkeypatch):
    row, spec = precision.ROWS[name], spec_of(folder, name)
    if row.recipe:
        pytest.importorskip("torchao")
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    monkeypatch.setattr(precision, "training_loader", lambda *_, **options: [batch] * options["stop"])
    built, build = [], precision.plain_model
    monkeypatch.setattr(precision, "plain_model", lambda *args: built.append(build(*args)) or built[-1])
    losses = precision.train_plain(row, spec, None, folder / "trained")
    in_float8 = {path for path, layer in built[0].named_modules() if type(layer) is not nn.Linear} & {
        path for path, layer in built[0].named_modules() if isinstance(layer, nn.Linear)
    }
    assert len(in_float8) == (7 if row.recipe else 0) and "lm_head" not in in_float8
    assert len(losses) == STEPS and losses[-1] < losses[0]
    # AdamW on the fp32 weights, with gradients of exact products at weights of the row's dtype.
    model = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    before = {key: weight.clone() for key, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), betas=spec.optimizer.betas, eps=spec.optimizer.eps)
    factor = precision.learning_rate_factor(spec.schedule, STEPS)
    for done in range(STEPS):
        optimizer.param_groups[0].update(lr=RATE * factor(done), weight_decay=0.0)
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    trained = AutoModelForCausalLM.from_pretrained(folder / "trained", dtype=torch.float32)
    after, expected = dict(trained.named_parameters()), dict(model.named_parameters())
    key = "model.layers.0.mlp.up_proj.weight"
    moves = [(weights[key] - before[key]).flatten() for weights in (after, expected)]
    # Adam moves by signs of gradients, whose smallest FP8 does not keep.
    assert torch.cosine_similarity(*moves, dim=0) > (0.9 if row.recipe else 0.99)


def test_layers_are_exact_by_the_end_of_their_path(monkeypatch):
    monkeypatch.setattr(float8, "_slow_layers", None)
    layers = {f"model.layers.{i}.{name}": None for i in (1, 11) for name in ("q_proj", "mlp.up_proj")}
    float8_by_name.keep_exact()
    assert float8._slow_layers(layers, "tensorwise") == []
    float8_by_name.keep_exact("q_proj", "layers.1.mlp.up_proj")
    assert float8._slow_layers(layers) == [
        "model.layers.1.q_proj", "model.layers.1.mlp.up_proj", "model.layers.11.q_proj",
    ]  # fmt: skip
