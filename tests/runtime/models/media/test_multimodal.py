"""What a vision-language model gets of a batch of rows, against transformers on the output of its own processor."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoProcessor

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.model import Lora
from tasks.runtime.data import PreparedData, collate, collate_flat, fingerprint, prepare
from tasks.runtime.data.dataset import TOKENIZER
from tasks.runtime.data.loader import training_loader
from tasks.runtime.data.media.image_files import open_picture
from tasks.runtime.data.media.media_packing import MEDIA_PACKING
from tasks.runtime.data.media.media_processor import saved_processor
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.adapters.quantization import quantize_linear_layers
from tasks.runtime.models.attention.varlen_attention import (
    has_varlen_attention,
    plain_attention,
    set_varlen_attention,
    uses_varlen,
    with_cu_seqlens,
)
from tasks.runtime.models.build import build_model, move_to_device, require_embeddings
from tasks.runtime.models.config import BROKEN_IN
from tasks.runtime.models.media.cross_attention import has_cross_attention
from tasks.runtime.models.media.media_inputs import with_model_inputs
from tasks.runtime.models.media.multimodal import require_media_support, require_planned_media_support
from tasks.runtime.objectives.objective import model_inputs
from tasks.runtime.objectives.training_step import build_training_step
from tasks.runtime.process.ranks import Processes
from tests.runtime.helpers import vision_models
from tests.runtime.helpers.media_rows import by_number, files_of, packed
from tests.runtime.helpers.pictures import SHAPES, picture

# Of a processor, about numpy.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",
    # InternVL's processor of transformers before 5.23.
    "ignore:__array_wrap__ must accept:DeprecationWarning",
)
# Families whose models and processors are made here from scratch.
FAMILIES = vision_models.FAMILIES


def rows_of(folder, family):
    """Chats with one image, with none, and with two of other sizes in two turns."""
    draw = random.Random(4)
    for number, size in enumerate((32, 16, 48)):
        picture(SHAPES[number], draw, size).save(folder / f"{number}.png")
    ask = lambda text, *images: {  # noqa: E731
        "role": "user",
        "content": [*({"type": "image", "image": f"{image}.png"} for image in images), {"type": "text", "text": text}],
    }
    say = lambda text: {"role": "assistant", "content": text}  # noqa: E731
    turns = [ask("And this?", 1), say("triangle"), ask("And this?", 2), say("cross")]
    if family == "paligemma":
        # Its processor has one question with its answer.
        turns = [ask("And these?", 1, 2), say("triangle, cross")]
    chats = [
        [ask("What shape is this?", 0), say("circle")],
        [ask("What shape?"), say("none")],
        turns,
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request, tmp_path_factory):
    """The model's folder, its spec and the prepared data of three chats, one to a row."""
    if BROKEN_IN.get(request.param) == transformers.__version__:
        pytest.skip(f"transformers {transformers.__version__} cannot run it")
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder / "model")
    rows_of(folder, request.param)
    spec = RunSpec.model_validate({
        "model": {"name": str(folder / "model")}, "kernels": {"enabled": False},
        "data": {"source": str(folder / "rows.jsonl"), "packing": False, "validation_fraction": 0},
    })  # fmt: skip
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return request.param, folder / "model", spec, prepare(recipe, folder / "data", report=print)


