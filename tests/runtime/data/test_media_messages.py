"""Rows with audio: every form that the page shows, held against what transformers' own processor makes of them."""

import base64
import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoProcessor

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.data.dataset import MEDIA_COLUMNS
from tests.runtime.data.test_formats import TEXT, forms, one_renderer  # noqa: F401
from tests.runtime.helpers.audio_models import qwen2_audio, tone
from tests.runtime.helpers.vision_models import llava

FORMS = forms("## Rows with audio")
FILES = {"a.wav": tone("low", random.Random(1), 0.3), "b.wav": tone("high", random.Random(2), 0.6)}
ASKED = [{"role": "user", "content": "<audio>Which?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return qwen2_audio(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture
def prepared(tmp_path, model):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)

    def prepared(rows, name="rows.jsonl", model=model, **data):
        if name.endswith(".jsonl"):
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = RunSpec.model_validate({
            "model": {"name": str(model)},
            "data": {"source": str(tmp_path / name), "packing": False, "validation_fraction": 0} | data,
        })  # fmt: skip
        recipe = DataRecipe.from_spec(spec, fingerprint(spec))
        return prepare(recipe, tmp_path / "data" / recipe.hash(), report=print, processes=1)

    return prepared


def files_of(row):
    content, sizes, _ = (row[name] for name in MEDIA_COLUMNS)
    return [file.numpy().tobytes() for file in content.split(sizes.tolist())]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_is_read_and_learned_as_the_page_shows(form, prepared):
    # The page's bytes are the beginning of a file.
    row = json.loads(json.dumps(form.row).replace("UklGRg==", base64.b64encode(FILES["a.wav"]).decode()))
    data = prepared([row])
    row, tokenizer = data.train[0], data.tokenizer()
    shown = TEXT.findall(form.shown)
    whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, _, text in shown)
    read = re.sub(r"<\|audio_bos\|>(<\|AUDIO\|>)+<\|audio_eos\|>\n", "<audio>", tokenizer.decode(row["input_ids"]))
    assert read in (whole, whole.removesuffix("\n"))
    assert tokenizer.decode(row["labels"][row["labels"] != -100]) == "4<|im_end|>"
    assert files_of(row) == [*FILES.values()][: whole.count("<audio>")]
    # 25 tokens a second of what the processor hears, in frames of 10 ms.
    frames = [-(-(len(file) - 44) // 2 // 160) for file in files_of(row)]
    audio = AutoProcessor.from_pretrained(data.folder / "tokenizer").audio_token_id
    assert (row["input_ids"] == audio).sum() == sum((((n - 1) // 2 + 1) - 2) // 2 + 1 for n in frames)


def test_bytes_in_parquet_are_kept_as_they_are_and_carry_no_loss(prepared, tmp_path):
    """As datasets' feature Audio stores them."""
    files = [tone("low", random.Random(number)) for number in range(4)]
    table = {
        "question": [f"Which {number}?" for number in range(4)],
        "answer": [str(number) for number in range(4)],
        "audio": [{"bytes": file, "path": f"{number}.wav"} for number, file in enumerate(files)],
    }
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    data = prepared([], name="rows.parquet", packing=True, sequence_length=96, train_on="all")
    assert len(data.train) < 4 == data.manifest.train.media
    assert sorted(file for row in data.train for file in files_of(row)) == sorted(files)
    audio = AutoProcessor.from_pretrained(data.folder / "tokenizer").audio_token_id
    for row in data.train:
        assert (row["labels"][row["input_ids"] == audio] == -100).all()


def test_what_is_cut_or_skipped_is_counted(prepared, tmp_path, capsys):
    (tmp_path / "none.wav").write_bytes(b"RIFF")
    rows = [{"messages": ASKED, "audios": [name]} for name in ("a.wav", "b.wav", "none.wav")]
    manifest = prepared(rows, invalid="skip", audio_max_seconds=0.45).manifest
    assert manifest.samples_used == 1
    assert manifest.skipped == {"invalid": 1, "no_target": 0, "overlong": 0, "image_size": 0, "audio_length": 1}
    assert "1 skipped (with an audio that is shorter or longer than allowed)" in capsys.readouterr().out
    assert prepared(rows[:2], audio_max_seconds=0.45, overlong="truncate").manifest.samples_used == 2
    assert "2 audios read, 1 cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"messages": ASKED, "audios": ["a.wav"] * 2}, "column 'audios' has 2 audios, but the messages have 1 places"),
        ({"messages": ASKED, "audios": ["none.wav"]}, "line 1: audio 'none.wav' cannot be read"),
        ({"messages": ASKED, "audios": [None]}, "audio 1 of column 'audios' is null"),
        ({"messages": ASKED, "audios": ["rows.jsonl"]}, "audio 'rows.jsonl': no sound that is read"),
        ({"messages": [{"role": "user", "content": "\U000ffffc"}, ASKED[1]]}, r"U\+FFFFC, which stands for audios"),
        (
            {"prompt": "Which?", "completion": "4", "audio": "a.wav"},
            "column 'audio' holds str 'a.wav'; it holds audio, and",
        ),
        ({"messages": ASKED, "images": ["a.png"]}, "the data has images, but model.name .* has no processor of images"),
    ],
)
def test_a_row_that_does_not_fit_is_told(row, problem, prepared):
    with pytest.raises(ValueError, match=problem):
        prepared([row])


def test_a_model_of_images_or_texts_is_named(prepared, tmp_path):
    rows = [{"messages": ASKED, "audios": ["a.wav"]}]
    with pytest.raises(ValueError, match=r"the data has audios, .* has no processor of audios \(it has a LlavaProc"):
        prepared(rows, model=llava(tmp_path / "llava", hidden=32))
    with pytest.raises(ValueError, match="line 1: the row has audios, but the model is no model that takes audio"):
        prepared(rows, model="tiny-llama")
