"""Rows with images or audio: every form that the pages show, held against what transformers' own processor makes of
them.
"""

import base64
import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.data.media.image_files import open_picture, png_of
from tasks.runtime.data.preparation import pipeline
from tests.runtime.data.formats.test_formats import TEXT, forms
from tests.runtime.helpers.audio_models import qwen2_audio, tone
from tests.runtime.helpers.media_rows import asked, files_of, prepare_rows
from tests.runtime.helpers.vision_models import llava, qwen2_5_vl, smolvlm

FORMS = forms("data-formats-media.md", "Rows with images")
SIZES = {"a.png": (32, 16), "b.png": (16, 16)}
ASKED = asked("<image>")
HEARD_FORMS = forms("data-formats-media.md", "Rows with audio")
SOUNDS = {"a.wav": tone("low", random.Random(1), 0.3), "b.wav": tone("high", random.Random(2), 0.6)}
HEARD = asked("<audio>")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return qwen2_5_vl(tmp_path_factory.mktemp("vision"), hidden=32)


@pytest.fixture(scope="module")
def audio_model(tmp_path_factory):
    return qwen2_audio(tmp_path_factory.mktemp("audio"), hidden=32)


@pytest.fixture
def prepared(tmp_path, model):
    """Prepares rows for a model that takes images, which lie beside them."""
    for name, size in SIZES.items():
        Image.new("RGB", size, (200, 30, 90)).save(tmp_path / name)
    return lambda rows, objective="sft", model=model, **data: prepare_rows(tmp_path, model, rows, objective, **data)


@pytest.fixture
def heard(tmp_path, audio_model):
    """Prepares rows for a model that takes audio, which lies beside them."""
    for name, content in SOUNDS.items():
        (tmp_path / name).write_bytes(content)
    return lambda rows, model=audio_model, **data: prepare_rows(tmp_path, model, rows, **data)


def images_of(row):
    return [open_picture(file) for file in files_of(row)]


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
    data = prepared(None, name="rows.parquet", packing=True, sequence_length=64)
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
        ({"messages": ASKED, "images": []}, "column 'images' has no images, but the messages have 1 places for them"),
        ({"messages": ASKED, "image": None}, "column 'image' has no images, but the messages have 1 places for them"),
        ({"messages": ASKED, "images": ["none.png"]}, "line 1: image 'none.png' cannot be read"),
        ({"messages": ASKED, "images": [None]}, "image 1 of column 'images' is null"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASKED[1]]},
            "there is no column of images, but the messages have 1 places",
        ),
        ({"messages": [{"role": "user", "content": "\U000ffffd"}, ASKED[1]]}, r"U\+FFFFD"),
        ({"prompt": "Which?", "completion": "4", "images": ["a.png"]}, "column 'images' holds"),
        (
            {"messages": [ASKED[0] | {"images": ["a.png"]}, ASKED[1]]},
            "message 1 has 'images', a key that is not read; give the images as parts of the content, or in a column "
            "'images' of the row, or name 'images' in data.ignore_columns",
        ),
        ({"messages": [ASKED[0] | {"videos": ["a.mp4"]}, ASKED[1]]}, "message 1 has 'videos', .*not supported"),
    ],
)
def test_a_row_that_does_not_fit_is_told(row, problem, prepared):
    with pytest.raises(ValueError, match=problem):
        prepared([row])


def test_a_key_of_messages_that_is_empty_or_ignored_changes_nothing(prepared):
    """Columnar files give every message the keys of all."""
    plain = prepared([{"messages": ASKED, "images": ["a.png"]}]).train[0]
    chat = [ASKED[0] | {"images": [], "audio": None}, ASKED[1]]
    ignored = [ASKED[0] | {"audios": ["a.wav"]}, ASKED[1]]
    for messages, fields in ((chat, {}), (ignored, {"ignore_columns": ["audios"]})):
        row = prepared([{"messages": messages, "images": ["a.png"]}], **fields).train[0]
        assert row["input_ids"].tolist() == plain["input_ids"].tolist()


def test_rows_with_bad_images_are_skipped_and_counted(prepared):
    rows = [{"messages": ASKED, "images": [name]} for name in ("a.png", "none.png", "b.png")]
    manifest = prepared(rows, invalid="skip", image_min_pixels=300).manifest
    assert manifest.samples_used == 1
    assert manifest.skipped == {"invalid": 1, "no_target": 0, "overlong": 0, "image_size": 1, "audio_length": 0}


def test_a_row_whose_image_the_processor_refuses_is_told_and_skipped(prepared, tmp_path):
    """Qwen's takes none that is more than 200 times as wide as high."""
    Image.new("RGB", (900, 2)).save(tmp_path / "line.png")
    rows = [{"messages": ASKED, "images": [name]} for name in ("a.png", "line.png")]
    told = "line 2: the processor of the model refuses the row.s images: .*ratio.*; correct it"
    with pytest.raises(ValueError, match=told):
        prepared(rows)
    assert prepared(rows, invalid="skip").manifest.skipped["invalid"] == 1


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


