"""Attention by document has the gradients that masks give, for every family; no mask is made, and no host waits."""

import copy
import itertools
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig

from strata_kernels import patch_model
from strata_kernels.patch.table import ROWS
from strata_kernels.warmup import record
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.training import Training
from tasks.runtime.models.activations.activation_checkpointing import _full_graph, compile_layers
from tasks.runtime.models.attention import flash_attention_4 as flash_4
from tasks.runtime.models.attention.attention_choice import VARLEN, choose_attention
from tasks.runtime.models.attention.varlen_attention import (
    FAMILIES,
    VARLEN_INPUTS,
    VarlenLayout,
    _attention,
    add_cu_seqlens,
    packed_attention,
    set_varlen_attention,
    unsupported_reason,
    uses_varlen,
    with_cu_seqlens,
)
from tasks.runtime.models.build import build_planning_model, support_packed_rows, use_no_cache
from tasks.runtime.models.config import compute_dtype, load_config
from tasks.runtime.warmup.plan import plan_kernels
from tests.kernels.helpers.tiny_models import build_tiny
from tests.kernels.test_patch import VOCABULARY, build
from tests.runtime.helpers.comparable_runs import curve
from tests.runtime.helpers.train_only import train_spec

# Of two rows: documents of any length, of one token, and a row that is one document.
LENGTHS = {"several": ((5, 21, 11), (1, 36)), "one in a row": ((37,), (37,)), "both": ((37,), (9, 28))}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 5}
GPU = torch.device("cuda")
# Of the compiler's own look.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def batch_of(lengths):
    tokens = torch.randint(3, VOCABULARY, (len(lengths), sum(lengths[0])))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    return {"input_ids": tokens, "position_ids": positions}


def gradients(model, batch):
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def test_which_families_of_the_table_stay_under_masks():
    assert {name for name in ROWS if unsupported_reason(AutoConfig.for_model(name))} == {"gemma2", "vaultgemma"}
    assert set(ROWS) <= FAMILIES


def build_with_windows(family, **given):
    """A small model with a sliding window of 5 tokens, if the family tells attention of its windows.

    given: changes of the configuration, of those fields that it has.
    """
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = AutoConfig.for_model(family)
    changes = {"sliding_window": 5} if hasattr(config, "sliding_window") else {}
    if "sliding_attention" in (config.to_dict().get("layer_types") or ()):
        changes["layer_types"] = WINDOWS["layer_types"]
    given = {name: value for name, value in given.items() if hasattr(config, name)}
    model = build_tiny(family, **changes, **given)
    if unsupported_reason(model.config) is not None:
        model = build_tiny(family, **given)
    use_no_cache(model)
    support_packed_rows(model)
    # Without dropout.
    return model.eval()


def assert_gradients_are_those_under_masks(model, names=LENGTHS):
    for name in names:
        batch = batch_of(LENGTHS[name])
        model.set_attn_implementation(choose_attention("auto", model.config))
        expected = gradients(model, batch)
        set_varlen_attention(model)
        for ours, theirs in zip(gradients(model, add_cu_seqlens(batch)), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", sorted(FAMILIES - {"gemma2", "vaultgemma"}))
def test_gradients_are_those_under_masks(family):
    assert_gradients_are_those_under_masks(build_with_windows(family), ["several"])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "bamba", "lfm2"])
