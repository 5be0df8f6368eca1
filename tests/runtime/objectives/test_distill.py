"""Distillation: loss and gradients against plain PyTorch in fp64, whatever the chunks, the head and the packing."""

import json
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from strata_kernels.ops.linear_divergence import row_divergences
from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.objectives import Distill as Settings
from tasks.runtime import checkpoint
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.models.adapters.lora import base_fingerprint
from tasks.runtime.models.build import has_fused_loss, patch
from tasks.runtime.objectives import (
    ObjectiveContext,
    build_objective,
    head_sums,
    require_same_tokens,
)
from tasks.runtime.objectives.head_sums import Head
from tasks.runtime.objectives.teacher_divergence import distillation
from tasks.runtime.parallel.single import Single
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.warmup.plan import plan_kernels
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.train_only import train_spec

# Settings by name; those of the middle of `jsd` are the default.
DIVERGENCES = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd"},
    "jsd_0.1": {"divergence": "jsd", "beta": 0.1},
    "jsd_0": {"divergence": "jsd", "beta": 0},
}


def settings_of(name, **options):
    return Settings(teacher="some/teacher", **DIVERGENCES[name], **options)


def plain(z, t, labels, settings):
    """Loss, cross entropy and divergence by PyTorch's own functions, row by row averaged."""
    z, t, labels = z[labels != -100], t[labels != -100], labels[labels != -100]
    common = min(z.shape[1], t.shape[1])
    p, q = (log_softmax(logits[:, :common] / settings.temperature, -1) for logits in (z, t))
    beta = 0.5 if settings.beta is None else settings.beta
    m = ((1 - beta) * p.exp() + beta * q.exp()).log()

    def kl(of, given):
        return kl_div(given, of, log_target=True, reduction="batchmean")

    jsd = kl(q, p) if beta == 0 else beta * kl(q, m) + (1 - beta) * kl(p, m)
    found = {"forward_kl": kl(q, p), "reverse_kl": kl(p, q), "jsd": jsd}[settings.divergence]
    entropy = cross_entropy(z, labels)
    return (1 - settings.weight) * entropy + settings.weight * settings.temperature**2 * found, entropy, found


def tensors(dtype):
    """Two rows of 23 tokens; a teacher of other width and with a larger vocabulary."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight, bias = normal(2, 23, 8), normal(40, 8), normal(40)
    labels = torch.randint(40, (2, 23), generator=generator)
    labels[:, ::3] = -100
    return x, weight, bias, labels, normal(2, 23, 6), normal(44, 6), normal(44)


@pytest.mark.parametrize("heads", [True, False], ids=["heads", "logits"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("weight", [0.7, 1.0, 0.0], ids=lambda weight: f"weight-{weight}")
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_is_that_of_plain_pytorch(monkeypatch, name, weight, softcap, heads):
    """In fp32, of vocabularies of 40 and 44, which have 40 in common; by both heads, or where the teacher has none."""
    monkeypatch.setattr(head_sums, "CHUNK_BYTES", 5 * 4 * 40)
    settings = settings_of(name, temperature=2.0, weight=weight)
    found, expected = [], []
    for dtype, results in ((torch.float32, found), (torch.float64, expected)):
        x, weights, bias, labels, *teacher = tensors(dtype)
        learned = [tensor.requires_grad_() for tensor in (x, weights, bias)]
        t = 5.0 * torch.tanh(linear(*teacher) / 5.0)
        if results is found:
            given = (teacher[0], Head(*teacher[1:], 5.0)) if heads else (t, Head())
            items = (labels != -100).sum()
            sums = distillation(x, Head(weights, bias, softcap), labels, *given, settings, items, max_targets=32)
        else:
            z = linear(x, weights, bias).flatten(0, 1)
            capped = z if softcap is None else softcap * torch.tanh(z / softcap)
            sums = plain(capped, t.flatten(0, 1), labels.flatten(), settings)
        (3 * sums[0]).backward()
        results += [*(value.detach() for value in sums), *(tensor.grad for tensor in learned)]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [True, False], ids=["heads", "logits"])
def test_frozen_heads_get_no_gradient_and_logits_are_rows_too(heads):
    settings = settings_of("jsd_0.1")
    x, weight, _, labels, teacher_x, teacher_weight, _ = tensors(torch.float64)
    x.requires_grad_()
    teacher, items = Head(teacher_weight), torch.tensor(15)
    given = (teacher_x, teacher) if heads else (teacher.logits(teacher_x), Head())
    distillation(x, Head(weight), labels, *given, settings, items).loss.backward()
    z = linear(x.detach(), weight).requires_grad_()
    distillation(z, Head(), labels, teacher.logits(teacher_x), Head(), settings, items).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, z.grad @ weight)


def test_what_only_one_part_of_the_loss_needs_is_not_computed(monkeypatch):
    """A weight of 1 is the divergence alone: the gradient of the cross entropy, half of the work, is left out."""
    asked, products = [], []

    def watched(*arguments):
        asked.append(arguments[-1] is not None)
        return divergence_rows(*arguments)

    def counted(*arguments, **options):
        products.append(arguments)
        return mm(*arguments, **options)

    divergence_rows, mm = row_divergences.divergence_rows, torch.mm
    monkeypatch.setattr(row_divergences, "divergence_rows", watched)
    monkeypatch.setattr(torch, "mm", counted)
    x, weight, _, labels, teacher_x, teacher_weight, _ = tensors(torch.float32)
    for share in (1.0, 0.5):
        settings, items = settings_of("forward_kl", weight=share), torch.tensor(15)
        products.clear()
        distillation(x.requires_grad_(), Head(weight), labels, teacher_x, Head(teacher_weight), settings, items)
        # The logits of both heads.
        assert len(products) == 2
    assert asked == [False, True]


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
    spec = make_spec(folder, {"divergence": "jsd", "beta": 0.3}, kernels={"enabled": head == "fused"})
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
    monkeypatch.setattr("tasks.runtime.objectives.teacher_model.build_model", None)
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
        # Complete, and interrupted after its first step.
        for step in (None, 1):
            with pytest.raises(ValueError, match=r"objective\.teacher '.*' has other weights than when this run began"):
                train_spec(spec, step)
        # As of a teacher on the Hub, whose commit alone is compared before it is loaded.
        RunFolder.of(spec).initial_weights.unlink()
        with pytest.raises(
            ValueError, match=r"objective\.teacher '.*' has other weights than at the start .*\.teacher_revision"
        ):
            train_spec(spec)
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
