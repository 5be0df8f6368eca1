"""Runs that train modules beside an adapter, export the adapter alone, and start from one."""

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
from tests.runtime.helpers.comparable_runs import SAVED, approx, curve, file_of, make_spec
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = [
    pytest.mark.usefixtures("narrowed"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft"),
]
TOKENS = torch.arange(5, 37)[None]


def spec_of(output, name, framework="torch", strategy="single", processes=1, **adapter):
    values = make_spec(output, name, framework, strategy, processes, "lora").model_dump()
    values["adapter"] |= {"r": 4, "modules_to_save": ["embed_tokens"], "loraplus_lr_ratio": 4, **adapter}
    values["evaluation"] |= {"samples": 0, "max_batches": 2}
    values["export"] |= {"formats": ["safetensors", "adapter"]}
    return RunSpec.model_validate(values)


def measured(spec, record):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    return evaluate(spec, record, data, weights), data, weights


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


def test_a_run_starts_where_the_other_ended_and_comes_back_exactly(first, output):
    record, folder = first
    start = {"init_from": str(folder.model / "adapter")}
    spec = spec_of(output, "second", **start)
    second, *_ = measured(spec, train_spec(spec))
    assert second.eval_loss_before == pytest.approx(record.eval_loss_after, rel=1e-5)
    expected = curve(spec)
    train_spec(spec, SAVED)
    assert curve(spec) == expected
    sharded = spec_of(output, "sharded", "hf", "fsdp", 2, **start)
    launch(2, "--narrow", file_of(output, sharded))
    assert curve(sharded) == approx(expected)