def test_gradients_of_rows_of_one_sequence_are_those_under_masks(family):
    assert_gradients_are_those_under_masks(build_with_windows(family))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_dropout_of_attention_is_of_training(lengths):
    model, batch = build("llama", use_cache=False), add_cu_seqlens(batch_of(lengths))
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    set_varlen_attention(model)
    found = [model.train(training)(**batch).logits for training in (True, False, False)]
    assert torch.equal(found[1], found[2]) and not torch.allclose(found[0], found[1], atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16], ids=["whole", "window"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("heads", "shared", "size", "of_values"), [(4, 2, 64, 64), (6, 6, 128, 128), (8, 1, 96, 96), (4, 4, 192, 128)]
)
def test_on_a_gpu_it_is_as_exact_as_under_a_mask(heads, shared, size, of_values, sinks, lengths, window):
    bounds = add_cu_seqlens(batch_of(lengths))
    longest = bounds["max_seqlen"].shape[0]
    documents = VarlenLayout(bounds["sequence_starts"].to(GPU), bounds["cu_seqlens"].to(GPU), (longest, longest))
    shapes = [(2, 37, *ends) for ends in ((heads, size), (shared, size), (shared, of_values), (heads, of_values))]

    def found(given, dtype, dropout):
        query, key, value, upstream, *scores = (x.to(torch.bfloat16).to(dtype).requires_grad_() for x in given)
        # Dropout of nearly nothing asks for the mask.
        attended = packed_attention(query, key, value, documents, None, window, dropout, *scores)
        return [attended.detach(), *torch.autograd.grad(attended, [query, key, value, *scores], upstream)]

    ways = [(torch.float64, 1e-30), (torch.bfloat16, 0.0), (torch.bfloat16, 1e-30)]
    draws = []
    # Of the few gradients of sinks, masks can have luck in one draw.
    for seed in range(8):
        torch.manual_seed(seed)
        given = [torch.randn(shape, device=GPU, dtype=torch.float64).transpose(1, 2) for shape in shapes]
        given += [torch.randn(heads, device=GPU, dtype=torch.float64)] * sinks
        draws.append([found(given, *way) for way in ways])
    for results in zip(*(zip(*draw, strict=True) for draw in draws), strict=True):
        true, ours, masked = (torch.stack(each) for each in zip(*results, strict=True))
        assert (ours - true).norm() <= 2 * (masked - true).norm() + 1e-6 * true.norm()


@pytest.mark.parametrize(
    ("sections", "device", "model", "goes"),
    [
        ({}, "cuda", "llama", True),
        ({}, "cpu", "llama", False),
        ({"data": {"packing": False}}, "cuda", "llama", True),
        ({"model": {"dtype": "float32"}}, "cuda", "llama", False),
        (
            {
                "model": {"dtype": "float32"},
                "parallel": {"type": "fsdp", "compute_dtype": "bfloat16"},
                "topology": {"nproc_per_node": 2},
            },
            "cuda", "llama", True,
        ),
        ({"model": {"attention": "eager"}}, "cuda", "llama", False),
        (
            {"parallel": {"type": "fsdp", "context_parallel": 2}, "topology": {"nproc_per_node": 2}},
            "cuda", "llama", False,
        ),
        ({}, "cuda", "gemma2", False),
        ({}, "cuda", "gpt2", True),
        ({}, "cuda", "opt", False),
        ({}, "cuda", "gpt_oss", True),
        ({"model": {"attention": "eager"}}, "cuda", "gpt_oss", False),
    ],
)  # fmt: skip
def test_which_models_go_by_document(sections, device, model, goes):
    spec = RunSpec.model_validate({**sections, "model": {"dtype": "bfloat16", **sections.get("model", {})}})
    assert uses_varlen(spec.model, spec.parallel, AutoConfig.for_model(model), torch.device(device)) is goes


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen2_moe", WINDOWS),
        ("smollm3", WINDOWS),
        ("phimoe", {"sliding_window": 5}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("llama", {"is_causal": False}),
    ],
    ids=["windows of masks alone", "windows that are off", "a window of masks alone", "bidirectional", "not causal"],
)
def test_a_model_that_tells_masks_alone_stays_as_it_is(model, changes):
    spec = RunSpec.model_validate({"model": {"dtype": "bfloat16"}})
    assert uses_varlen(spec.model, spec.parallel, AutoConfig.for_model(model), torch.device("cuda"))
    assert not uses_varlen(spec.model, spec.parallel, AutoConfig.for_model(model, **changes), torch.device("cuda"))


