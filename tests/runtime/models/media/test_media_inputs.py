"""What a model that takes audio gets of a batch of rows, against transformers on the output of its own processor."""

import random

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMultimodalLM, AutoProcessor

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.kernels import Kernels
from tasks.runtime.data import collate
from tasks.runtime.data.dataset import TOKENIZER
from tasks.runtime.data.media.media_processor import copy_processor, saved_processor
from tasks.runtime.export.check_folder import difference, media_results
from tasks.runtime.models.attention.packing_support import learned_position_count
from tasks.runtime.models.attention.varlen_attention import (
    has_varlen_attention,
    set_varlen_attention,
    uses_varlen,
    with_cu_seqlens,
)
from tasks.runtime.models.build import build_model
from tasks.runtime.models.media.media_inputs import sample_inputs, with_model_inputs
from tasks.runtime.objectives.objective import model_inputs
from tasks.runtime.objectives.training_step import build_training_step
from tests.runtime.helpers.audio_models import FAMILIES, samples_of, tone
from tests.runtime.helpers.media_rows import by_number, files_of, packed, prepare_rows

ASKED = ("How high?", "And this?", "And this?")
SAID = ("low", "middle", "high")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """The model's folder, its spec and the prepared data of chats with one audio, with none, and with two."""
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder / "model", hidden=32)
    draw = random.Random(4)
    for note in SAID:
        (folder / f"{note}.wav").write_bytes(tone(note, draw))
    turn = lambda number, mark="<audio>": [  # noqa: E731
        {"role": "user", "content": f"{mark}{ASKED[number]}"}, {"role": "assistant", "content": SAID[number]},
    ]  # fmt: skip
    rows = [
        {"messages": turn(0), "audios": ["low.wav"]},
        {"messages": turn(0, "")},
        {"messages": [*turn(1), *turn(2)], "audios": ["middle.wav", "high.wav"]},
    ]
    data = prepare_rows(folder, folder / "model", rows, sequence_length=1024)
    spec = RunSpec.model_validate({
        "model": {"name": str(folder / "model")}, "kernels": {"enabled": False},
        "data": {"source": str(folder / "rows.jsonl"), "packing": False, "sequence_length": 1024},
    })  # fmt: skip
    return request.param, folder / "model", spec, data, by_number(data)


def inputs_of(folder, row):
    """What the family's own processor makes of the row's chat."""
    processor, sounds = AutoProcessor.from_pretrained(folder), [samples_of(file) for file in files_of(row)]
    numbers = (1, 2) if len(sounds) == 2 else (0,)
    heard = [{"type": "audio"}] * bool(sounds)
    chat = [
        {"role": role, "content": [*heard * (role == "user"), {"type": "text", "text": t}]}
        for number in numbers for role, t in (("user", ASKED[number]), ("assistant", SAID[number]))
    ]  # fmt: skip
    text = processor.tokenizer.apply_chat_template(chat, tokenize=False)
    if type(processor).__name__ != "VoxtralProcessor":
        return processor(text=[text], audio=sounds or None, sampling_rate=16_000, return_tensors="pt")
    # It reads audio through mistral-common alone, which writes 12.5 tokens a second of what is filled up to 30.
    inputs = processor.tokenizer(text.replace("[AUDIO]", "[AUDIO]" * 375), return_tensors="pt")
    if sounds:
        options = {"sampling_rate": 16_000, "padding": True, "truncation": False, "pad_to_multiple_of": 480_000}
        features = [processor.feature_extractor(sound, return_tensors="pt", **options) for sound in sounds]
        inputs["input_features"] = torch.cat([one["input_features"] for one in features])
    return inputs


def plain_loss(folder, row):
    """The sum of the row's loss, as transformers computes it of the output of its processor; and the gradients."""
    model = AutoModelForMultimodalLM.from_pretrained(folder).eval()
    inputs = inputs_of(folder, row)
    length = row["input_ids"].numel()
    assert inputs["input_ids"][0, :length].tolist() == row["input_ids"].tolist()
    loss = cross_entropy(model(**inputs).logits[0, : length - 1], row["labels"][1:], reduction="sum")
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kernels", [False, "auto"], ids=["plain", "kernels"])
@pytest.mark.parametrize("which", [0, 2], ids=["one audio", "two audios"])
def test_a_step_has_the_loss_and_gradients_of_plain_transformers(family, which, kernels):
    _, folder, spec, data, rows = family
    spec = spec.model_copy(update={"kernels": Kernels(enabled=kernels)})
    expected, gradients = plain_loss(folder, rows[which])
    model = build_model(spec.model, spec.seed)
    step = build_training_step(model, spec, torch.device("cpu"), data)
    loss = step.objective.micro_batch_loss(model.train(), step.collate([rows[which]]), torch.tensor(1)).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        # transformers lets positions learn that the class has frozen.
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)
    assert any("audio_tower" in name and gradient.any() for name, gradient in gradients.items() if gradient is not None)
    if kernels:
        assert step.patched.counts.keys() >= {"rms_norm", "layer_norm", "rope", "swiglu", "linear_cross_entropy"}


