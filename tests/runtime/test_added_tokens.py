"""Special tokens that a run adds are in its tokenizer, its embeddings, and in what it exports."""

import json
import re

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.export.export_model import export
from tasks.runtime.models.adapters.lora import require_adapter
from tasks.runtime.models.build import build_model, build_model_on_meta
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tests.runtime.helpers.comparable_runs import SAVED, curve, make_spec
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

pytestmark = [
    pytest.mark.usefixtures("narrowed", "forked_readers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft"),
]
ADDED = ["<|tool|>", "<|think|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder(output):
    """A model that embeds its tokenizer's tokens and no more."""
    folder = save_pretrained(output / "pretrained")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)))
    model.save_pretrained(folder)
    return folder


def spec_of(output, folder, name, **adapter):
    rows = [{"prompt": f"Call number {n}: ", "completion": f"<|tool|>{n}<|think|> so {n}."} for n in range(60)]
    (output / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = make_spec(output, name, "torch", "single", 1, "lora" if adapter else "none").model_dump()
    values["model"] |= {"name": str(folder), "add_special_tokens": ADDED}
    values["data"] |= {"source": str(output / "rows.jsonl"), "special_tokens": "control"}
    values["adapter"] |= adapter
    values["export"] |= {"formats": ["safetensors", "adapter"] if adapter else ["safetensors"]}
    return RunSpec.model_validate(values)


def test_new_rows_begin_as_those_of_transformers(folder, output):
    spec = spec_of(output, folder, "rows")
    base = AutoModelForCausalLM.from_pretrained(folder)
    size = base.config.vocab_size
    torch.manual_seed(spec.seed)
    base.resize_token_embeddings(size + 2, mean_resizing=True)
    ours = build_model(spec.model, spec.seed)
    # One of the three was there.
    assert ours.config.vocab_size == size + 2 == build_model_on_meta(spec.model).config.vocab_size
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), ours.parameters(), strict=True))
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (ours, build_model_on_meta(spec.model))]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        (["embed_tokens"], "leaves the head frozen, .* cannot learn to write them; add lm_head"),
        (["lm_head"], "leaves the embeddings frozen, .* reads all of them as the same token; add embed_tokens"),
        (["embed_tokens", "lm_head"], None),
    ],
)
def test_rows_that_an_adapter_leaves_frozen_are_told(folder, output, caplog, modules, told):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(output / "untied")
    AutoTokenizer.from_pretrained(folder).save_pretrained(output / "untied")
    require_adapter(spec_of(output, output / "untied", "told", modules_to_save=modules))
    assert re.search(told, caplog.text) if told else not caplog.text
    # Tied weights are one.
    caplog.clear()
    require_adapter(spec_of(output, folder, "told", modules_to_save=modules))
    assert not caplog.text
    with pytest.raises(
        ValueError, match=r"modules_to_save \['norm'\] leaves .* untrained; add embed_tokens and lm_head"
    ):
        require_adapter(spec_of(output, output / "untied", "told", modules_to_save=["norm"]))


def test_tokens_that_the_model_has_learned_are_not_new(folder, output, caplog):
    """A second stage, from the exported model of the first, may leave their rows frozen."""
    spec = spec_of(output, folder, "learned", modules_to_save=["norm"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(ADDED, special_tokens=True)
    tokenizer.save_pretrained(output / "stage")
    model = build_model(spec.model, spec.seed)
    model.save_pretrained(output / "stage")
    model.resize_token_embeddings(len(tokenizer) - 1)
    model.save_pretrained(output / "short")
    tokenizer.save_pretrained(output / "short")
    caplog.clear()
    require_adapter(spec_of(output, output / "stage", "learned", modules_to_save=["norm"]))
    assert not caplog.text
    with pytest.raises(ValueError, match=r"leaves the rows of model\.add_special_tokens untrained"):
        require_adapter(spec_of(output, output / "short", "learned", modules_to_save=["norm"]))


@pytest.mark.parametrize("adapter", [{}, {"r": 4, "modules_to_save": ["embed_tokens"]}], ids=["whole", "adapter"])
def test_exported_tokens_are_read_back(folder, output, adapter):
    spec = spec_of(output, folder, "adapter" if adapter else "whole", **adapter)
    record = train_spec(spec)
    expected = curve(spec)
    train_spec(spec, SAVED)
    assert curve(spec) == expected
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    before = len(AutoTokenizer.from_pretrained(folder))
    assert data.manifest.largest_token_id == before + 1
    model = export(spec, record, data, collect_weights(RunFolder.of(spec), spec.adapter, record)).model
    tokenizer, read = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer.convert_tokens_to_ids(ADDED[:2])
    assert ids == [before, before + 1]
    assert tokenizer("a<|tool|>b<|think|>").input_ids.count(before) == 1
    assert read.config.vocab_size == len(tokenizer) == read.get_input_embeddings().weight.shape[0] == before + 2
    # The new rows have learned.
    start = build_model(spec.model, spec.seed).get_input_embeddings().weight
    assert (read.get_input_embeddings().weight[before:] - start[before:]).abs().min(dim=0).values.max() > 1e-5
    if adapter:
        base = AutoModelForCausalLM.from_pretrained(folder)
        base.resize_token_embeddings(len(tokenizer))
        adapted = PeftModel.from_pretrained(base, model, subfolder="adapter")
        tokens = torch.tensor([[5, 6, *ids, 7]])
        torch.testing.assert_close(adapted(tokens).logits, read(tokens).logits, rtol=1e-4, atol=1e-4)
