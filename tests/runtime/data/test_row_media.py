"""Rows with images: every form that the page shows, held against what transformers' own processor makes of them."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, pipeline, prepare
from tasks.runtime.data.dataset import MEDIA_COLUMNS
from tasks.runtime.data.image_files import open_picture, png_of
from tests.runtime.data.test_formats import TEXT, forms, one_renderer  # noqa: F401
from tests.runtime.helpers.vision_models import qwen2_5_vl, smolvlm

FORMS = forms("## Rows with images")
SIZES = {"a.png": (32, 16), "b.png": (16, 16)}
ASKED = [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return qwen2_5_vl(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture
def prepared(tmp_path, model):
    for name, size in SIZES.items():
        Image.new("RGB", size, (200, 30, 90)).save(tmp_path / name)

    def prepared(rows, objective="sft", name="rows.jsonl", **data):
        if name.endswith(".jsonl"):
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = RunSpec.model_validate({
            "model": {"name": str(model)}, "objective": {"type": objective},
            "data": {"source": str(tmp_path / name), "packing": False, "validation_fraction": 0} | data,
        })  # fmt: skip
        recipe = DataRecipe.from_spec(spec, fingerprint(spec))
        return prepare(recipe, tmp_path / "data" / recipe.hash(), report=print, processes=1)

    return prepared


def images_of(row):
    content, sizes, _ = (row[name] for name in MEDIA_COLUMNS)
    return [open_picture(image.numpy().tobytes()) for image in content.split(sizes.tolist())]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_is_read_and_learned_as_the_page_shows(form, prepared):
    data = prepared([form.row], form.objective)
    row, tokenizer = data.train[0], data.tokenizer()
    shown = TEXT.findall(form.shown)
    whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, _, text in shown).replace("\\n", "\n")
    read = re.sub(
        r"<\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>", "<image>", tokenizer.decode(row["input_ids"])
    )
    assert read == whole.removesuffix("\n") or read == whole
    learned = "".join(f"{text}<|im_end|>" for _, bold, text in shown if bold)
    assert tokenizer.decode(row["labels"][row["labels"] != -100]) == learned
    assert [image.size for image in images_of(row)] == [(32, 16), (16, 16)][
        : len(images_of(row)) // len(shown[1::2])
    ] * len(shown[1::2])
    assert data.manifest.train.media == whole.count("<image>")


def test_the_tokens_are_those_of_the_models_own_processor(prepared, model):
    """For images of several sizes in one row, the processor's output on the same messages is what training reads."""
    question = [
        {"type": "text", "text": "Is "},
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": "b.png"},
    ]
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    row = prepared([{"messages": chat}]).train[0]
    processor = AutoProcessor.from_pretrained(model)
    whole = processor(
        text=[processor.apply_chat_template(chat)], images=[images_of(row)], return_tensors="pt"
    )["input_ids"][0]  # fmt: skip
    # Two of four patches of 4 pixels to a token, each way.
    assert (row["input_ids"] == processor.image_token_id).sum() == (32 * 16 + 16 * 16) // 64
    assert row["input_ids"].tolist() == whole[: row["input_ids"].numel()].tolist()


def test_image_tokens_carry_no_loss_even_where_all_tokens_do(prepared, model):
    row = prepared([{"messages": ASKED, "images": ["a.png"]}], train_on="all").train[0]
    stands = row["input_ids"] == AutoProcessor.from_pretrained(model).image_token_id
    assert stands.any()
    assert (row["labels"][stands] == -100).all()
    assert (row["labels"][~stands][1:] != -100).all()


def test_bytes_in_parquet_are_kept_as_they_are(prepared, tmp_path):
    content = [png_of(Image.new("RGB", (16, 16), (number, 0, 0))) for number in range(5)]
    table = {
        "question": [f"Which {number}?" for number in range(5)],
        "answer": [str(number) for number in range(5)],
        "images": [[{"bytes": image, "path": None}] for image in content],
    }
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    data = prepared([], name="rows.parquet", packing=True, sequence_length=64)
    found = {row["media"].numpy().tobytes() for row in data.train}
    assert len(data.train) < 5
    assert b"".join(sorted(b"".join(found).split(b"\x89PNG"))) == b"".join(sorted(b"".join(content).split(b"\x89PNG")))