def test_rows_of_a_batch_do_not_change_each_other(family):
    """A row without audio has the logits of plain transformers beside others."""
    _, folder, spec, data, rows = family
    model = build_model(spec.model, spec.seed).eval()
    together = with_model_inputs(collate, model, data)
    with torch.no_grad():
        logits = model(**model_inputs(together(list(rows)))).logits
        for index, row in enumerate(rows):
            plain = AutoModelForMultimodalLM.from_pretrained(folder).eval()(**inputs_of(folder, row)).logits[0]
            length = row["input_ids"].numel()
            torch.testing.assert_close(logits[index, :length], plain[:length], rtol=1e-4, atol=1e-5)


def test_chats_of_a_packed_row_are_kept_apart(family):
    """Each has the logits that it has alone, and no gradient from one to the audio of another."""
    _, _, spec, data, rows = family
    model = build_model(spec.model, spec.seed).eval()
    made = with_model_inputs(collate, model, data)
    inputs = model_inputs(made([packed(rows)]))
    features = inputs["input_features"].requires_grad_()
    logits = model(**inputs).logits[0]
    ends = torch.tensor([row["input_ids"].numel() for row in rows]).cumsum(0).tolist()
    for row, end in zip(rows, ends, strict=True):
        length = row["input_ids"].numel()
        with torch.no_grad():
            alone = model(**model_inputs(made([row]))).logits[0, :length]
        torch.testing.assert_close(logits[end - length : end], alone, rtol=1e-4, atol=1e-5)
    for begin, end, own in ((0, ends[0], [0]), (ends[0], ends[1], []), (ends[1], ends[2], [1, 2])):
        (gradient,) = torch.autograd.grad(logits[begin:end].square().sum(), features, retain_graph=True)
        assert [number for number, one in enumerate(gradient) if one.any()] == own


def test_packed_chats_train_by_document_as_under_masks(family):
    _, _, spec, data, rows = family
    model = build_model(spec.model, spec.seed).eval()
    in_half = spec.model.model_copy(update={"dtype": "bfloat16"})
    assert uses_varlen(in_half, spec.parallel, model.config, torch.device("cuda"))
    made, some = with_model_inputs(collate, model, data), [packed(rows)]
    expected = model(**model_inputs(made(some))).logits
    set_varlen_attention(model)
    assert has_varlen_attention(model)
    torch.testing.assert_close(model(**model_inputs(with_cu_seqlens(made)(some))).logits, expected)


def test_a_batch_without_audio_runs_the_tower_and_learns_nothing_of_it(family):
    _, _, spec, data, rows = family
    model = build_model(spec.model, spec.seed)
    step = build_training_step(model, spec, torch.device("cpu"), data)
    step.objective.micro_batch_loss(model.train(), step.collate([rows[1]]), torch.tensor(1)).loss.backward()
    tower = [p for name, p in model.named_parameters() if "language_model" not in name and "lm_head" not in name]
    learns = [parameter.grad for parameter in tower if parameter.requires_grad]
    assert learns and all(gradient is not None and not gradient.any() for gradient in learns)


def test_a_prompt_with_audio_has_the_logits_of_plain_transformers(family):
    """As an evaluation asks it, where no batch is made."""
    _, folder, spec, data, rows = family
    model = build_model(spec.model, spec.seed).eval()
    processor = saved_processor(data.folder / TOKENIZER, data.tokenizer())
    for row in (rows[0], rows[2]):
        ids = row["input_ids"][None]
        with torch.no_grad():
            logits = model(input_ids=ids, **sample_inputs(processor, model, ids, files_of(row))).logits[0]
            plain = AutoModelForMultimodalLM.from_pretrained(folder).eval()(**inputs_of(folder, row)).logits[0]
        torch.testing.assert_close(logits, plain[: ids.shape[1]], rtol=1e-4, atol=1e-5)


def test_what_an_export_compares_depends_on_the_encoder(family):
    _, folder, _, _, _ = family
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    expected = media_results(model, folder)
    text = {"input_ids": torch.ones(1), "logits": torch.ones(1)}
    assert difference(text | expected, text | media_results(model, folder)) is None
    with torch.no_grad():
        model.model.audio_tower.conv1.weight.mul_(1.1)
    told = difference(text | expected, text | media_results(model, folder))
    assert "logits of a picture or a sound differ" in told


def test_learned_positions_of_the_encoder_are_no_limit_of_texts(family):
    _, _, spec, _, _ = family
    assert learned_position_count(build_model(spec.model, spec.seed)) is None


def test_a_saved_processor_that_is_damaged_says_what_to_do(family, tmp_path):
    _, _, _, data, _ = family
    copy_processor(data.folder / TOKENIZER, tmp_path)
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ValueError, match=f"the processor in {tmp_path} cannot be loaded: .*; delete the folder"):
        saved_processor(tmp_path, data.tokenizer())
