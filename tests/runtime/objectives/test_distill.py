"""Distillation: loss and gradients against plain PyTorch in fp64, whatever the chunks, the head and the packing."""

import json
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.objectives import Distill as Settings
from tasks.runtime import checkpoint
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.data.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.models.build import has_fused_loss, patch
from tasks.runtime.models.lora import base_fingerprint
from tasks.runtime.objectives import ObjectiveContext, build_objective, head_sums, require_same_tokens
from tasks.runtime.objectives.divergence import distillation
from tasks.runtime.objectives.head_sums import Head
from tasks.runtime.parallel.single import Single
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.warmup.plan import plan_kernels
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.train_only import train_spec

DIVERGENCES = ["forward_kl", "reverse_kl", "jsd"]


def plain(z, t, labels, settings):
    """Loss, cross entropy and divergence by PyTorch's own functions, row by row averaged."""
    z, t, labels = z[labels != -100], t[labels != -100], labels[labels != -100]
    common = min(z.shape[1], t.shape[1])
    p, q = (log_softmax(logits[:, :common] / settings.temperature, -1) for logits in (z, t))
    m = ((p.exp() + q.exp()) / 2).log()

    def kl(of, given):
        return kl_div(given, of, log_target=True, reduction="batchmean")

    found = {"forward_kl": kl(q, p), "reverse_kl": kl(p, q), "jsd": (kl(p, m) + kl(q, m)) / 2}[settings.divergence]
    entropy = cross_entropy(z, labels)
    return (1 - settings.weight) * entropy + settings.weight * settings.temperature**2 * found, entropy, found


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight, bias = normal(23, 8), normal(40, 8), normal(40)
    labels = torch.randint(40, (23,), generator=generator)
    labels[::3] = -100
    return x, weight, bias, labels, normal(23, 6), normal(44, 6)


@pytest.mark.parametrize("rows", [1, 5, 23], ids=lambda rows: f"{rows}-rows")
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_chunks_add_up_to_the_plain_loss(monkeypatch, name, softcap, rows):
    """In fp32, of vocabularies of 40 and 44, which have 40 in common."""
    monkeypatch.setattr(head_sums, "CHUNK_BYTES", rows * 4 * 40)
    settings = Settings(teacher="some/teacher", divergence=name, temperature=2.0, weight=0.7)
    found, expected = [], []
    for dtype, results in ((torch.float32, found), (torch.float64, expected)):
        x, weight, bias, labels, teacher_x, teacher_weight = tensors(dtype)
        learned = [tensor.requires_grad_() for tensor in (x, weight, bias)]
        if results is found:
            items = (labels != -100).sum()
            teacher = Head(teacher_weight, None, 5.0)
            sums = distillation(x, Head(weight, bias, softcap), labels, teacher_x, teacher, settings, items)
        else:
            z, t = linear(x, weight, bias), 5.0 * torch.tanh(linear(teacher_x, teacher_weight) / 5.0)
            sums = plain(z if softcap is None else softcap * torch.tanh(z / softcap), t, labels, settings)
        (3 * sums[0]).backward()
        results += [*(value.detach() for value in sums), *(tensor.grad for tensor in learned)]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def test_frozen_heads_get_no_gradient_and_logits_are_rows_too():
    settings = Settings(teacher="some/teacher")
    x, weight, _, labels, teacher_x, teacher_weight = tensors(torch.float64)
    x.requires_grad_()
    teacher, items = Head(teacher_weight), torch.tensor(15)
    distillation(x, Head(weight), labels, teacher_x, teacher, settings, items).loss.backward()
    z = linear(x.detach(), weight).requires_grad_()
    distillation(z, Head(), labels, teacher.logits(teacher_x), Head(), settings, items).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, z.grad @ weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    write_pairs(folder / "rows.jsonl")
    return folder


def make_spec(folder, objective=None, **changes):
    return RunSpec.model_validate(
        {
            "output": str(folder / "out"),
            "data": {
                "source": str(folder / "rows.jsonl"),
                "format": "prompt_completion",
                "completion_column": "chosen",
                "sequence_length": 64,
            },
            "objective": {"type": "distill", "teacher": str(folder / "teacher"), **(objective or {})},
            **changes,
        }
    )


def small(seed, hidden=32, vocabulary=512):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, attn_implementation="sdpa",
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(folder):
    spec = make_spec(folder)
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    small(1, hidden=48, vocabulary=576).save_pretrained(folder / "teacher")
    save_tokenizer(data.tokenizer(), folder / "teacher")
    return data


