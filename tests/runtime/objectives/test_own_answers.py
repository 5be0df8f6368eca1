"""On-policy distillation: the rows that the student writes itself, and what is gained by them."""

import json
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.data.loader import training_loader
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.data.prompts import ANSWER
from tasks.runtime.generation import EmbeddedGenerator, Request, Sampling, start_engine
from tasks.runtime.models.trained_weights import build_trained_model, collect_weights
from tasks.runtime.objectives import ObjectiveContext, build_objective
from tasks.runtime.objectives.own_answers import OWN, OwnAnswers
from tasks.runtime.parallel.single import Single
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tests.runtime.helpers.train_only import train_spec

PROMPT, NEW, STEPS = 4, 20, 50


def model_of(seed, hidden, layers, vocabulary, sharpness):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, use_cache=True, eos_token_id=2, pad_token_id=0,
            initializer_range=0.2,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    return model


def teacher_of(size):
    """A model that follows any token by a certain one of 24."""
    model = model_of(1, 32, 1, size, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1)
    for _ in range(150):
        ids = torch.randint(5, size, (32, 16), generator=draw)
        loss = cross_entropy(model(ids).logits.flatten(0, 1), (5 + ids * 7 % 24).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def output(output):
    """A teacher, and texts of other tokens than it would write."""
    tokenizer = train_tokenizer(["nothing in particular"])
    size = len(tokenizer)
    draw = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": ids, "labels": [-100] * PROMPT + ids[PROMPT:]}
        for ids in torch.randint(5, size, (256, PROMPT + NEW), generator=draw).tolist()
    ]
    (output / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, model in (("teacher", teacher_of(size)), ("student", model_of(2, 16, 1, size, 0.2))):
        model.save_pretrained(output / name)
        save_tokenizer(tokenizer, output / name)
    return output


def spec_of(output, name, share, **changes):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"name": f"{output}/student"},
            "data": {
                "source": f"{output}/rows.jsonl",
                "sequence_length": PROMPT + NEW,
                "packing": False,
                "validation_fraction": 0.1,
            },
            "objective": {
                "type": "distill",
                "teacher": f"{output}/teacher",
                "divergence": "forward_kl",
                "weight": 1,
                **({"on_policy": share, "generation": {"max_new_tokens": NEW}} if share else {}),
            },
            "training": {"steps": STEPS, "micro_batch_size": 16},
            "optimizer": {"lr": 1e-2},
            "schedule": {"type": "constant", "warmup_ratio": 0},
            "checkpoint": {"every": STEPS // 2, "keep_last": 2},
            "tracking": {"log_every": 1, "report_to": []},
            **changes,
        }
    )


def data_of(spec):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print)


def vocabulary_of(spec):
    return len(data_of(spec).tokenizer())


def points_of(spec, attempt=0):
    points = map(json.loads, RunFolder.of(spec).metrics.read_text().splitlines())
    return [point for point in points if point["attempt"] == attempt and "loss" in point]


@torch.no_grad()
def distance(output, spec, record):
    """KL(teacher || student) for each token of the student's own answers to prompts that no run has seen."""
    student = build_trained_model(spec, collect_weights(RunFolder.of(spec), spec.adapter, record)).float().eval()
    teacher = LlamaForCausalLM.from_pretrained(output / "teacher").eval()
    tokenizer = data_of(spec).tokenizer()
    draw = torch.Generator().manual_seed(5)
    prompts = torch.randint(5, len(tokenizer), (128, PROMPT), generator=draw).tolist()
    generator = EmbeddedGenerator(student, tokenizer, pad_token_id=0, seed=3)
    samples = generator.generate([Request(tuple(p), n) for n, p in enumerate(prompts)], Sampling(NEW))
    rows = torch.stack([torch.cat([torch.tensor(p), s.token_ids]) for p, s in zip(prompts, samples, strict=True)])
    log_p, log_q = (model(rows).logits[:, PROMPT - 1 : -1].log_softmax(-1) for model in (student, teacher))
    return float((log_q.exp() * (log_q - log_p)).sum(-1).mean())