def test_prepared_parts_have_the_images_of_the_whole(prepared, monkeypatch):
    rows = [{"messages": ASKED, "images": [name]} for name in ("a.png", "b.png") * 20]
    whole = prepared(rows)
    monkeypatch.setattr(pipeline, "PART_BYTES", 2000)
    parts = prepared(rows, name="other.jsonl")
    assert len(parts.manifest.train.shards) > 1
    assert parts.manifest.train.media == whole.manifest.train.media == 40

    def all_of(data):
        return sorted((tuple(row["input_ids"].tolist()), row["media"].numpy().tobytes()) for row in data.train)

    assert all_of(parts) == all_of(whole)


@pytest.mark.parametrize(
    "row, problem",
    [
        (
            {"messages": ASKED, "images": ["a.png", "b.png"]},
            "column 'images' has 2 images, but the messages have 1 places",
        ),
        ({"messages": ASKED, "images": ["none.png"]}, "line 1: image 'none.png' cannot be read"),
        ({"messages": ASKED, "images": [None]}, "image 1 of column 'images' is null"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASKED[1]]},
            "there is no column of images, but the messages have 1 places",
        ),
        ({"messages": [{"role": "user", "content": "\U000ffffd"}, ASKED[1]]}, r"U\+FFFFD"),
        ({"prompt": "Which?", "completion": "4", "images": ["a.png"]}, "column 'images' holds"),
    ],
)
def test_a_row_that_does_not_fit_is_told(row, problem, prepared):
    with pytest.raises(ValueError, match=problem):
        prepared([row])


def test_rows_with_bad_images_are_skipped_and_counted(prepared):
    rows = [{"messages": ASKED, "images": [name]} for name in ("a.png", "none.png", "b.png")]
    manifest = prepared(rows, invalid="skip", image_min_pixels=300).manifest
    assert manifest.samples_used == 1
    assert manifest.skipped == {"invalid": 1, "no_target": 0, "overlong": 0, "image_size": 1, "audio_length": 0}


def test_no_image_is_cut_by_a_row_that_is_too_short(prepared):
    late = [{"role": "user", "content": "Which? " * 10 + "<image>"}, ASKED[1]]
    rows = [{"messages": late, "images": ["a.png"]}, {"messages": [*ASKED, *ASKED * 20], "images": ["b.png"] * 21}]
    early = [*ASKED, *[{"role": "user", "content": "And?"}, ASKED[1]] * 20]
    rows.append({"messages": early, "images": ["a.png"]})
    data = prepared(rows, sequence_length=60, overlong="truncate")
    assert (data.manifest.skipped["overlong"], data.manifest.truncated, data.manifest.train.media) == (2, 1, 1)
    assert data.train[0]["input_ids"].numel() == 60


def test_text_that_looks_like_an_image_stays_text(prepared, model):
    chat = [{"role": "user", "content": "<image>What is <|image_pad|>?"}, ASKED[1]]
    data = prepared([{"messages": chat, "images": ["b.png"]}, {"messages": ASKED}])
    image = AutoProcessor.from_pretrained(model).image_token_id
    first, second = sorted(data.train, key=lambda row: "media" not in row)
    assert (first["input_ids"] == image).sum() == 4
    # A mark in a row without images.
    assert "<image>" in data.tokenizer().decode(second["input_ids"])


def test_a_model_of_texts_is_named(tmp_path, prepared):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "a.png", "question": "Which?", "answer": "4"}))
    spec = RunSpec.model_validate({"data": {"source": str(tmp_path / "rows.jsonl")}})
    with pytest.raises(ValueError, match="line 1: the row has images, but the model is no vision-language model"):
        prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "out", report=print)
    ignored = RunSpec.model_validate({"data": {"source": str(tmp_path / "rows.jsonl"), "ignore_columns": ["image"]}})
    data = prepare(DataRecipe.from_spec(ignored, fingerprint(ignored)), tmp_path / "out", report=print)
    assert torch.is_tensor(data.train[0]["input_ids"]) and "media" not in data.train[0]


def test_a_package_that_the_models_processor_lacks_is_named(tmp_path, monkeypatch):
    """SmolVLM's, whose other packages are those of all models."""
    smolvlm(tmp_path / "model", hidden=32)
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": ASKED, "images": ["a.png"]}) + "\n")
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    spec = RunSpec.model_validate({
        "model": {"name": str(tmp_path / "model")}, "data": {"source": str(tmp_path / "rows.jsonl")},
    })  # fmt: skip
    needs = "needs a package that is not installed: .*`num2words`.*; install it, or name the column of images"
    with pytest.raises(ValueError, match=needs):
        prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "data", report=print, processes=1)
