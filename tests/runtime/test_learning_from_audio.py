"""A model learns what only the sound holds: whole, and with LoRA in packed rows, also interrupted."""

import json
import random

import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

from tasks.runtime.export.check_folder import difference, media_results
from tasks.runtime.models.trained_weights import build_trained_model, collect_weights
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.audio_models import NOTES, QUESTION, qwen2_audio, samples_of, tone, write_tones
from tests.runtime.helpers.comparable_runs import curve, file_of
from tests.runtime.helpers.media_specs import media_spec
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

ROTATED = (*NOTES[1:], NOTES[0])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")


@torch.no_grad()
def accuracy(folder, answers=NOTES, model=None):
    """Of a published folder, by what it writes when its users ask it about tones that it has not heard."""
    processor = AutoProcessor.from_pretrained(folder)
    model = (model or AutoModelForMultimodalLM.from_pretrained(folder)).eval()
    draw, asked = random.Random(99), [number % 3 for number in range(90)]
    sounds = [samples_of(tone(NOTES[note], draw)) for note in asked]
    parts = [{"type": "audio"}, {"type": "text", "text": QUESTION}]
    prompt = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    processor.tokenizer.padding_side = "left"
    inputs = processor(
        text=[prompt] * len(asked), audio=sounds, sampling_rate=16_000, padding=True, return_tensors="pt"
    )
    written = model.generate(**inputs, max_new_tokens=5, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    texts = processor.batch_decode(written, skip_special_tokens=True)
    return sum(text == answers[note] for text, note in zip(texts, asked, strict=True)) / len(asked)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder that the command publishes of a model from scratch; its files are at another rate than it hears."""
    folder = tmp_path_factory.mktemp("audio")
    base = qwen2_audio(folder / "base", hidden=32)
    assert accuracy(base) < 0.4
    spec = media_spec(
        folder, "whole", base, write_tones(folder, 300, random.Random(0), rate=22_050),
        training={"steps": 80, "micro_batch_size": 16}, optimizer={"lr": 4e-3}, checkpoint={"every": 1000},
    )  # fmt: skip
    launch(file_of(folder, spec), module="tasks.runtime")
    return RunFolder.of(spec)


def test_it_learns_what_only_the_sound_holds(learned):
    assert accuracy(learned.model) > 0.95
    record = json.loads(learned.record.read_text())
    assert record["eval_loss_after"] < 0.2 * record["eval_loss_before"]
    (sample,) = record["samples"]
    assert sample["after"] == sample["reference"]
    assert sample["prompt"].count("<|AUDIO|>") == 1


def test_a_published_folder_is_read_on_a_sound(learned):
    """What the export compares differs as soon as the encoder is another."""
    model = AutoModelForMultimodalLM.from_pretrained(learned.model)
    expected = media_results(model, learned.model)
    with torch.no_grad():
        model.model.audio_tower.conv1.weight.mul_(1.1)
    text = {"input_ids": torch.ones(1), "logits": torch.ones(1)}
    told = difference(text | expected, text | media_results(model, learned.model))
    assert "logits of a picture or a sound differ" in told


def test_an_adapter_learns_other_answers_in_packed_rows_also_interrupted(learned, tmp_path):
    assert accuracy(learned.model, ROTATED) < 0.05
    source = write_tones(tmp_path, 150, random.Random(1))
    renamed = dict(zip(NOTES, ROTATED, strict=True))
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for row in rows:
        row["messages"][1]["content"] = renamed[row["messages"][1]["content"]]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = media_spec(
        tmp_path, "adapter", learned.model, source,
        adapter={"type": "lora", "r": 8}, data={"sequence_length": 96, "packing": True},
        training={"steps": 24, "micro_batch_size": 8}, optimizer={"lr": 1e-2}, checkpoint={"every": 12, "keep_last": 9},
        tracking={"log_every": 1},
    )  # fmt: skip
    train_spec(spec)
    whole = curve(spec, 0)
    record = train_spec(spec, step=12)
    assert len(whole) == 24
    assert curve(spec, 1) == whole[12:]
    merged = build_trained_model(spec, collect_weights(RunFolder.of(spec), spec.adapter, record))
    assert accuracy(learned.model, ROTATED, merged) > 0.95
