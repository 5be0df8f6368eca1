"""A vision-language model learns what only the image holds: whole and with LoRA, packed and not, also interrupted."""

import json
import math
import random

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from strata_platform.spec import DataRecipe
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.export.check_folder import difference, media_results
from tasks.runtime.models.trained_weights import build_trained_model, collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tests.runtime.helpers.comparable_runs import approx, curve, file_of
from tests.runtime.helpers.media_specs import media_spec
from tests.runtime.helpers.pictures import QUESTION, SHAPES, picture, write_shapes
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec
from tests.runtime.helpers.vision_models import llava, qwen2_5_vl

ROTATED = (*SHAPES[1:], SHAPES[0])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")


@torch.no_grad()
def accuracy(folder, answers=SHAPES, model=None):
    """Of a published folder, by what it writes when its users ask it about pictures that it has not seen; or of
    `model`, by the folder's processor.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = (model or AutoModelForImageTextToText.from_pretrained(folder)).eval()
    draw = random.Random(99)
    pictures = [(number % 3, picture(SHAPES[number % 3], draw, 16)) for number in range(120)]
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    inputs = processor(text=[prompt] * 120, images=[[image] for _, image in pictures], return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=6, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    texts = processor.batch_decode(written, skip_special_tokens=True)
    return sum(text == answers[shape] for text, (shape, _) in zip(texts, pictures, strict=True)) / 120


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder that the command publishes of a model from scratch."""
    folder = tmp_path_factory.mktemp("vision")
    base = qwen2_5_vl(folder / "base", hidden=32, edge=16)
    assert accuracy(base) < 0.4
    spec = media_spec(
        folder, "whole", base, write_shapes(folder, 1500),
        training={"steps": 260, "micro_batch_size": 32}, optimizer={"lr": 4e-3}, checkpoint={"every": 1000},
    )  # fmt: skip
    launch(file_of(folder, spec), module="tasks.runtime")
    return RunFolder.of(spec)


def test_it_learns_what_only_the_image_holds(learned):
    assert accuracy(learned.model) > 0.95
    record = json.loads(learned.record.read_text())
    assert record["eval_loss_after"] < 0.1 * record["eval_loss_before"]
    # What it wrote for a held-out row is about the row's image.
    (sample,) = record["samples"]
    assert sample["after"] == sample["reference"]
    assert sample["prompt"].count("<|image_pad|>") == 1


def test_a_published_folder_is_read_on_a_picture(learned):
    """What the export compares differs as soon as the tower or the processor is another."""
    model = AutoModelForImageTextToText.from_pretrained(learned.model)
    expected = media_results(model, learned.model)
    assert torch.equal(media_results(model, learned.model)["media_logits"], expected["media_logits"])
    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.mul_(1.1)
    assert "logits of a picture or a sound differ" in difference(
        {"input_ids": torch.ones(1), "logits": torch.ones(1)} | expected,
        {"input_ids": torch.ones(1), "logits": torch.ones(1)} | media_results(model, learned.model),
    )


def test_an_adapter_learns_other_answers_in_packed_rows_also_interrupted(learned, tmp_path):
    assert accuracy(learned.model, ROTATED) < 0.05
    spec = media_spec(
        tmp_path, "adapter", learned.model, write_shapes(tmp_path, 600, answers=ROTATED),
        adapter={"type": "lora", "r": 8},
        data={"sequence_length": 128, "packing": True},
        training={"steps": 80, "micro_batch_size": 8}, optimizer={"lr": 1e-2}, checkpoint={"every": 40, "keep_last": 9},
        tracking={"log_every": 1},
    )  # fmt: skip
    train_spec(spec)
    whole = curve(spec, 0)
    record = train_spec(spec, step=40)
    again = curve(spec, 1)
    assert len(whole) == 80
    assert again == whole[40:]

    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    assert data.manifest.train.media == data.manifest.train.samples > data.manifest.train.rows
    assert accuracy(learned.model, ROTATED, trained_model(spec, record)) > 0.95