def plain_loss(folder, row, change=lambda model: None):
    """The sum of the row's loss, as transformers computes it of the output of its processor; and the gradients."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    change(model)
    inputs = vision_models.inputs_of(processor, [open_picture(image) for image in files_of(row)])
    ids = inputs["input_ids"][0]
    assert ids[: row["input_ids"].numel()].tolist() == row["input_ids"].tolist()
    # Llama 4's processor gives bfloat16.
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    logits = model(**inputs).logits[0, : row["input_ids"].numel() - 1]
    loss = cross_entropy(logits, row["labels"][1:], reduction="sum")
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kernels", [False, "auto"], ids=["plain", "kernels"])
@pytest.mark.parametrize("which", [0, 2], ids=["one image", "two images"])
def test_a_step_has_the_loss_and_gradients_of_plain_transformers(family, which, kernels):
    _, folder, spec, data = family
    spec = spec.model_copy(update={"kernels": Kernels(enabled=kernels)})
    row = by_number(data)[which]
    expected, gradients = plain_loss(folder, row)
    model = build_model(spec.model, spec.seed).eval()
    step = build_training_step(model, spec, torch.device("cpu"), data)
    loss = step.objective.micro_batch_loss(model.eval(), step.collate([row]), torch.tensor(1)).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        if gradients[name] is not None:
            # Sums that cancel are as exact as their largest terms: Gemma 3's projector has gradients up to 1.5e4, and
            # of small ones transformers' own are 2e-3 off those in fp64.
            atol = 1e-6 * max(10.0, gradients[name].abs().max().item())
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=atol, msg=name)
    assert any("lang" not in name and gradient.any() for name, gradient in gradients.items() if gradient is not None)


def test_rows_of_a_batch_do_not_change_each_other(family):
    """Padded to the longest row, with images of other sizes beside them, each row has the logits that it has alone; a
    row without images those of plain transformers.
    """
    name, folder, spec, data = family
    model = build_model(spec.model, spec.seed).eval()
    rows = by_number(data)
    together = with_model_inputs(collate, model, data)
    logits = model(**model_inputs(together(list(rows)))).logits
    for index, row in enumerate(rows):
        alone = model(**model_inputs(together([row]))).logits[0]
        length = row["input_ids"].numel()
        torch.testing.assert_close(logits[index, :length], alone[:length], rtol=1e-4, atol=1e-5)
    text = rows[1]
    prompt = {"token_type_ids": (text["labels"] > 0).long()[None]} if name == "paligemma" else {}
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()(input_ids=text["input_ids"][None], **prompt)
    torch.testing.assert_close(logits[1, : text["labels"].numel()], plain.logits[0], rtol=1e-4, atol=1e-5)


def test_chats_of_a_packed_row_are_kept_apart(family):
    """Exactly for the families that may be packed: each chat's logits, and no gradient from one chat to another."""
    _, _, spec, data = family
    model = build_model(spec.model, spec.seed).eval()
    rows = by_number(data)
    made = with_model_inputs(collate, model, data)
    if has_cross_attention(model.config):
        pytest.skip("tokens before an image attend to all images of a row")
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    row = packed(rows)
    if chunk is not None and row["input_ids"].numel() > chunk and transformers.__version__ < "5.23":
        pytest.skip("transformers before 5.23 counts chunks from the start of a row: such rows are refused")
    inputs = model_inputs(made([row]))
    logits = model(**inputs).logits[0]
    ends = torch.tensor([row["input_ids"].numel() for row in rows]).cumsum(0).tolist()
    apart = True
    for row, end in zip(rows, ends, strict=True):
        length = row["input_ids"].numel()
        alone = model(**model_inputs(made([row]))).logits[0, :length]
        apart &= torch.allclose(logits[end - length : end], alone, rtol=1e-4, atol=1e-5)
    pixels = inputs["pixel_values"].requires_grad_()
    states = model(**inputs).logits[0, ends[0] : ends[1]]
    (gradient,) = torch.autograd.grad(states.square().sum(), pixels, allow_unused=True)
    apart &= gradient is None or not bool(gradient.any())
    assert apart == (model.config.model_type in MEDIA_PACKING)


def test_a_batch_without_images_runs_the_tower_and_learns_nothing_of_it(family):
    _, _, spec, data = family
    model = build_model(spec.model, spec.seed).eval()
    step = build_training_step(model, spec, torch.device("cpu"), data)
    batch = step.collate([by_number(data)[1]])
    step.objective.micro_batch_loss(model.eval(), batch, torch.tensor(1)).loss.backward()
    gradients = [parameter.grad for name, parameter in model.named_parameters() if "vision" in name or "visual" in name]
    # Of some towers, the last layer is not used.
    ran = [gradient for gradient in gradients if gradient is not None]
    assert len(ran) > len(gradients) / 2
    assert not any(gradient.any() for gradient in ran)


def test_rows_that_attend_by_flash_attention_are_one_row(family):
    _, _, spec, data = family
    model = build_model(spec.model, spec.seed).eval()
    if model.config.model_type not in MEDIA_PACKING:
        pytest.skip("rows share a batch's only row")
    rows = by_number(data)
    flat = model(**model_inputs(with_model_inputs(collate_flat, model, data)(list(rows)))).logits[0]
    row = model(**model_inputs(with_model_inputs(collate, model, data)([packed(rows)]))).logits[0]
    torch.testing.assert_close(flat, row)


