"""A real pretrained chat model learns a task with exact answers, and both formats that are exported answer alike."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata_platform.estimate import shape_of
from strata_platform.estimate.host_estimate import estimate_on_host
from strata_platform.spec import load_spec
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.llama_cpp import LlamaCpp
from tests.runtime.helpers.pretrained_chat_model import chat_model_folder
from tests.runtime.helpers.standard_library_facts import chats

PROMPTS, TOKENS = 4, 24


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that `python -m tasks.runtime` has trained, evaluated and exported."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "facts.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats()))
    spec = {
        "name": "facts",
        "output": str(folder),
        "model": {"name": str(chat_model_folder())},
        "data": {"source": str(folder / "facts.jsonl"), "sequence_length": 256, "validation_fraction": 0.1},
        "adapter": {"type": "lora", "r": 16},
        "optimizer": {"lr": 2e-3},
        "training": {"steps": 8, "micro_batch_size": 2},
        "schedule": {"type": "linear", "warmup_ratio": 0.1},
        "evaluation": {
            "samples": PROMPTS, "max_new_tokens": TOKENS, "max_batches": 1, "every": 4, "during": ["samples"],
        },
        "export": {"formats": ["safetensors", "gguf"], "gguf_type": "f16"},
        "kernels": {"enabled": False},
        "tracking": {"report_to": [], "log_every": 1},
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run([sys.executable, "-m", "tasks.runtime", folder / "spec.json"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    return RunFolder.of(load_spec(folder / "spec.json"))


@pytest.fixture(scope="module")
def record(run):
    return CompletionRecord.model_validate_json(run.record.read_text())


def test_held_out_answers_are_exact_after_training_and_none_before(record):
    """Greedy answers to prompts of the validation split, from the first token to the last."""
    wanted = [sample.reference for sample in record.samples]
    assert len(set(wanted)) == PROMPTS
    during = [evaluation.samples for evaluation in record.evaluations]
    answers = [[sample.before for sample in record.samples], *during, [sample.after for sample in record.samples]]
    exact = [sum(a.strip() == b for a, b in zip(given, wanted, strict=True)) for given in answers]
    # Before, after steps 4 and 8, and with the adapter merged.
    assert len(exact) == 4 and exact[0] == 0 and exact[-1] >= 0.7 * PROMPTS
    assert 0 < exact[1] <= exact[2] == exact[3]
    losses = [record.eval_loss_before, *(point.loss for point in record.evaluations), record.eval_loss_after]
    assert losses[-1] < 0.2 * losses[0] and losses[1] < 0.5 * losses[0]


def test_safetensors_and_gguf_answer_alike(run, record):
    """What the run's own evaluation of the trained model wrote, from each format by itself."""
    [file] = run.model.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    for options in ({}, {"gguf_file": file.name}):
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32, **options).eval()
        for sample in record.samples[:2]:
            assert answer(model, tokenizer, sample.prompt) == sample.after


@torch.inference_mode()
def answer(model, tokenizer, prompt):
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    written = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_llama_cpp_answers_alike(run, record):
    [file] = run.model.glob("*.gguf")
    model, tokenizer = LlamaCpp(file), AutoTokenizer.from_pretrained(run.model)
    for sample in record.samples:
        ids = model.tokens(sample.prompt)
        assert ids == tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(model.greedy(ids, TOKENS), skip_special_tokens=True) == sample.after


def test_the_estimate_is_close_to_the_memory_that_was_taken(run, record):
    """The largest resident set that the run has reported."""
    spec = load_spec(run.root.parent / "spec.json")
    found = estimate_on_host(spec, shape_of(spec.model.name)).memory
    assert found.peak == pytest.approx(record.peak_memory_bytes, rel=0.25)