def make_spec(output, name, framework="torch", **sections):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"dtype": "float32"},
            "data": {"sequence_length": 128, "max_samples": 60},
            "training": {"steps": 3, "micro_batch_size": 2, **sections.pop("training", {})},
            "tracking": {"report_to": [], "log_every": 1},
            "runtime": {"framework": framework},
            **sections,
        }
    )


@compiles
@pytest.mark.parametrize(
    ("framework", "training"),
    [("hf", {}), ("lightning", {}), ("torch", {"compile": True})],
    ids=["hf", "lightning", "torch, compiled"],
)
def test_a_run_has_the_losses_that_it_has_under_masks(output, framework, training, monkeypatch, caplog):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    names = (f"{framework}-{way}" for way in ("masked", "ours"))
    masked, ours = (make_spec(output, name, framework, training=training) for name in names)
    train_spec(masked)
    monkeypatch.setattr("tasks.runtime.objectives.training_step.uses_varlen", lambda *_: True)
    # It would look at the positions, for which a host waits for its GPU.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", None)
    caplog.set_level("INFO")
    train_spec(ours)
    assert caplog.messages.count("attention: varlen, without masks") == 1
    for point, expected in zip(curve(ours), curve(masked), strict=True):
        assert point == pytest.approx(expected, rel=1e-5)