def test_it_comes_closer_to_its_teacher_at_equal_tokens_and_continues_with_the_same_bits(output):
    found, tokens = {}, {}
    for share in (0.0, 1.0):
        spec = spec_of(output, f"share-{share:.0f}", share)
        record = train_spec(spec)
        found[share], tokens[share] = distance(output, spec, record), record.target_tokens
    first = points_of(spec)
    assert tokens[1.0] <= tokens[0.0] == STEPS * 16 * NEW
    assert found[1.0] < 0.8 * found[0.0], found
    assert first[-1]["loss"] < 0.7 * first[0]["loss"]
    assert {point["metrics"]["own_tokens"] for point in first} == {1.0}
    assert all(0 < point["metrics"]["generation_share"] <= 1 for point in first[1:])
    assert all(point["metrics"]["generated_tokens_per_second"] > 0 for point in first)
    # The tokens learned so far; each row of a step is one answer.
    learned = [0, *(point["target_tokens"] for point in first)]
    for tokens, point in zip((after - before for before, after in pairwise(learned)), first, strict=True):
        assert point["metrics"]["answer_tokens"] == pytest.approx(tokens / 16)
        assert (point["metrics"]["finished"] == 0) <= (tokens == 16 * NEW) and point["metrics"]["finished"] <= 1
    # At first all tokens are about as likely.
    entropies = [point["metrics"]["entropy"] for point in first]
    assert entropies[0] == pytest.approx(math.log(vocabulary_of(spec)), rel=0.1) and entropies[-1] < entropies[0]
    # Killed after its first checkpoint, the run writes the same answers again.
    train_spec(spec, STEPS // 2)
    again = points_of(spec, 1)
    assert [(p["loss"], p["grad_norm"]) for p in again] == [(p["loss"], p["grad_norm"]) for p in first[STEPS // 2 :]]


def batches_of(output, share, micro_batch, processes=None):
    """The rows of a step with answers: their tokens and labels without padding, by number."""
    spec = spec_of(
        output, "x", share,
        training={"steps": 1, "micro_batch_size": micro_batch, "gradient_accumulation_steps": 16 // micro_batch},
    )  # fmt: skip
    data, processes = data_of(spec), Processes()
    model = LlamaForCausalLM.from_pretrained(output / "student")
    objective, whole = build_objective(spec, fused=False), WholeModel(model)
    context = ObjectiveContext(
        spec, processes, data, Single(processes), model, "-", continues=False, collate=collate,
        whole=whole, generator=start_engine(spec, whole, data, processes),
    )  # fmt: skip
    objective.prepare(context)
    asked = list(training_loader(spec, data, processes, collate=collate, start=0, stop=1))
    made = objective.step_batches(model, asked, processes)
    assert len(made) == len(asked)
    rows = [
        (row["input_ids"][row["input_ids"] != 0].tolist(), int((row[OWN] != 0).sum()))
        for batch in made
        for row in ({name: tensor[i] for name, tensor in batch.items()} for i in range(batch["input_ids"].shape[0]))
    ]
    given = [batch["input_ids"][i].tolist() for batch in asked for i in range(batch["input_ids"].shape[0])]
    assert [int(n) for batch in asked for n in batch[ANSWER][:, 0]] == list(range(16))
    lengths = [count for _, count in rows if count]
    assert objective._own.metrics["answer_tokens"] == pytest.approx(sum(lengths) / max(len(lengths), 1))
    return given, rows


def test_nothing_is_measured_where_no_row_is_the_students(output):
    _, rows = batches_of(output, 1e-9, 16)
    assert not any(count for _, count in rows)


def test_a_share_of_the_rows_is_the_students_whatever_the_micro_batches(output):
    given, rows = batches_of(output, 0.5, 16)
    own = [count > 0 for _, count in rows]
    assert 3 <= sum(own) <= 13
    for (made, count), before in zip(rows, given, strict=True):
        assert made[:PROMPT] == before[:PROMPT]
        assert (made == before) == (count == 0) and count in (0, len(made) - PROMPT)
    assert batches_of(output, 0.5, 4)[1] == rows


def test_images_are_refused_because_answers_are_texts_alone(output):
    spec = spec_of(output, "images", 1.0)
    context = SimpleNamespace(
        spec=spec, collate=None, data=SimpleNamespace(manifest=SimpleNamespace(has_media=True)), strategy=None
    )
    with pytest.raises(ValueError, match=r"objective.on_policy: the data have images.*set objective.on_policy to 0"):
        OwnAnswers(spec.objective, context)
