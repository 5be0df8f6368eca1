"""Matrices and rows cut over processes: what cannot be is refused, and what is has the gradients of the whole."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from strata_kernels.patch.structure import activate_and_project
from strata_platform.context_parallel import exchanges_heads
from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Model
from tasks.runtime.data.context_shards import cu_seqlens, shard_batch
from tasks.runtime.parallel import context
from tasks.runtime.parallel.context import require_context_parallel_support
from tasks.runtime.parallel.parallel_linear import ColumnParallelLinear, RowParallelLinear, make_parallel
from tasks.runtime.parallel.tensor import require_tensor_parallel_support
from tasks.runtime.process.ranks import Processes
from tests.runtime.helpers.train_forked import launch

GRPO = {"type": "grpo", "rewards": [{"function": "numeric"}], "group_size": 7}
PROMPTS = {"source": "d", "sequence_length": 1024}
ROWS = {"parallel": {"tensor_parallel": 1, "context_parallel": 2}}


def spec_of(processes=2, **sections):
    parallel = {"type": "fsdp", "tensor_parallel": 2, **sections.pop("parallel", {})}
    return RunSpec.model_validate({"parallel": parallel, "topology": {"nproc_per_node": processes}, **sections})


def test_a_cut_model_has_the_gradients_of_the_whole_one():
    launch(module="tests.runtime.helpers.split_families")


def test_what_is_cut_by_rows_takes_the_activation_before_it_along(monkeypatch):
    linear = torch.nn.Linear(2, 2)
    linear.__class__ = RowParallelLinear
    monkeypatch.setattr(RowParallelLinear, "project_activation", lambda self, activate: (self, activate))
    assert activate_and_project(activate := object(), linear) == (linear, activate)


def test_unequal_parts_are_refused():
    mesh = SimpleNamespace(size=lambda: 2)
    for kind, dimension in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
        shape = [4, 4]
        shape[dimension] = 3
        linear = torch.nn.Linear(shape[1], shape[0])
        with pytest.raises(
            ValueError, match=rf"tensor_parallel 2 does not divide dimension {dimension} .*\[{shape[0]}, "
        ):
            make_parallel(linear, kind, mesh)
        assert type(linear) is torch.nn.Linear


def test_processes_of_a_group_read_the_same_rows():
    spec = spec_of(16, parallel={"replicas": 2, "context_parallel": 2}, training={"micro_batch_size": 3})
    assert (spec.dp_size, spec.rows_per_step) == (4, 12)
    places = [Processes(rank, rank, 16, tp_size=2, cp_size=2) for rank in range(16)]
    assert [place.dp_rank for place in places] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [place.cp_rank for place in places] == [0, 0, 1, 1] * 4
    assert [place.dp_cp_rank for place in places] == [rank // 2 for rank in range(16)]


def test_slices_of_a_row_make_the_row():
    """Two documents, of 5 and 8 tokens, and what fills the row up to 16 tokens for eight chunks."""
    tokens = torch.arange(13)[None]
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    slices = [shard_batch(batch, Processes(rank, rank, 4, cp_size=4)) for rank in range(4)]
    assert slices[0]["position_ids"].tolist() == [[0, 1, 1, 2]]
    whole = {
        name: torch.cat([*(part[name][:, :2] for part in slices), *(part[name][:, 2:] for part in slices[::-1])], dim=1)
        for name in ("input_ids", "next_labels", "sequence_starts")
    }
    assert whole["input_ids"].tolist() == [[*range(13), 0, 0, 0]]
    assert whole["next_labels"].tolist() == [[*range(1, 13), *[-100] * 4]]
    assert whole["sequence_starts"].tolist() == [[0] * 5 + [5] * 8 + [13] * 3]


def test_exchanged_slices_are_the_row_and_back():
    rows = torch.arange(2 * 16 * 3).view(2, 16, 3)
    slices = context._in_slices(rows, 4)
    for rank, (early, late) in enumerate(((0, 7), (1, 6), (2, 5), (3, 4))):
        own = torch.cat([rows[:, 2 * number : 2 * number + 2] for number in (early, late)], dim=1)
        assert torch.equal(slices[rank], own)
    assert torch.equal(context._in_row_order(slices, 2), rows)


@pytest.mark.parametrize(
    ("queries", "keys", "cheaper_from"),
    [
        # Llama 3.1 8B, without grouped queries, and one head of keys, which ranks would have to share.
        pytest.param(32, 8, 8, id="grouped"),
        pytest.param(32, 32, 4, id="as many keys"),
        pytest.param(32, 1, None, id="one head of keys"),
        pytest.param(14, 2, None, id="no power of two divides them"),
    ],
)
def test_the_method_that_sends_fewer_bytes_is_taken(queries, keys, cheaper_from):
    for ways in (2, 4, 8, 16, 32):
        taken = exchanges_heads("auto", queries, keys, ways)
        assert taken == (cheaper_from is not None and ways >= cheaper_from), ways


@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("llama", {"num_key_value_heads": 3}),
        # Every sixth layer has other heads, which transformers tells for each layer alone.
        ("gemma4_text", {"num_key_value_heads": 2, "num_global_key_value_heads": 3, "attention_k_eq_v": True}),
    ],
    ids=["one for all", "of some layers"],
)
def test_heads_that_ranks_cannot_divide_are_refused(family, heads, tmp_path):
    AutoConfig.for_model(family, num_attention_heads=6, hidden_size=48, **heads).save_pretrained(tmp_path)
    parallel = {"tensor_parallel": 1, "context_parallel": 2, "context_parallel_method": "ulysses"}
    with pytest.raises(ValueError, match=r"6 heads of queries and 3 of keys in each; set it to 'all_gather'"):
        require_context_parallel_support(Model(name=str(tmp_path)), spec_of(**{"parallel": parallel}).parallel)
    parallel["context_parallel_method"] = "auto"
    require_context_parallel_support(Model(name=str(tmp_path)), spec_of(**{"parallel": parallel}).parallel)


def test_attention_by_document_sees_what_the_mask_lets_it():
    """Rows of two and of four documents: the last of a document's keys are its queries, and each sees those before."""
    lengths = ((5, 11), (2, 1, 9, 4))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    begins = torch.arange(16) - positions
    for number in range(4):
        queries, keys = cu_seqlens(begins, number, 4).tolist()
        assert (queries[-1], keys[-1]) == (2 * 4, 2 * 4 * (number + 1))
        seen = torch.zeros(queries[-1], keys[-1], dtype=torch.bool)
        for q, q_end, k, k_end in zip(queries, queries[1:], keys, keys[1:], strict=False):
            seen[q:q_end, k:k_end] = torch.ones(q_end - q, k_end - k).tril(k_end - k - (q_end - q)).bool()
        own, place = torch.arange(number * 4, number * 4 + 4), torch.arange(number * 4 + 4)
        masks = (place >= begins[:, own, None]) & (place <= own[:, None])
        assert torch.equal(seen, torch.block_diag(*masks.float()).bool())
    # What none of the last tokens sees is one document of a row, however many there are.
    assert keys == [0, 5, 16, 28, 32]


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("falcon_h1", {}, r"has layers other than attention that process a row in order; set parallel\.context"),
        # Its text configuration is in a part of its own.
        ("qwen3_5", {}, r"has layers other than attention that process a row in order"),
        ("gpt_oss", {}, r"has attention that PyTorch's sdpa does not compute"),
        ("gemma2", {}, r"caps the scores of attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
            r"rope_type 'dynamic'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"rope_type 'dynamic'",
        ),
    ],
)
def test_a_model_that_needs_whole_rows_is_refused(tmp_path, model_type, changes, message):
    AutoConfig.for_model(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        require_context_parallel_support(Model(name=str(tmp_path)), spec_of(**ROWS).parallel)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"parallel": {"tensor_parallel": 3}},
            r"tensor_parallel: 3 x parallel\.context_parallel 1 does not divide the 2",
        ),
        ({"parallel": {"context_parallel": 2}}, r"tensor_parallel: 2 x parallel\.context_parallel 2 does not divide"),
        ({"parallel": {"replicas": 2}}, r"replicas: 2 does not divide the 1 groups of 2 processes"),
        (
            {"adapter": {"type": "lora"}, "model": {"name": "m"}},
            r"tensor_parallel.*but not those of adapter\.type 'lora'",
        ),
        ({"optimizer": {"type": "muon"}}, r"tensor_parallel.*'muon' needs whole ones"),
        (
            {"objective": {"type": "custom", "object": "own:Loss"}, "data": {"source": "d"}},
            r"tensor_parallel.*objective\.type 'custom' may compute logits",
        ),
        (
            {"objective": GRPO, "data": PROMPTS, "training": {"micro_batch_size": 7, "gradient_accumulation_steps": 1}},
            r"tensor_parallel: 2 processes share the answers .*accumulation_steps 7; set",
        ),
        (
            {"objective": {**GRPO, "generation": {"engine": "vllm"}}, "data": PROMPTS},
            r"tensor_parallel: 2 was tested with the embedded engine alone",
        ),
        ({"objective": {"type": "distill"}}, r"tensor_parallel.*without objective\.teacher the likeliest tokens"),
        (
            {**ROWS, "objective": {"type": "dpo"}, "data": {"source": "d"}},
            r"context_parallel.*'dpo' compares whole ones",
        ),
        ({**ROWS, "model": {"name": "m", "attention": "eager"}}, r"context_parallel.*set model\.attention to 'auto'"),
    ],
)
def test_the_spec_refuses_what_cannot_be(sections, message):
    with pytest.raises(SpecError, match=message):
        spec_of(**sections)


@pytest.mark.parametrize(
    ("model_type", "sizes", "ways", "message"),
    [
        (
            "llama",
            {"num_attention_heads": 2, "num_key_value_heads": 2},
            4,
            r"4 does not divide num_attention_heads 2 .*; set it to one of 1, 2",
        ),
        ("qwen2", {"num_key_value_heads": 2}, 4, r"4 does not divide num_key_value_heads 2 .*; set it to one of 1, 2"),
        ("phi3", {"intermediate_size": 33}, 2, r"2 does not divide intermediate_size 33"),
        ("falcon_h1", {}, 2, r"for model type 'falcon_h1' does not exist; set parallel\.tensor_parallel to 1"),
        ("qwen3_5_text", {}, 2, r"shards only the columns of linear_attn, whose gradients would be incomplete; set"),
    ],
)
def test_the_model_refuses_before_its_weights_are_read(tmp_path, model_type, sizes, ways, message):
    base = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 32, "vocab_size": 65}
    AutoConfig.for_model(model_type, **{**base, **sizes}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        require_tensor_parallel_support(
            Model(name=str(tmp_path)), spec_of(4, parallel={"tensor_parallel": ways}).parallel
        )