@compiles
def test_two_graphs_are_compiled_however_many_documents_there_are(monkeypatch):
    """One where no row has more than one, and one for all else, however long the longest is."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    # Without memory: on the CPU itself attention goes by a mask.
    with torch.device("meta"):
        model = build("llama", use_cache=False).bfloat16()
    set_varlen_attention(model)
    compile_layers(model, Training(compile=True))
    for several, longest in itertools.product((1, 2, 5, 9), (600, 300, 100)):
        rows = [(longest, *itertools.repeat(50, several), 1200 - longest - 50 * several)] * 2
        for lengths in (rows, [(1200,), (1200,)]):
            batch = {name: tensor.to("meta") for name, tensor in add_cu_seqlens(batch_of(lengths)).items()}
            model(**batch)[0].sum().backward()
    assert len(graphs) == 2


@compiles
def test_slices_of_rows_with_any_number_of_documents_are_one_graph():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, cu_seqlens, late_cu_seqlens: x + cu_seqlens[0, -1] * late_cu_seqlens[1, -1],
        backend=count,
        dynamic=False,
    )
    for documents in range(2, 14):
        early, late = (torch.arange(number + 1).expand(2, -1).contiguous() for number in (documents, 20 - documents))
        found = _full_graph(compiled)(torch.ones(1), cu_seqlens=early, late_cu_seqlens=late)
        assert found.item() == documents * (20 - documents) + 1
    assert len(graphs) == 1


def test_a_student_and_its_teacher_are_planned(tmp_path):
    for name in ("qwen3", "llama"):
        build(name).config.save_pretrained(tmp_path / name)
    alone, taught = (
        RunSpec.model_validate(
            {
                "model": {"name": str(tmp_path / "qwen3"), "dtype": "bfloat16"},
                "data": {"sequence_length": 37},
                "objective": objective,
            }
        )
        for objective in ({"type": "pretrain"}, {"type": "distill", "teacher": str(tmp_path / "llama")})
    )
    rotations = [
        {item for item in plan_kernels(spec).specializations if "rope" in item.to_dict()["kernel"]}
        for spec in (alone, taught)
    ]
    assert rotations[0] and rotations[0] <= rotations[1]


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "granitemoehybrid", "qwen3_next"])
def test_other_families_are_planned(family, tmp_path):
    """Sinks, values narrower than keys, and layers that must not see where sequences end."""
    build_tiny(family).config.save_pretrained(tmp_path)
    sections = {"model": {"name": str(tmp_path), "dtype": "bfloat16"}, "data": {"sequence_length": 37}}
    assert plan_kernels(RunSpec.model_validate(sections)).specializations


def test_smollm3_tells_windows_that_are_on():
    model = build("smollm3", use_sliding_window=True, **WINDOWS)
    assert unsupported_reason(model.config) is None
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [5, None]


def test_the_warm_up_plans_for_it(tmp_path):
    """Gradients of keys lie in memory otherwise than under a mask, which kernels know for a length such as this one."""
    build("qwen3").config.save_pretrained(tmp_path)
    sections = {"name": str(tmp_path), "dtype": "bfloat16"}
    spec = RunSpec.model_validate({"model": sections, "data": {"sequence_length": 37}})
    planned = set(plan_kernels(spec).specializations)
    model = build_planning_model(spec.model, compute_dtype(spec.model, spec.parallel))
    patch_model(model)
    set_varlen_attention(model)
    rows = spec.training.micro_batch_size
    tokens = torch.zeros(rows, 37, dtype=torch.int64, device="meta")
    launched = []
    # One document in each row; several.
    for documents in (rows, rows + 2):
        ends = torch.zeros(2, documents + 1, dtype=torch.int32, device="meta")
        bounds = {"sequence_starts": tokens, "cu_seqlens": ends, "max_seqlen": torch.empty(37, 0, device="meta")}
        batch = {"input_ids": tokens, "position_ids": tokens, **bounds}
        launched.append(set(record(lambda batch=batch: gradients(model, batch)).specializations))
    assert all(each <= planned for each in launched)
    masked = spec.model_copy(update={"model": Model(**sections, attention="eager")})
    assert not launched[1] <= set(plan_kernels(masked).specializations)


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(FAMILIES - {"gemma2", "vaultgemma"}))
def test_on_a_gpu_every_family_is_as_exact_as_under_masks(family):
    """The kernels, and what a family gives them in bfloat16."""
    torch.manual_seed(0)
    # Every token goes to all experts, two of Jamba's and four of others: rounding would make a router choose others.
    chosen = dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 4)
    model = build_with_windows(family, **({} if family == "jamba" else chosen))
    model, batch = model.to(GPU).bfloat16(), batch_of(LENGTHS["several"])
    bounds = {name: x.to(GPU) for name, x in add_cu_seqlens(batch).items()}
    batch = {name: x.to(GPU) for name, x in batch.items()}
    in_fp64 = copy.deepcopy(model).double()
    # The others of experts have no fp64.
    in_fp64.set_experts_implementation("eager")
    exact = gradients(in_fp64, batch)
    masked = gradients(model, batch)
    set_varlen_attention(model)
    ours = gradients(model, bounds)

    def distance(found):
        return torch.stack([(a - b).norm() for a, b in zip(found, exact, strict=True)]).norm()

    assert distance(ours) <= 2 * distance(masked) + 1e-3 * torch.stack([x.norm() for x in exact]).norm()


@pytest.mark.gpu
def test_on_a_gpu_a_run_goes_by_document_and_its_kernels_are_warm(output, monkeypatch):
    spec = make_spec(output, "warm", model={"dtype": "bfloat16"})
    assert uses_varlen(spec.model, spec.parallel, load_config(spec.model), GPU)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", None)
    record = train_spec(spec)
    assert record.status == "complete" and record.warmup["later_compiles"] == 0


@pytest.mark.skipif(flash_4.installed_version() is None, reason="needs a Hopper GPU and flash-attn-4")
# The package's and its compiler's own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", [None, 16], ids=["whole", "window"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 2, 64), (6, 6, 128), (8, 1, 128)])
def test_flash_attention_4_is_as_exact_as_under_a_mask(heads, shared, size, sinks, lengths, window):
    bounds = {name: x.to(GPU) for name, x in add_cu_seqlens(batch_of(lengths)).items() if name in VARLEN_INPUTS}
    shapes = [(2, 37, count, size) for count in (heads, shared, shared, heads)]
    exact = [torch.randn(shape, device=GPU, dtype=torch.float64) for shape in shapes]
    of_heads = torch.randn(heads, device=GPU, dtype=torch.float64) if sinks else None

    def found(dtype, dropout=0.0):
        *inputs, upstream = (x.to(torch.bfloat16).to(dtype) for x in exact)
        inputs = [x.transpose(1, 2).requires_grad_() for x in inputs]
        assert flash_4.takes(inputs[0], inputs[2], dropout) == (dtype == torch.bfloat16 and not dropout)
        settings = {"flash_4": True, "sliding_window": window, "dropout": dropout}
        if sinks:
            inputs.append(of_heads.to(torch.bfloat16).to(dtype).requires_grad_())
            settings["s_aux"] = inputs[3]
        attended, _ = _attention(None, *inputs[:3], None, **settings, **bounds)
        return [attended.detach(), *torch.autograd.grad(attended, inputs, upstream)]

    # Without cuDNN's or FlashAttention 2's help: dropout of nearly nothing asks for the mask.
    for mine, theirs, expected in zip(
        found(torch.bfloat16), found(torch.bfloat16, 1e-30), found(torch.float64, 1e-30), strict=True
    ):
        assert (mine - expected).norm() <= 2 * (theirs - expected).norm() + 1e-6 * expected.norm()


class _PlainPackage:
    """What flash-attn-4 is asked for, in products and a softmax. Autograd cannot see into an operator."""

    def _flash_attn_fwd(self, q, k, v, *, return_lse, **settings):
        assert return_lse
        found = [(s.softmax(-1) @ wide[2], s.logsumexp(-1)) for _, wide, s, _ in self._sequences(q, k, v, **settings)]
        results, sums = zip(*found, strict=True)
        sums = torch.cat(sums, -1).float()
        return self._joined(results, q), sums if q.dim() == 4 else sums[0], None, None, None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, deterministic, **settings):
        """By the logarithms of the sums and by the result, as flash attention does."""
        assert not deterministic and lse.dtype == torch.float32 and out.shape == dout.shape
        groups, found = q.shape[-2] // k.shape[-2], []
        for own, wide, scores, scale in self._sequences(q, k, v, **settings):
            above, sums = self._cut(dout, own), lse[..., own].reshape(-1, lse.shape[-2], own.stop - own.start, 1)
            p, of_rows = (scores - sums).exp(), (above * self._cut(out, own)).sum(-1, keepdim=True)
            of_scores = p * (above @ wide[2].mT - of_rows) * scale
            shared = [x.unflatten(1, (-1, groups)).sum(2) for x in (of_scores.mT @ wide[0], p.mT @ above)]
            found.append((of_scores @ wide[1], *shared))
        return (*(self._joined(parts, x) for parts, x in zip(zip(*found, strict=True), (q, k, v), strict=True)), None)

    def _sequences(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size_left
    ):
        """Where each is, its queries, keys and values, [B, H, T, D], its scores, and their scale."""
        assert causal
        ends = [0, q.shape[-3]]
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q.tolist()
            assert cu_seqlens_k.tolist() == ends and max_seqlen_q == max_seqlen_k >= cu_seqlens_q.diff().max()
        for begin, end in itertools.pairwise(ends):
            own = slice(begin, end)
            wide = [self._cut(x, own).repeat_interleave(q.shape[-2] // x.shape[-2], 1) for x in (q, k, v)]
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = (distance >= 0) & (distance <= (end if window_size_left is None else window_size_left))
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            scores = (wide[0] @ wide[1].mT * scale).masked_fill(~seen, -torch.inf)
            yield own, wide, scores, scale

    @staticmethod
    def _cut(x, own):
        return x[..., own, :, :].reshape(-1, own.stop - own.start, *x.shape[-2:]).transpose(1, 2)

    @staticmethod
    def _joined(parts, like):
        return torch.cat([x.transpose(1, 2) for x in parts], 1).reshape(like.shape)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss", "granite_swa"])
def test_flash_attention_4_gets_what_masks_say(family, monkeypatch):
    """Its windows, sequences, scales, grouped heads and sinks; the kernels themselves need a GPU."""
    monkeypatch.setattr(flash_4, "_package", _PlainPackage)
    monkeypatch.setattr("tasks.runtime.models.attention.varlen_attention.takes", lambda query, value, dropout: True)
    monkeypatch.setattr("tasks.runtime.models.attention.varlen_attention.installed_version", lambda: "4")
    assert_gradients_are_those_under_masks(build_with_windows(family))


def test_flash_attention_4_is_planned_without_the_package(monkeypatch):
    """The warm-up plans on the meta device: results and gradients have the layout that the package gives them."""
    monkeypatch.setattr(flash_4, "_package", None)
    q, k = (torch.empty(2, heads, 37, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2))
    for lengths in LENGTHS.values():
        bounds = {name: x.to("meta") for name, x in add_cu_seqlens(batch_of(lengths)).items() if name in VARLEN_INPUTS}
        attended, _ = _attention(None, q, k, k, None, flash_4=True, **bounds)
        assert attended.shape == (2, 37, 4, 64) and attended.is_contiguous()
        found = torch.autograd.grad(attended, [q, k], torch.empty_like(attended))
        assert [x.shape for x in found] == [q.shape, k.shape]
        assert all(x.transpose(1, 2).is_contiguous() for x in found)


@pytest.mark.parametrize(("fields", "installed", "used"), [
    ({"head_dim": 128}, "4.0.0b36", "4.0.0b36"),
    # DeepSeek V3, whose values have 128 features and keys 192.
    ({"model_type": "deepseek_v3", "qk_rope_head_dim": 64}, "4.0.0b36", None),
    ({"head_dim": 256}, "4.0.0b36", None),
    # Layers of Gemma 4 have heads of two sizes.
    ({"model_type": "gemma4_text", "head_dim": 128, "global_head_dim": 512}, "4.0.0b36", None),
    ({"model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128}, "4.0.0b36", "4.0.0b36"),
    ({"head_dim": 64, "attention_dropout": 0.1}, "4.0.0b36", None),
    ({"head_dim": 64}, "4.0.0b35", None),
    ({"head_dim": 64}, None, None),
])  # fmt: skip
def test_flash_attention_4_is_used_for_what_it_was_tested_with(fields, installed, used, monkeypatch, caplog):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(flash_4, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    flash_4.installed_version.cache_clear()
    flash_4.tested_version.cache_clear()
    try:
        assert flash_4.usable_version(AutoConfig.for_model(**{"model_type": "llama"} | fields)) == used
    finally:
        flash_4.installed_version.cache_clear()
        flash_4.tested_version.cache_clear()
    assert ("4.0.0b35 is not used: 4.0.0b36 is known to be exact" in caplog.text) == (installed == "4.0.0b35")


def test_without_the_package_or_its_gpu_pytorch_attends():
    set_varlen_attention(build(head_dim=64))
    used = flash_4.installed_version() is not None
    assert AttentionInterface()[VARLEN].keywords == {"flash_4": used}
    assert torch.cuda.is_available() or not used


def test_bounds_are_those_of_the_positions():
    batch = with_cu_seqlens(lambda rows: batch_of(rows))(((3, 2), (5,)))
    assert batch["sequence_starts"].tolist() == [[0, 0, 0, 3, 3], [0] * 5]
    assert batch["cu_seqlens"].tolist() == [[0, 3, 5, 10]] * 2
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"].shape == (5, 0)
    rooms = [add_cu_seqlens(batch_of(((length, 1000 - length),)))["max_seqlen"].shape[0] for length in (500, 744, 900)]
    assert rooms == [512, 1000, 1000]
