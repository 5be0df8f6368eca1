"""The embedded engine against transformers' own generation, and what makes its answers repeat."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from strata_kernels.patch.engine import patch_model
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.objectives import Generation, Grpo
from strata_platform.spec.sections.training import Training
from tasks.runtime.generation import EmbeddedGenerator, Request, Sampling, require_shared_cache
from tasks.runtime.generation.decoders import Decoder, supports_static_cache
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.attention.varlen_attention import has_varlen_attention, set_varlen_attention
from tests.runtime.helpers.hybrid_families import SIZES, build_family

WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
# Of several lengths, and one twice; the answers end at several lengths, too.
PROMPTS = ((5, 6, 7), (9,), tuple(range(20, 29)), (5, 6, 7), (31, 40))
GREEDY = Sampling(max_new_tokens=20, temperature=0.0, stop_token_ids=(2, 14, 17, 30))
DRAWN = Sampling(max_new_tokens=12, temperature=1.3, top_k=50, top_p=0.95, stop_token_ids=(2, 17))


class Words:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids, **options):
        return "".join(f"<{token}>" for token in ids)


def build(family="llama", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | {"head_dim": 8} | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Less even distributions, whose likeliest tokens are no matter of rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model.train()


def generator(model, **options):
    return EmbeddedGenerator(model, Words(), pad_token_id=0, seed=1, **options)


def requests(prompts=PROMPTS):
    return [Request(prompt, key) for key, prompt in enumerate(prompts)]


def ids(samples):
    return [sample.token_ids.tolist() for sample in samples]


def of_transformers(model, sampling=GREEDY):
    """Each prompt by itself."""
    options = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens, do_sample=False, eos_token_id=list(sampling.stop_token_ids),
        pad_token_id=0, use_cache=True,
    )  # fmt: skip
    model.eval()
    found = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        written = model.generate(given, attention_mask=torch.ones_like(given), generation_config=options)
        found.append(written[0, len(prompt) :].tolist())
    model.train()
    return found


def of_passes(model):
    """Each prompt by itself, and the whole text anew for each token."""
    model.eval()
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        while len(text) - len(prompt) < GREEDY.max_new_tokens and (
            len(text) == len(prompt) or text[-1] not in GREEDY.stop_token_ids
        ):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_answers_are_those_of_transformers(family, static, patched):
    model = build(family)
    expected = of_transformers(model)
    if patched:
        patch_model(model)
    assert ids(generator(model, static=static).generate(requests(), GREEDY)) == expected
    # Rows have left the batch meanwhile.
    assert len({len(answer) for answer in expected}) > 2


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next", "lfm2", "mamba2"])
def test_greedy_answers_of_other_kinds_of_caches_are_those_of_transformers(family):
    model = build(family, **WINDOW) if family == "gemma3_text" else build_family(family)
    assert not supports_static_cache(model)
    assert ids(generator(model).generate(requests(), GREEDY)) == of_transformers(model)


OWN_STATE = {
    "minimax": None,
    "recurrent_gemma": None,
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "xlstm": {"num_heads": 2, "num_blocks": 2, "chunk_size": 4, "mode": "inference"},
}


@pytest.mark.parametrize("family", OWN_STATE)
def test_families_with_a_state_of_their_own_are_refused_because_they_fail(family, tmp_path):
    """They end in errors, or give other answers than a forward pass without a cache."""
    changes = OWN_STATE[family]
    model = build_family(family) if changes is None else build(family, **changes)
    for parameter in model.parameters():
        # Or the last token alone would decide on the next.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    try:
        answers = ids(generator(model).generate(requests(), GREEDY))
    except (AttributeError, IndexError, RuntimeError, ValueError):
        pass
    else:
        assert answers != of_passes(model)
    model.config.save_pretrained(tmp_path)
    named, objective = Model(name=str(tmp_path)), Grpo(type="grpo", rewards=[{"function": "numeric"}])
    with pytest.raises(ValueError, match=f"'embedded' cannot generate .* type {family} keep their state"):
        require_shared_cache(named, objective)
    require_shared_cache(named, objective.model_copy(update={"generation": Generation(engine="vllm")}))


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2", "qwen3_next"])
def test_logits_of_recurrent_layers_are_those_of_a_forward_pass_without_a_cache(family):
    """A layer of Mamba multiplies the tokens that it gets by the whole mask it gets."""
    model = build_family(family).eval()
    prompts, answers = [(5, 6, 7), (9, 8, 31)], torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
    with torch.no_grad():
        whole = model(torch.cat([torch.tensor(prompts), answers], dim=1), use_cache=False).logits
        decoder = Decoder(model, prompts, 0)
        found = [decoder.first_logits, *(decoder._append(tokens) for tokens in answers.T)]
    torch.testing.assert_close(torch.stack(found, dim=1), whole[:, 2:], atol=4e-6, rtol=0)


def test_the_cache_has_a_fixed_size_once_the_model_is_on_a_gpu(monkeypatch):
    """A run moves its model there after it has made its engine."""
    model = build()
    engine = generator(model)
    assert not engine._has_fixed_size(DRAWN)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert engine._has_fixed_size(DRAWN) and not engine._has_fixed_size(GREEDY)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_log_probs_are_those_of_a_forward_pass(static):
    model = build()
    samples = generator(model, static=static).generate(requests(), DRAWN)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        row = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
        log_probs = (model(row).logits[0] / DRAWN.temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = log_probs.gather(-1, sample.token_ids[:, None])[:, 0]
        torch.testing.assert_close(sample.log_probs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_an_answer_depends_on_its_key_and_on_nothing_beside_it(static):
    engine = generator(build(), static=static)
    together = ids(engine.generate(requests(), DRAWN))
    assert together == ids(engine.generate(requests(), DRAWN))
    alone = [ids(engine.generate([request], DRAWN))[0] for request in reversed(requests())]
    assert together == alone[::-1]
    assert together == ids(generator(build(), static=static, batch_size=2).generate(requests(), DRAWN))
    # The same prompt with another key.
    assert together[0] != together[3]


def test_an_answer_ends_with_its_stop_token_or_is_cut():
    samples = generator(build()).generate(requests(), DRAWN)
    for sample in samples:
        *before, last = sample.token_ids.tolist()
        assert not {2, 17} & {*before}
        assert sample.finished == (last in (2, 17))
        assert sample.finished or len(sample.token_ids) == DRAWN.max_new_tokens
    assert {sample.finished for sample in samples} == {True, False}


def test_an_answer_ends_with_the_token_that_completes_a_stop_string():
    free = Sampling(max_new_tokens=20, temperature=1.3)
    whole = generator(build()).generate(requests(), free)
    # Two tokens that follow each other somewhere.
    first, second = whole[2].token_ids[10:12].tolist()
    stop = f"{first}><{second}"
    cut = generator(build()).generate(requests(), Sampling(max_new_tokens=20, temperature=1.3, stop_strings=(stop,)))
    for full, sample in zip(whole, cut, strict=True):
        text = Words().decode(full.token_ids.tolist())
        size = text[: text.index(stop) + len(stop)].count("<") if stop in text else 20
        assert sample.token_ids.tolist() == full.token_ids[:size].tolist()
        assert sample.finished == (stop in text)
    assert cut[2].finished


def test_the_model_is_as_before():
    model = build("llama", attention_dropout=0.5)
    set_varlen_attention(model)
    generator(model).generate(requests(), GREEDY)
    assert model.training and has_varlen_attention(model)


def test_layers_that_recompute_generate_as_others(monkeypatch):
    model = build()
    expected = ids(generator(model).generate(requests(), GREEDY))
    checkpoint_activations(model, Training(gradient_checkpointing="full"))
    # It saves random states, which a CUDA graph cannot.
    monkeypatch.setattr("tasks.runtime.models.activations.activation_checkpointing.checkpoint", None)
    assert ids(generator(model, static=True).generate(requests(), GREEDY)) == expected


def test_the_weights_are_the_current_ones():
    model = build()
    engine = generator(model, static=True)
    before = ids(engine.generate(requests(), GREEDY))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert ids(engine.generate(requests(), GREEDY)) == of_transformers(model) != before
