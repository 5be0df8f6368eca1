"""Reward models: the loss by hand, packed rows, and what is exported: transformers' own class gives the same scores."""

import json
from itertools import pairwise

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.model import Model
from tasks.runtime.data import collate, collate_flat, fingerprint, prepare
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.export.export_model import export
from tasks.runtime.models.attention.packing_support import require_packing_support
from tasks.runtime.models.build import build_model
from tasks.runtime.models.planned_model import require_kernels
from tasks.runtime.models.pretrained import require_complete_weights
from tasks.runtime.models.score_head import require_score_head, score_positions
from tasks.runtime.models.trained_weights import build_trained_model, collect_weights
from tasks.runtime.objectives import build_objective
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tests.runtime.helpers.preference_pairs import PAIRS as ALL
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("forked_readers")
PAIRS = [{**pair, "margin": None if n % 3 == 0 else n / 10} for n, pair in enumerate(ALL[:16])]


def make_spec(output, name="reward", **changes):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"name": f"{output}/pretrained"},
            "data": {"source": f"{output}/pairs.jsonl", "sequence_length": 96, "validation_fraction": 0.2},
            "objective": {"type": "reward", "center_coefficient": 0.1},
            "training": {"steps": 4, "micro_batch_size": 2},
            "optimizer": {"lr": 3e-3},
            "checkpoint": {"every": 2, "keep_last": 4},
            "evaluation": {"every": 2},
            "tracking": {"log_every": 1, "report_to": []},
            **changes,
        }
    )


def data_of(spec):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    output = tmp_path_factory.mktemp("reward")
    save_pretrained(output / "pretrained")
    write_pairs(output / "pairs.jsonl", PAIRS)
    return output


