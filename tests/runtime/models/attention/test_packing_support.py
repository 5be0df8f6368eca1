"""A model that cannot keep the texts of a row apart, or has too few positions for it, is refused before training."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    Qwen3NextConfig,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.model import Model
from tasks.runtime.data.preparation.tokenizer import train_tokenizer
from tasks.runtime.evaluation.evaluate_model import generate
from tasks.runtime.models.attention.packing_support import (
    _SMALL,
    SUPPORTS_PACKING,
    learned_position_count,
    require_packing_support,
    require_planned_packing_support,
    require_position_embeddings,
    small_model,
    supports_packing,
)
from tasks.runtime.models.build import build_model
from tasks.runtime.objectives import build_objective
from tasks.runtime.process.ranks import Processes
from tests.kernels.test_patch import build
from tests.runtime.helpers.hybrid_families import build_family
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=48)


def bloom(vocab_size=512):
    """Its masks tell positions by the distance of tokens in a row."""
    return AutoModelForCausalLM.from_config(BloomConfig(vocab_size=vocab_size, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("family", sorted(SUPPORTS_PACKING))
def test_families_that_are_not_probed_keep_texts_apart(family):
    assert supports_packing(build(family).to(torch.bfloat16))


def test_a_family_of_the_kernel_layer_that_does_not_is_probed():
    model = build("falcon_h1").train()
    # Built without `support_packed_rows`.
    assert not supports_packing(model)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_mixes_sequences_is_refused_where_rows_are_shared():
    packed = RunSpec.model_validate({"model": {"name": "org/bloom"}, "kernels": {"enabled": False}})
    with pytest.raises(
        ValueError, match=r"data\.packing is true.*'org/bloom'.*BloomForCausalLM mixes the sequences.*false"
    ):
        require_packing_support(bloom(), packed)
    alone = RunSpec.model_validate({**packed.model_dump(), "data": {"packing": False}})
    require_packing_support(bloom(), alone)
    pairs = {
        "objective": {"type": "dpo", "reference": "precomputed"},
        "data": {"packing": False, "source": "rows.jsonl"},
    }
    with pytest.raises(ValueError, match=r"objective\.type 'dpo' puts both answers.*another family"):
        require_packing_support(bloom(), RunSpec.model_validate({**packed.model_dump(), **pairs}))


@pytest.mark.parametrize("adapter", [{"type": "none"}, {"type": "lora", "quantization": "nf4"}], ids=["whole", "nf4"])
def test_a_run_of_such_a_model_ends_before_its_first_step(tmp_path, adapter):
    if adapter["type"] == "lora":
        pytest.importorskip("bitsandbytes")
    folder = save_pretrained(tmp_path / "model")
    bloom(4096).save_pretrained(folder)
    spec = {
        "model": {"name": str(folder), "attention": "eager"},
        "kernels": {"enabled": False},
        "output": str(tmp_path),
    }
    few = {"data": {"max_samples": 20, "sequence_length": 64}, "training": {"steps": 1, "micro_batch_size": 1}}
    with pytest.raises(ValueError, match=r"data\.packing is true"):
        train_spec(RunSpec.model_validate({**spec, **few, "adapter": adapter}))


def test_layers_of_other_sizes_in_each_batch_are_not_compiled(tmp_path):
    """A graph has fixed sizes; sequences of a packed row have not."""
    spec = {"model": folder_of(tmp_path, Qwen3NextConfig()), "training": {"compile": True}}
    with pytest.raises(ValueError, match=r"training\.compile: Qwen3NextGatedDeltaNet of .* set .* to false"):
        require_planned_packing_support(RunSpec.model_validate(spec))


def test_kernels_that_need_a_gpu_are_not_probed_on_the_cpu(tmp_path, monkeypatch, caplog):
    """With such a package, a pass of the model ends in the error of its kernel, and the run went with it."""

    def forward(*args, **kwargs):
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: object())
    model = build_family("qwen3_next")
    monkeypatch.setattr(type(model), "forward", forward)
    require_packing_support(model, RunSpec.model_validate({"model": {"name": "org/hybrid"}}))
    assert "without a GPU it is not tested whether" in caplog.text


def test_a_teacher_has_to_keep_texts_apart_too(tmp_path):
    bloom().save_pretrained(tmp_path / "bloom")
    teacher = {"type": "distill", "teacher": str(tmp_path / "bloom")}
    spec = RunSpec.model_validate({"objective": teacher, "model": {"attention": "eager"}})
    data = SimpleNamespace(tokenizer=lambda: train_tokenizer([""]), manifest=SimpleNamespace(largest_token_id=9))
    with pytest.raises(ValueError, match=r"objective\.teacher: data\.packing is true.*/bloom'"):
        build_objective(spec, fused=False).prepare(
            SimpleNamespace(processes=Processes(), data=data, strategy=None, metadata={})
        )


def test_positions_that_were_learned_are_counted():
    assert learned_position_count(AutoModelForCausalLM.from_config(GPT2)) == 48
    assert learned_position_count(build("llama")) is None


def test_rows_that_are_longer_than_learned_positions_are_refused(tmp_path):
    AutoModelForCausalLM.from_config(GPT2).save_pretrained(tmp_path / "gpt2")
    model = Model(name=str(tmp_path / "gpt2"))
    with pytest.raises(ValueError, match=r"data\.sequence_length 64 exceeds the 48 learned positions.*48 or less"):
        require_position_embeddings(model, 64)
    require_position_embeddings(model, 48)
    # Any number of positions that are computed.
    require_position_embeddings(Model(), 4096)


def test_what_is_written_ends_with_the_positions(caplog):
    model = AutoModelForCausalLM.from_config(GPT2)
    data = SimpleNamespace(manifest=SimpleNamespace(stop_token_ids=(), pad_token_id=0))
    tokenizer = SimpleNamespace(decode=lambda ids, **options: len(ids))
    for length, written in ((40, 8), (48, 0)):
        prompt = SimpleNamespace(prompt_ids=list(range(1, length + 1)), media=())
        assert int(generate(model, tokenizer, prompt, data, 48) or 0) == written
    said = "evaluation.max_new_tokens 48: the model has positions for {} after this prompt"
    assert caplog.messages == [said.format(8), said.format(0)]


def folder_of(tmp_path, config):
    config.save_pretrained(tmp_path)
    return {"name": str(tmp_path)}


@pytest.mark.parametrize(
    ("config", "packing"),
    [
        (BloomConfig(), False),
        (GptOssConfig(), True),
        (Qwen3NextConfig(), True),
        (MambaConfig(), True),
        (GraniteMoeConfig(), True),
        (DeepseekV3Config(), True),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_of_any_size_is_judged_by_its_configuration(tmp_path, config, packing):
    spec = RunSpec.model_validate({"model": folder_of(tmp_path, config)})
    with nullcontext() if packing else pytest.raises(ValueError, match=r"data\.packing is true.*mixes the sequences"):
        require_planned_packing_support(spec)
    assert small_model(config) is not None
    require_planned_packing_support(spec.model_copy(update={"data": Data(packing=False)}))


def test_a_configuration_without_asmall_model_is_left_to_the_real_one(tmp_path):
    config = Mamba2Config()
    assert small_model(config) is None
    require_planned_packing_support(RunSpec.model_validate({"model": folder_of(tmp_path, config)}))


@pytest.mark.parametrize(
    ("version", "length", "packing", "refused"),
    [
        ("5.22.2", 16, True, False),
        ("5.22.2", 17, True, True),
        ("5.22.2", 17, False, False),
        ("5.23.0", 17, True, False),
    ],
)
def test_chunks_that_a_version_counts_from_the_start_of_a_row_are_longer(
    tmp_path, monkeypatch, version, length, packing, refused
):
    sizes = {name: value for name, value in _SMALL.items() if hasattr(Llama4TextConfig(), name)}
    Llama4TextConfig(**sizes, attention_chunk_size=16).save_pretrained(tmp_path)
    monkeypatch.setattr("tasks.runtime.models.attention.packing_support.transformers.__version__", version)
    spec = RunSpec.model_validate(
        {"model": {"name": str(tmp_path)}, "data": {"sequence_length": length, "packing": packing}}
    )
    message = (
        r"counts from the start of a row.*install transformers 5\.23 or newer, set data.sequence_length to at most 16"
    )
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        require_planned_packing_support(spec)


@pytest.mark.parametrize(("length", "packing", "refused"), [(15, True, False), (16, True, True), (16, False, False)])
def test_llama_4_is_packed_while_its_scale_is_one(tmp_path, length, packing, refused):
    """From `floor_scale` on, it scales attention by the place of a token in the row."""
    sizes = {name: value for name, value in _SMALL.items() if hasattr(Llama4TextConfig(), name)}
    Llama4TextConfig(**sizes, floor_scale=16).save_pretrained(tmp_path)
    spec = RunSpec.model_validate(
        {"model": {"name": str(tmp_path)}, "data": {"sequence_length": length, "packing": packing}}
    )
    message = "scales attention by places in a row.* set data.sequence_length to at most 15, or data.packing to false"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        require_planned_packing_support(spec)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
PLAIN = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        (DYNAMIC, 128),
        # transformers does not read it for this type.
        ({**DYNAMIC, "original_max_position_embeddings": 32}, 128),
        (LONG, 32),
        (PLAIN, None),
        ({"sliding_attention": PLAIN, "full_attention": DYNAMIC}, 128),
        ({"sliding_attention": DYNAMIC, "full_attention": LONG}, 32),
        ({"sliding_attention": PLAIN, "full_attention": PLAIN}, None),
    ],
    ids=["dynamic", "dynamic-original", "longrope", "default", "layers-dynamic", "layers-both", "layers-default"],
)
def test_a_rotation_that_depends_on_the_batch_is_told(rope, most, tmp_path, caplog):
    sets = {name: {"rope_theta": 1e4, **one} for name, one in rope.items() if isinstance(one, dict)}
    if sets:
        config = Gemma3TextConfig(
            **_SMALL, max_position_embeddings=128, layer_types=list(sets), sliding_window=8, rope_parameters=sets
        )
        rotary = Gemma3RotaryEmbedding(config)
    else:
        config = LlamaConfig(**_SMALL, max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **rope})
        rotary = LlamaRotaryEmbedding(config)

    def first_rotations(length):
        """Those of the first tokens of a text of such a length, by layer type."""
        positions = torch.arange(length)[None]
        kinds = [{"layer_type": name} for name in sets] or [{}]
        return torch.stack([rotary(torch.ones(1), positions, **kind)[0][:, :8] for kind in kinds])

    expected = first_rotations(8)
    assert first_rotations(most or 4096).equal(expected)
    assert first_rotations((most or 4096) + 1).equal(expected) == (most is None)

    config.save_pretrained(tmp_path)
    model = Model(name=str(tmp_path))
    require_position_embeddings(model, most or 4096)
    assert "rotates a whole batch" not in caplog.text
    require_position_embeddings(model, (most or 4096) + 1)
    assert (f"has more than {most} tokens" in caplog.text) == ("rotates a whole batch" in caplog.text) == bool(most)


def test_the_texts_of_a_reward_model_are_probed(tmp_path):
    """Its class has a score for a row, which no token of a second text is in."""
    bloom().save_pretrained(tmp_path)
    values = {"model": {"name": str(tmp_path)}, "data": {"source": "rows.jsonl"}, "objective": {"type": "reward"}}
    spec = RunSpec.model_validate(values)
    with pytest.raises(ValueError, match=r"objective\.type 'reward' puts both answers of a pair into one row.*mixes"):
        require_packing_support(build_model(spec.model, 0), spec)