@pytest.mark.parametrize("form", HEARD_FORMS.values(), ids=HEARD_FORMS)
def test_a_form_with_audio_is_read_and_learned_as_the_page_shows(form, heard):
    # The page's bytes are the beginning of a file.
    row = json.loads(json.dumps(form.row).replace("UklGRg==", base64.b64encode(SOUNDS["a.wav"]).decode()))
    data = heard([row])
    row, tokenizer = data.train[0], data.tokenizer()
    shown = TEXT.findall(form.shown)
    whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, _, text in shown)
    read = re.sub(r"<\|audio_bos\|>(<\|AUDIO\|>)+<\|audio_eos\|>\n", "<audio>", tokenizer.decode(row["input_ids"]))
    assert read in (whole, whole.removesuffix("\n"))
    assert tokenizer.decode(row["labels"][row["labels"] != -100]) == "4<|im_end|>"
    assert files_of(row) == [*SOUNDS.values()][: whole.count("<audio>")]
    # 25 tokens a second of what the processor hears, in frames of 10 ms.
    frames = [-(-(len(file) - 44) // 2 // 160) for file in files_of(row)]
    audio = AutoProcessor.from_pretrained(data.folder / "tokenizer").audio_token_id
    assert (row["input_ids"] == audio).sum() == sum((((n - 1) // 2 + 1) - 2) // 2 + 1 for n in frames)


def test_audio_in_parquet_is_kept_as_it_is_and_carries_no_loss(heard, tmp_path):
    """As datasets' feature Audio stores them."""
    files = [tone("low", random.Random(number)) for number in range(4)]
    table = {
        "question": [f"Which {number}?" for number in range(4)],
        "answer": [str(number) for number in range(4)],
        "audio": [{"bytes": file, "path": f"{number}.wav"} for number, file in enumerate(files)],
    }
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    data = heard(None, name="rows.parquet", packing=True, sequence_length=96, train_on="all")
    assert len(data.train) < 4 == data.manifest.train.media
    assert sorted(file for row in data.train for file in files_of(row)) == sorted(files)
    audio = AutoProcessor.from_pretrained(data.folder / "tokenizer").audio_token_id
    for row in data.train:
        assert (row["labels"][row["input_ids"] == audio] == -100).all()


def test_audio_that_is_cut_or_skipped_is_counted(heard, tmp_path, capsys):
    (tmp_path / "none.wav").write_bytes(b"RIFF")
    rows = [{"messages": HEARD, "audios": [name]} for name in ("a.wav", "b.wav", "none.wav")]
    manifest = heard(rows, invalid="skip", audio_max_seconds=0.45).manifest
    assert manifest.samples_used == 1
    assert manifest.skipped == {"invalid": 1, "no_target": 0, "overlong": 0, "image_size": 0, "audio_length": 1}
    assert "1 skipped (with an audio that is shorter or longer than allowed)" in capsys.readouterr().out
    assert heard(rows[:2], audio_max_seconds=0.45, overlong="truncate").manifest.samples_used == 2
    assert "2 audios read, 1 cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"messages": HEARD, "audios": ["a.wav"] * 2}, "column 'audios' has 2 audios, but the messages have 1 places"),
        ({"messages": HEARD, "audios": ["none.wav"]}, "line 1: audio 'none.wav' cannot be read"),
        ({"messages": HEARD, "audios": [None]}, "audio 1 of column 'audios' is null"),
        ({"messages": HEARD, "audios": ["rows.jsonl"]}, "audio 'rows.jsonl': not a known audio format"),
        ({"messages": [{"role": "user", "content": "\U000ffffc"}, HEARD[1]]}, r"U\+FFFFC, which stands for audios"),
        (
            {"prompt": "Which?", "completion": "4", "audio": "a.wav"},
            "column 'audio' holds str 'a.wav'; it holds audios, and",
        ),
        ({"messages": HEARD, "images": ["a.wav"]}, "the data has images, but model.name .* has no processor of images"),
    ],
)
def test_a_row_with_audio_that_does_not_fit_is_told(row, problem, heard):
    with pytest.raises(ValueError, match=problem):
        heard([row])


def test_a_model_without_audio_is_named(heard, tmp_path):
    rows = [{"messages": HEARD, "audios": ["a.wav"]}]
    with pytest.raises(ValueError, match=r"the data has audios, .* has no processor of audios \(it has a LlavaProc"):
        heard(rows, model=llava(tmp_path / "llava", hidden=32))
    with pytest.raises(ValueError, match="line 1: the row has audios, but the model is no model that takes audio"):
        heard(rows, model="tiny-llama")
