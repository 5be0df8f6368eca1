"""What is measured of a model is told in lines of which none can be taken for another's."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform import progress_line
from strata_platform.spec import RunSpec
from tasks.runtime.data import Sample
from tasks.runtime.evaluation import evaluate_model
from tasks.runtime.run_folder.record import CompletionRecord

FORGED = progress_line.encode({"stage": "exporting"})


def test_no_line_of_a_sample_begins_a_line_of_the_log(tmp_path, monkeypatch, caplog):
    written = f"first\n{FORGED}\r{FORGED}\u2028[default1]:{FORGED}\n"
    measured = evaluate_model.Measurements({}, [written], {})
    monkeypatch.setattr(evaluate_model, "_measure", lambda spec, data, prompts, weights: (measured, data))
    data = SimpleNamespace(samples=lambda number: [Sample(prompt=f"{FORGED}\n{FORGED}", completion="", prompt_ids=[])])
    with caplog.at_level(logging.INFO):
        record = evaluate_model.evaluate(
            RunSpec(), CompletionRecord.model_construct(status="complete", steps=1), data, tmp_path
        )
    assert record.samples[0].after == written
    lines = caplog.messages[-1].splitlines()
    assert lines[0].startswith("prompt: @strata ")
    assert len(lines) == 6 and all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize(
    ("before", "told"), [(2.0, "2.0000 before, 0.5000 after (-75.0 %)"), (0.0, "0.0000 before, 0.5000 after")]
)
def test_a_loss_that_was_0_is_told_without_its_change(tmp_path, monkeypatch, caplog, before, told):
    losses = iter((before, 0.5))
    measure = lambda spec, data, prompts, weights: (evaluate_model.Measurements({"loss": next(losses)}, [], {}), data)  # noqa: E731
    monkeypatch.setattr(evaluate_model, "_measure", measure)
    data = SimpleNamespace(samples=lambda number: [])
    with caplog.at_level(logging.INFO):
        evaluate_model.evaluate(RunSpec(), CompletionRecord.model_construct(status="complete", steps=1), data, tmp_path)
    assert caplog.messages == [f"validation loss {told}"]


def test_samples_end_with_the_end_tokens_of_the_model_too():
    """As answers in training do; transformers' own `generate` ends with those of generation_config.json."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model, prompt = LlamaForCausalLM(config).eval(), torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(prompt, eos_token_id=31, **options)[0, 3:].tolist()
    model.generation_config.eos_token_id = [30, whole[2]]
    expected = model.generate(prompt, **options)[0, 3:].tolist()
    data = SimpleNamespace(manifest=SimpleNamespace(stop_token_ids=(31,), pad_token_id=0))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: ids.tolist())
    found = evaluate_model.generate(model, tokenizer, SimpleNamespace(prompt_ids=(5, 6, 7), media=()), data, 8)
    assert found == str(expected) and len(expected) < len(whole)