def test_all_weights_learn_other_answers_in_packed_rows_also_interrupted(learned, tmp_path):
    spec = media_spec(
        tmp_path, "packed", learned.model, write_shapes(tmp_path, 600, answers=ROTATED),
        data={"sequence_length": 128, "packing": True}, training={"steps": 36, "micro_batch_size": 8},
        optimizer={"lr": 4e-3}, checkpoint={"every": 32, "keep_last": 9}, tracking={"log_every": 1},
    )  # fmt: skip
    train_spec(spec)
    whole = curve(spec, 0)
    record = train_spec(spec, step=32)
    assert len(whole) == 36 and curve(spec, 1) == whole[32:]
    # Without the image, a third.
    assert accuracy(learned.model, ROTATED, trained_model(spec, record)) > 0.5


def test_an_adapter_learns_other_answers_in_rows_of_their_own(learned, tmp_path):
    spec = media_spec(
        tmp_path, "unpacked", learned.model, write_shapes(tmp_path, 600, answers=ROTATED),
        adapter={"type": "lora", "r": 8}, training={"steps": 45, "micro_batch_size": 32}, optimizer={"lr": 1e-2},
    )  # fmt: skip
    record = train_spec(spec)
    assert accuracy(learned.model, ROTATED, trained_model(spec, record)) > 0.6


def test_preferences_about_images_are_learned(learned, tmp_path):
    """Each answer is better than one of the others and worse than one. Their rewards, if they were the same for all
    images, could differ by 0 on average at best, which is a loss of log 2.
    """
    source = write_shapes(tmp_path, 300)
    pairs = []
    for row in map(json.loads, source.read_text().splitlines()):
        question, answer = row["messages"]
        better = ROTATED[SHAPES.index(answer["content"])]
        pairs.append({"prompt": [question], "chosen": [answer | {"content": better}], "rejected": [answer]})
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    spec = media_spec(
        tmp_path, "preferred", learned.model, source, objective={"type": "dpo"},
        data={"sequence_length": 96}, adapter={"type": "lora", "r": 8},
        training={"steps": 20, "micro_batch_size": 16}, optimizer={"lr": 1e-2}, tracking={"log_every": 1},
    )  # fmt: skip
    train_spec(spec)
    losses = [loss for _, loss, *_ in curve(spec)]
    assert losses[0] == pytest.approx(math.log(2)) and losses[-1] < 0.4


def trained_model(spec, record):
    """A run's model, with its adapter merged."""
    return build_trained_model(spec, collect_weights(RunFolder.of(spec), spec.adapter, record))


def test_two_processes_train_as_one_also_where_only_one_has_an_image(tmp_path):
    """Under ddp and fsdp, whose layers are gathered by all ranks; a part of LLaVA's tower is never used."""
    source = write_shapes(tmp_path, 12)
    texts = [{"messages": [{"role": role, "content": "circle"} for role in ("user", "assistant")]}] * 12
    source.write_text(source.read_text() + "".join(json.dumps(row) + "\n" for row in texts))
    common = {"tracking": {"log_every": 1}, "optimizer": {"lr": 1e-3}, "checkpoint": {"every": 9}}

    def run(family, name, processes, **changes):
        training = {"steps": 4, "micro_batch_size": 1, "gradient_accumulation_steps": 4 // processes}
        topology = {"nproc_per_node": processes}
        base = tmp_path / family.__name__
        name = f"{family.__name__}-{name}".replace("_", "-")
        return media_spec(tmp_path, name, base, source, training=training, topology=topology, **common, **changes)

    alone, others = {}, {}
    for family in (llava, qwen2_5_vl):
        family(tmp_path / family.__name__)
        alone[family] = run(family, "one", 1)
        others[family] = [run(family, kind, 2, parallel={"type": kind}) for kind in ("ddp", "fsdp")]
        train_spec(alone[family])
    launch(2, *(file_of(tmp_path, spec) for specs in others.values() for spec in specs))
    for family, specs in others.items():
        # Fewer rows at a time are padded to other lengths, which counts as tokens.
        losses = [(point[:4], point[-1]) for point in curve(alone[family])]
        for spec in specs:
            found = curve(spec)
            assert [point[-1] for point in found] == [targets for _, targets in losses]
            assert [point[:4] for point in found] == approx([point for point, _ in losses])