def test_packed_chats_train_by_document_as_under_masks(family):
    """Where masks say no more than which chat a token is of; the tower attends as before."""
    _, _, spec, data = family
    model = build_model(spec.model, spec.seed).eval()
    kind = model.config.model_type
    in_half = spec.model.model_copy(update={"dtype": "bfloat16"})
    goes = uses_varlen(in_half, spec.parallel, model.config, torch.device("cuda"))
    assert goes == (kind in MEDIA_PACKING - {"gemma3", "gemma4", "paligemma", "llama4"})
    if not goes:
        return
    rows = by_number(data)
    made = with_model_inputs(collate, model, data)

    def gradients(batch):
        model.zero_grad()
        loss = model(**model_inputs(batch), labels=batch["labels"]).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    for some in ([packed(rows), rows[2]], [rows[0]]):
        expected = gradients(made(some))
        set_varlen_attention(model)
        assert has_varlen_attention(model)
        found = gradients(with_cu_seqlens(made)(some))
        with plain_attention(model, varlen=True):
            assert not has_varlen_attention(model)
            again = gradients(made(some))
        model.get_decoder().set_attn_implementation("sdpa")
        for ours, theirs, masked in zip(found, expected, again, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
            assert torch.equal(masked, theirs)


def test_adapters_on_four_bit_weights_learn_as_on_what_these_hold(family):
    """Towers, too: loss and gradients are those of plain transformers with the dequantized weights."""
    _, folder, spec, data = family
    row = by_number(data)[0]
    model = build_model(spec.model, spec.seed)
    linear = {path: layer for path, layer in model.named_modules() if type(layer) is torch.nn.Linear}
    names = {path.rpartition(".")[2] for path, layer in linear.items() if layer is not model.get_output_embeddings()}
    adapter = Lora(quantization="nf4", r=4, target_modules=sorted(names))
    spec = spec.model_copy(update={"adapter": adapter})
    with quantize_linear_layers(model, spec):
        add_adapter(model, adapter, spec.seed)
    move_to_device(model, torch.device("cpu"))
    step = build_training_step(model, spec, torch.device("cpu"), data)
    # bitsandbytes packs weights for CPUs otherwise in evaluation.
    loss = step.objective.micro_batch_loss(model.train(), step.collate([row]), torch.tensor(1)).loss
    loss.backward()

    adapted = {path: layer for path, layer in model.named_modules() if hasattr(layer, "lora_B")}
    packed = {path: layer.base_layer for path, layer in adapted.items() if hasattr(layer.base_layer, "quant_state")}
    towers = ("vision", "visual", "connector", "multi_modal_projector")
    assert {any(tower in path for tower in towers) for path in packed} == {True, False}

    def hold(plain):
        for path, layer in packed.items():
            plain.get_submodule(path).weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state)

    expected, gradients = plain_loss(folder, row, hold)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for path, layer in adapted.items():
        if (gradient := gradients[f"{path}.weight"]) is not None:
            given = gradient @ layer.lora_A["default"].weight.T * layer.scaling["default"]
            torch.testing.assert_close(layer.lora_B["default"].weight.grad, given, rtol=1e-3, atol=1e-5, msg=path)


def test_what_a_family_does_not_support_is_refused_with_the_way_out(family):
    name, _, spec, data = family
    require_media_support(spec, data)
    require_embeddings(spec.model, data)
    flash = spec.model_copy(update={"model": spec.model.model_copy(update={"attention": "flash_attention_2"})})
    tells = name in ("gemma3", "gemma4", "paligemma")
    message = rf"model\.attention 'flash_attention_2': {name} .* set model\.attention to 'auto'"
    with pytest.raises(ValueError, match=message) if tells else nullcontext():
        require_media_support(flash, data)
    together = PreparedData(data.folder, replace(data.manifest, packing=True))
    message = "data.packing is true, but model.name .* is of type mllama.*; set data.packing to false"
    with pytest.raises(ValueError, match=message) if name == "mllama" else nullcontext():
        require_media_support(spec, together)


@pytest.mark.parametrize("family", ["mllama", "llava"], indirect=True)
@pytest.mark.parametrize("named", [{}, {"images_column": "images"}], ids=["found in a row", "named by the spec"])
def test_images_that_share_rows_are_refused_before_the_data_is_prepared(family, named, tmp_path):
    """By the configuration where it names images; else at the first row that has one."""
    name, _, spec, _ = family
    changes = {"data": spec.data.model_copy(update={"packing": True, "sequence_length": 512, **named})}
    spec = spec.model_copy(update=changes)
    message = "data.packing is true, but model.name .* is of type mllama.*; set data.packing to false"
    with pytest.raises(ValueError, match=message) if name == "mllama" else nullcontext():
        require_planned_media_support(spec)
        if not named:
            prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "data", report=print)
    assert name != "mllama" or not (tmp_path / "data").exists()