@pytest.mark.parametrize("head", ["fused", "plain"])
def test_a_batch_is_learned_from_the_teacher_document_by_document(folder, data, head):
    spec = make_spec(folder, {"divergence": "jsd"}, kernels={"enabled": head == "fused"})
    rows = [data.train[index] for index in range(3)]
    exact, teacher = small(0).double(), small(1, hidden=48, vocabulary=576).double()
    batch = collate(rows)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten()
    expected = plain(
        exact(**inputs).logits.flatten(0, 1), teacher(**inputs).logits.detach().flatten(0, 1), labels, spec.objective
    )
    expected[0].backward()

    model, processes = small(0), Processes()
    ours = build_objective(spec, fused=has_fused_loss(patch(model, spec.kernels)))
    assert ours.prepare(ObjectiveContext(spec, processes, data, Single(processes), model, "-", continues=False)) is data
    items = ours.count(batch)
    total = {}
    for part in (collate(rows[:1]), collate(rows[1:])):
        share = ours.micro_batch_loss(model.train(), part, items)
        share.loss.backward()
        for name, value in {"loss": share.loss.detach(), **share.metrics}.items():
            total[name] = total.get(name, 0.0) + float(value)
    assert list(total) == ["loss", "next_token_loss", "jsd"]
    assert list(total.values()) == pytest.approx([float(value.detach()) for value in expected], rel=1e-5)
    for (name, parameter), true in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (parameter.grad - true.grad).norm() < 1e-4 * true.grad.norm(), name


def test_a_teacher_of_other_tokens_is_refused(folder, data, tmp_path):
    save_tokenizer(train_tokenizer(["something else altogether"]), tmp_path)
    with pytest.raises(ValueError, match=r"objective\.teacher .* has another vocabulary: \d+ of the data's \d+ tokens"):
        require_same_tokens(make_spec(folder, {"teacher": str(tmp_path)}).objective, data)
    with pytest.raises(ValueError, match=r"objective\.teacher 'no/such': cannot load its tokenizer"):
        require_same_tokens(make_spec(folder, {"teacher": "no/such"}).objective, data)
    require_same_tokens(make_spec(folder).objective, data)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=576, n_embd=32, n_layer=1, n_head=4, n_positions=48)),
         r"objective\.teacher: data\.sequence_length 64 exceeds the 48 learned positions of model\.name '.*short'"),
        (lambda: small(1, vocabulary=64),
         r"objective\.teacher: model\.tokenizer has \d+ tokens but model\.name '.*short' embeds 64"),
    ],
    ids=["positions", "embeddings"],
)  # fmt: skip
def test_a_teacher_that_is_too_small_for_the_rows_is_refused_before_it_is_loaded(folder, data, made, said, monkeypatch):
    shutil.rmtree(folder / "short", ignore_errors=True)
    made().save_pretrained(folder / "short")
    monkeypatch.setattr("tasks.runtime.objectives.distill.build_model", None)
    spec = make_spec(folder, {"teacher": str(folder / "short")}, kernels={"enabled": False})
    processes = Processes()
    with pytest.raises(ValueError, match=said):
        build_objective(spec, fused=False).prepare(
            ObjectiveContext(spec, processes, data, Single(processes), small(0), "-", continues=False)
        )


def test_a_run_goes_on_with_the_teacher_it_began_with(folder, data):
    spec = make_spec(
        folder,
        name="continued",
        model={"tokenizer": str(folder / "teacher")},
        training={"steps": 2},
        checkpoint={"every": 1},
    )
    train_spec(spec)
    noted = checkpoint.metadata_of(checkpoint.latest(RunFolder.of(spec).checkpoints))["teacher"]
    assert noted == base_fingerprint(small(1, hidden=48, vocabulary=576))
    train_spec(spec, 1)
    small(2, hidden=48, vocabulary=576).save_pretrained(folder / "teacher")
    try:
        with pytest.raises(
            ValueError, match=r"objective\.teacher '.*' has other weights than at the start .*\.teacher_revision"
        ):
            train_spec(spec, 1)
        # A checkpoint of a run that did not look at its teacher.
        manifest = RunFolder.of(spec).checkpoints / "checkpoint-1" / "manifest.json"
        metadata = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({n: fact for n, fact in metadata.items() if n not in ("teacher", "seal")}))
        assert train_spec(spec).status == "complete"
    finally:
        small(1, hidden=48, vocabulary=576).save_pretrained(folder / "teacher")


def test_the_warm_up_plans_the_teacher_too(folder, data):
    spec = make_spec(folder)
    alone = plan_kernels(RunSpec.model_validate(spec.model_dump() | {"objective": {"type": "sft"}}))
    norms = [{i for i in plan.specializations if i.name == "norm_fwd_kernel"} for plan in (plan_kernels(spec), alone)]
    assert norms[0] > norms[1]
