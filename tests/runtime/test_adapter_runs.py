"""Runs with modules beside an adapter, that start from one, with PiSSA, and with an adapter of embeddings."""

import importlib.util
import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.export.export_model import export
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.comparable_runs import SAVED, STEPS, approx, curve, file_of, make_spec
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = [
    pytest.mark.usefixtures("narrowed", "forked_readers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft"),
]
TOKENS = torch.arange(5, 37)[None]
PISSA = {
    "modules_to_save": [],
    "loraplus_lr_ratio": None,
    "init_lora_weights": "pissa",
    "target_modules": ["q_proj", "down_proj", "embed_tokens"],
}
# Framework, strategy, processes, and what quantizes the frozen weights.
PISSA_RUNS = {
    "pissa": ("torch", "single", 1, "none"),
    "pissa-fsdp": ("hf", "fsdp", 2, "none"),
    "pissa-zero": ("torch", "deepspeed", 2, "none"),
    "pissa-nf4": ("torch", "single", 1, "nf4"),
    "pissa-nf4-ddp": ("lightning", "ddp", 2, "nf4"),
}


def spec_of(output, name, framework="torch", strategy="single", processes=1, steps=STEPS, **adapter):
    values = make_spec(output, name, framework, strategy, processes, "lora", steps=steps).model_dump()
    values["adapter"] |= {"r": 4, "modules_to_save": ["embed_tokens"], "loraplus_lr_ratio": 4, **adapter}
    values["evaluation"] |= {"samples": 0, "max_batches": 2}
    values["export"] |= {"formats": ["safetensors", "adapter"]}
    return RunSpec.model_validate(values)


def measured(spec, record):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    return evaluate(spec, record, data, weights), data, weights


def train_and_return(spec):
    train_spec(spec)
    return spec


@pytest.fixture(scope="module")
def first(output):
    """A finished run with an exported adapter: its record and its folder."""
    save_pretrained(output / "pretrained")
    spec = spec_of(output, "first")
    record, data, weights = measured(spec, train_spec(spec))
    return record, export(spec, record, data, weights)


def test_the_adapter_is_read_by_peft_and_is_the_merged_model(first, output):
    record, folder = first
    merged = AutoModelForCausalLM.from_pretrained(folder.model)
    base = AutoModelForCausalLM.from_pretrained(output / "pretrained")
    adapted = PeftModel.from_pretrained(base, folder.model, subfolder="adapter")
    torch.testing.assert_close(adapted(TOKENS).logits, merged(TOKENS).logits, rtol=1e-4, atol=1e-4)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (folder.model, folder.model / "adapter")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert record.eval_loss_after < record.eval_loss_before


def test_checkpoints_hold_the_adapter_and_the_modules(first):
    names = [n for n in Index(checkpoint.latest(first[1].checkpoints)) if n.startswith("model.")]
    assert {name for name in names if "lora_" not in name} == {"model.model.embed_tokens.weight"}


@pytest.fixture(scope="module")
def pissa(first, output):
    """Specs of runs with PiSSA. Those of two processes are trained once more from their first checkpoint."""
    runs = {
        name: spec_of(output, name, *how, **PISSA, quantization=stored)
        for name, (*how, stored) in PISSA_RUNS.items()
        if stored == "none" or importlib.util.find_spec("bitsandbytes")
    }
    sharded = spec_of(output, "sharded", "hf", "fsdp", 2, init_from=str(first[1].model / "adapter"))
    several = [file_of(output, spec) for name, spec in runs.items() if PISSA_RUNS[name][2] == 2]
    launch(2, "--narrow", file_of(output, sharded), *several, *(f"{file}@{SAVED}" for file in several))
    for name, spec in runs.items():
        if PISSA_RUNS[name][2] == 1:
            train_spec(spec)
    return runs


def test_a_run_starts_where_the_other_ended_and_comes_back_exactly(first, output, pissa):
    record, folder = first
    spec = spec_of(output, "second", init_from=str(folder.model / "adapter"))
    second, *_ = measured(spec, train_spec(spec))
    assert second.eval_loss_before == pytest.approx(record.eval_loss_after, rel=1e-5)
    expected = curve(spec)
    train_spec(spec, SAVED)
    assert curve(spec) == expected
    # The fixture has trained it.
    assert curve(spec_of(output, "sharded")) == approx(expected)


def test_the_reference_is_the_model_with_the_adapter_that_the_run_began_with(first, output):
    """The first loss of `dpo` is log 2 where the reference is the initial model."""
    write_pairs(output / "pairs.jsonl")
    for name, start in (("dpo", None), ("dpo-started", str(first[1].model / "adapter"))):
        values = spec_of(output, name, init_from=start).model_dump()
        values |= {"objective": {"type": "dpo"}, "data": {"source": str(output / "pairs.jsonl"), "sequence_length": 64}}
        spec = RunSpec.model_validate(values)
        train_spec(spec)
        expected = curve(spec)
        assert expected[0][1] == pytest.approx(math.log(2), rel=1e-5)
        train_spec(spec, SAVED)
        assert curve(spec) == expected


@pytest.mark.parametrize("name", PISSA_RUNS)
def test_pissa_has_the_losses_of_one_process_and_comes_back_exactly(pissa, name):
    if name not in pissa:
        pytest.skip("bitsandbytes is not installed")
    spec, quantized = pissa[name], PISSA_RUNS[name][3] == "nf4"
    if PISSA_RUNS[name][2] == 1:
        train_spec(spec, SAVED)
    points = curve(spec, attempt=0)
    assert points == approx(curve(pissa["pissa-nf4" if quantized else "pissa"], attempt=0))
    assert curve(spec, attempt=1) == points[SAVED:]
    assert points[-1][1] < points[0][1] - 0.03


def test_pissa_begins_with_the_losses_of_the_model(pissa, output):
    """Those of LoRA, which has no effect at first. Weights of 4 bits are closer to it than without PiSSA."""
    begin = {name: curve(spec, attempt=0)[0][1] for name, spec in pissa.items()}
    exact = curve(train_and_return(spec_of(output, "lora", steps=1)))[0][1]
    assert begin["pissa"] == pytest.approx(exact, rel=1e-5)
    if "pissa-nf4" in begin:
        quantized = curve(train_and_return(spec_of(output, "lora-nf4", steps=1, quantization="nf4")))[0][1]
        assert abs(begin["pissa-nf4"] - exact) < abs(quantized - exact)


def test_pissa_is_exported_for_the_original_weights(pissa, output):
    """With a tied head, which the adapter of the embeddings leaves alone."""
    spec = pissa["pissa-fsdp"]
    record, data, weights = measured(spec, CompletionRecord.load(RunFolder.of(spec).record))
    assert record.eval_loss_after < record.eval_loss_before
    folder = export(spec, record, data, weights)
    merged = AutoModelForCausalLM.from_pretrained(folder.model)
    base = AutoModelForCausalLM.from_pretrained(output / "pretrained")
    assert base.lm_head.weight is base.model.embed_tokens.weight
    before, weight = base(TOKENS).logits, base.lm_head.weight.clone()
    adapted = PeftModel.from_pretrained(base, folder.model, subfolder="adapter")
    assert adapted.peft_config["default"].r == 8
    torch.testing.assert_close(adapted(TOKENS).logits, merged(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert (merged(TOKENS).logits - before).abs().max() > 0.01
    assert torch.equal(merged.lm_head.weight, weight)
    assert not torch.equal(merged.model.embed_tokens.weight, weight)