def test_the_tokens_of_an_image_depend_on_its_size_alone(family):
    """Preparation runs the processor once for each size."""
    _, _, _, data = family
    processor = saved_processor(data.folder / TOKENIZER, data.tokenizer())
    draw = random.Random(2)
    for sizes in ((40,), (16,), (40, 16)):
        drawn = [picture("cross", draw, size) for size in sizes]
        first = processor.replacements([Image.new("RGB", (size, size)) for size in sizes])
        assert processor.replacements(drawn) == first
        again = saved_processor(data.folder / TOKENIZER, data.tokenizer())
        assert again.replacements(drawn) == first


def test_images_that_the_processor_makes_smaller_are_counted(tmp_path, capsys):
    folder = FAMILIES["qwen2_5_vl"](tmp_path / "model", edge=32)
    # Two of more than 32 x 32 pixels. 30 x 27 is rounded to patches.
    rows = []
    for number, size in enumerate([(64, 64), (30, 27), (32, 32), (100, 20)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
        said = [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "circle"}]
        rows.append({"messages": said, "images": [f"{number}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = RunSpec.model_validate({
        "model": {"name": str(folder)},
        "data": {"source": str(tmp_path / "rows.jsonl"), "packing": False, "validation_fraction": 0},
    })  # fmt: skip
    prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "data", report=print)
    expected = "4 images read, 0 made smaller by data.image_max_pixels, 2 made smaller by the model's processor"
    assert expected in capsys.readouterr().out


def test_other_processes_make_the_same_batches(tmp_path):
    family = FAMILIES["qwen2_5_vl"](tmp_path / "model")
    rows_of(tmp_path, "")
    spec = RunSpec.model_validate({
        "model": {"name": str(family)}, "training": {"micro_batch_size": 2}, "topology": {"nproc_per_node": 1},
        "data": {"source": str(tmp_path / "rows.jsonl"), "packing": False, "validation_fraction": 0},
    })  # fmt: skip
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, tmp_path / "data", report=print)
    made = with_model_inputs(collate, build_model(spec.model, spec.seed), data)

    def batches(workers):
        return list(training_loader(spec, data, Processes(), collate=made, start=0, stop=4, workers=workers))

    for one, other in zip(batches(0), batches(2), strict=True):
        assert one.keys() == other.keys() >= {"model.pixel_values", "rope_time"}
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "mllama"])
def test_answers_of_a_pair_have_the_likelihoods_of_plain_transformers(family, tmp_path):
    """Under dpo both answers share a row of the data, each with its own copy of the image."""
    folder = FAMILIES[family](tmp_path / "model")
    picture("circle", random.Random(4), 32).save(tmp_path / "a.png")
    said = {"chosen": "circle", "rejected": "cross"}
    answers = {side: [{"role": "assistant", "content": text}] for side, text in said.items()}
    pair = {"prompt": [{"role": "user", "content": "<image>Which?"}], "images": ["a.png"], **answers}
    (tmp_path / "rows.jsonl").write_text(json.dumps(pair))
    spec = RunSpec.model_validate({
        "model": {"name": str(folder)}, "objective": {"type": "dpo"},
        "data": {"source": str(tmp_path / "rows.jsonl"), "validation_fraction": 0, "packing": family != "mllama"},
    })  # fmt: skip
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, tmp_path / "data", report=print)
    model = build_model(spec.model, spec.seed)
    step = build_training_step(model, spec, torch.device("cpu"), data)
    scores = step.objective.scores(model, step.collate([data.train[0]]))[:2].tolist()
    processor = AutoProcessor.from_pretrained(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
    image = open_picture((tmp_path / "a.png").read_bytes())
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}
    for score, text in zip(scores, said.values(), strict=True):
        answer = {"role": "assistant", "content": [{"type": "text", "text": text}]}
        prompt = processor.apply_chat_template([question], add_generation_prompt=True)
        whole = processor.apply_chat_template([question, answer]).removesuffix("\n")
        before, inputs = (
            processor(text=[text], images=[[image]], return_tensors="pt", add_special_tokens=False)
            for text in (prompt, whole)
        )
        ids, begin = inputs["input_ids"][0], before["input_ids"].shape[1]
        with torch.no_grad():
            likelihoods = plain(**inputs).logits[0].log_softmax(-1)
        expected = likelihoods[torch.arange(begin - 1, ids.numel() - 1), ids[begin:]].sum().item()
        assert score == pytest.approx(expected, rel=1e-5)