def alone(model, tokenizer, text):
    """The score of a text by transformers' own class, without packing."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    with torch.no_grad():
        return float(type(model).forward(model, input_ids=ids).logits)


def test_loss_of_packed_rows_is_that_of_single_texts(output):
    spec = make_spec(output, data={**make_spec(output).data.model_dump(include={"source", "sequence_length"})})
    data = data_of(spec)
    model = build_model(spec.model, spec.seed).eval()
    tokenizer = data.tokenizer()
    model.config.pad_token_id = tokenizer.pad_token_id
    rows = [data.train[index] for index in range(len(data.train))]
    objective = build_objective(spec, fused=False)
    score_positions(model)
    batches = [collate(rows[:1]), collate(rows[1:3]), collate_flat(rows[3:])]
    items = sum(objective.count(batch) for batch in batches)
    shares = [objective.micro_batch_loss(model, batch, items) for batch in batches]
    used = {
        tokenizer.decode(row["input_ids"][(row["sides"] == 1) & (row["labels"] != -100)], skip_special_tokens=True)
        for row in rows
    }
    pairs = [pair for pair in PAIRS if any(pair["chosen"] in text for text in used)]
    assert len(pairs) == int(items) < len(PAIRS)
    scores = torch.tensor(
        [[alone(model, tokenizer, pair["prompt"] + pair[side]) for side in ("chosen", "rejected")] for pair in pairs]
    )
    margins = torch.tensor([pair["margin"] or 0.0 for pair in pairs])
    losses = -logsigmoid(scores[:, 0] - scores[:, 1] - margins) + 0.1 * scores.sum(1) ** 2
    assert sum(float(share.loss.detach()) for share in shares) == pytest.approx(float(losses.mean()), rel=1e-5)
    accuracy = sum(float(share.metrics["reward_accuracy"]) for share in shares)
    assert accuracy == pytest.approx(float((scores[:, 0] > scores[:, 1]).double().mean()))


# PEFT reads an attribute that transformers will rename.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_what_is_exported_scores_as_the_trained_model(output, adapter):
    formats = ["safetensors", *(["adapter"] if adapter == "lora" else [])]
    spec = make_spec(output, f"exported-{adapter}", adapter={"type": adapter}, export={"formats": formats})
    record = train_spec(spec)
    data, weights = data_of(spec), collect_weights(RunFolder.of(spec), spec.adapter, record)
    record = evaluate(spec, record, data, weights)
    assert record.evaluations[-1].loss == pytest.approx(record.eval_loss_after, rel=1e-4)
    assert record.eval_loss_after < record.eval_loss_before and record.samples == ()
    folder = export(spec, record, data, weights)
    config = json.loads((folder.model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert "text-classification" in (folder.model / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    again = build_model(spec.model.model_copy(update={"name": str(folder.model)}), seed=5)
    assert torch.equal(again.score.weight, load_file(folder.model / "model.safetensors")["score.weight"])
    read = {"model": AutoModelForSequenceClassification.from_pretrained(folder.model)}
    if adapter == "lora":
        base = AutoModelForSequenceClassification.from_pretrained(output / "pretrained", num_labels=1)
        base.config.pad_token_id = tokenizer.pad_token_id
        read["adapter"] = PeftModel.from_pretrained(base, folder.model / "adapter")
    texts = [pair["prompt"] + pair[side] + tokenizer.eos_token for pair in PAIRS for side in ("chosen", "rejected")]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    scores = {}
    for name, model in read.items():
        with torch.no_grad():
            scores[name] = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    ranked = (scores["model"][::2] > scores["model"][1::2]).double().mean()
    assert float(ranked) > 0.9
    if adapter == "lora":
        torch.testing.assert_close(scores["adapter"], scores["model"], rtol=1e-4, atol=1e-5)
    # The validation loss of the run, from the folder alone.
    rows = [data.validation[index] for index in range(len(data.validation))]
    objective, model = build_objective(spec, fused=False), read["model"]
    model.config.use_cache = False
    score_positions(model)
    share = objective.micro_batch_loss(model, collate(rows), objective.count(collate(rows)))
    assert float(share.loss.detach()) == pytest.approx(record.eval_loss_after, rel=1e-4)


OWN = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=96),
    "gpt_neox": GPTNeoXConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
}


@pytest.mark.parametrize("config", OWN.values(), ids=OWN)
def test_families_whose_class_computes_a_loss_of_its_own_score_alike(output, config, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(output / "pretrained")
    config = type(config).from_dict({**config.to_dict(), "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    spec = make_spec(output, f"own-{config.model_type}".replace("_", "-"), model={"name": str(tmp_path / "base")})
    require_kernels(spec.model, spec.kernels)
    require_packing_support(build_model(spec.model, 0), spec)
    record = train_spec(spec)
    model = build_trained_model(spec, collect_weights(RunFolder.of(spec), spec.adapter, record)).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    losses = []
    rows = data_of(spec).validation
    for index in range(len(rows)):
        row = rows[index]
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), row["position_ids"].numel()]
        texts = [row["input_ids"][begin:end] for begin, end in pairwise(starts) if row["sides"][begin] != 0]
        margins = row["margin"][row["position_ids"] == 0][: len(texts)]
        with torch.no_grad():
            found = [float(model(input_ids=text[None]).logits) for text in texts]
        for number in range(0, len(found), 2):
            chosen, rejected = found[number : number + 2]
            losses.append(
                -logsigmoid(torch.tensor(chosen - rejected) - margins[number]) + 0.1 * (chosen + rejected) ** 2
            )
    assert float(torch.stack(losses).mean()) == pytest.approx(record.evaluations[-1].loss, rel=1e-4)


def test_a_resumed_run_computes_the_same_bits(output):
    spec = make_spec(output, "resumed")
    train_spec(spec)
    train_spec(spec, 2)
    points = [json.loads(line) for line in RunFolder.of(spec).metrics.read_text().splitlines()]
    losses = [{p["step"]: p["loss"] for p in points if p.get("attempt") == n and "target_tokens" in p} for n in (0, 1)]
    assert losses[1] == {step: loss for step, loss in losses[0].items() if step > 2} and len(losses[1]) == 2


def test_the_same_seed_makes_the_same_head(output):
    heads = [build_model(make_spec(output).model, seed).score.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.005 < float(heads[0].detach().std()) < 0.05


def test_margins_are_numbers(tmp_path, output):
    spec = make_spec(output, data={"source": write_pairs(tmp_path / "pairs.jsonl", [{**PAIRS[0], "margin": "big"}])})
    with pytest.raises(ValueError, match=r"column 'margin' holds str 'big'; a margin is a finite number"):
        data_of(spec)


def test_a_family_without_such_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere", "architectures": ["CohereForCausalLM"]}))
    spec = RunSpec.model_validate(
        {"model": {"name": str(tmp_path)}, "objective": {"type": "reward"}, "data": {"source": "pairs.jsonl"}}
    )
    with pytest.raises(ValueError, match="transformers has no AutoModelForSequenceClassification"):
        require_score_head(spec.model)


def test_a_classifier_is_refused_with_the_number_of_its_scores(tmp_path):
    width = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
    sizes = {**width, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=3)).save_pretrained(tmp_path)
    spec = RunSpec(model={"name": str(tmp_path)}, objective={"type": "reward"}, data={"source": "a.jsonl"})
    message = r"model\.name .* with 3 scores for a text \(num_labels\); a reward model has one\. .* language model"
    # Only the first knows the folder of a model on the Hub.
    for refuses in (
        lambda: require_score_head(spec.model),
        lambda: require_complete_weights(spec.model, spec.objective),
        lambda: build_model(spec.model, seed=0),
    ):
        with pytest.raises(ValueError, match=message):
            refuses()
    grpo = {"type": "grpo", "rewards": [{"model": str(tmp_path)}]}
    spec = RunSpec(objective=grpo, data={"source": "a.jsonl", "sequence_length": 1024})
    message = r"^objective\.rewards\[0\]\.model: .* with 3 scores .* Give a reward model with num_labels 1$"
    with pytest.raises(ValueError, match=message):
        require_complete_weights(spec.model, spec.objective)
    random = Model(name=str(tmp_path), init="random").with_head("score")
    require_score_head(random)
    assert build_model(random, seed=0).score.weight.shape == (1, 8)
