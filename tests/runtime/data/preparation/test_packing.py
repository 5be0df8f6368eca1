"""Rows: how documents share them, and that nothing leaks between documents that do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.runtime.data import collate, collate_flat, collator
from tasks.runtime.data.preparation.packing import pack

CAPACITY = 24


def _one_at_a_time(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing as the textbook has it."""
    rooms: list[int] = []
    rows = [0] * len(lengths)
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        fitting = [row for row, room in enumerate(rooms) if room >= lengths[document]]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rows[document] = min(fitting, key=lambda row: rooms[row])
        rooms[rows[document]] -= lengths[document]
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_packs_as_tightly_as_the_textbook(seed: int) -> None:
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 40))
    lengths = generator.integers(1, capacity + 1, int(generator.integers(0, 120)))
    ours, textbook = pack(lengths, capacity), _one_at_a_time(lengths.tolist(), capacity)
    fill = sorted(np.bincount(ours, weights=lengths))
    assert fill == sorted(np.bincount(np.array(textbook, dtype=np.int64), weights=lengths))
    assert all(tokens <= capacity for tokens in fill)
    assert np.array_equal(ours, pack(lengths, capacity))


def test_packing_a_million_documents_is_a_matter_of_sorting() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000)
    rows = pack(lengths, 2048)
    assert np.bincount(rows, weights=lengths).max() <= 2048
    assert lengths.sum() / ((rows.max() + 1) * 2048) > 0.99


def _model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


def _document(length: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)}


def _row(documents: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As `Rows` makes it: documents joined, then padding that is a document of its own."""
    padding = CAPACITY - sum(d["input_ids"].numel() for d in documents)
    pad = {"input_ids": torch.zeros(padding, dtype=torch.int64), "position_ids": torch.arange(padding)}
    pad["labels"] = torch.full((padding,), -100)
    return {name: torch.cat([*(d[name] for d in documents), pad[name]]) for name in pad}


ROWS = [[_document(9, 1), _document(1, 2), _document(11, 3)], [_document(24, 4)], [_document(2, 5), _document(5, 6)]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_packed_logits_and_loss_are_those_of_the_documents_alone(attention: str) -> None:
    model = _model(attention)
    batch = collate([_row(documents) for documents in ROWS])
    packed = model(**batch)
    total, targets = 0.0, 0
    for row, documents in enumerate(ROWS):
        starts = itertools.accumulate((d["input_ids"].numel() for d in documents), initial=0)
        for document, start in zip(documents, starts, strict=False):
            alone = model(input_ids=document["input_ids"][None])
            torch.testing.assert_close(
                packed.logits[row, start : start + alone.logits.shape[1]], alone.logits[0], atol=1e-5, rtol=1e-5
            )
            count = document["input_ids"].numel() - 1
            if count:
                total += count * float(
                    model(input_ids=document["input_ids"][None], labels=document["labels"][None]).loss
                )
            targets += count
    assert int((batch["labels"][:, 1:] != -100).sum()) == targets
    assert float(packed.loss) == pytest.approx(total / targets, rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_a_document_does_not_see_the_one_before(attention: str) -> None:
    model = _model(attention)
    first, other, second = _document(9, 1), _document(9, 7), _document(11, 3)
    rows = [collate([_row([head, second]), _row([_document(20, 8)])]) for head in (first, other)]
    logits = [model(**batch).logits for batch in rows]
    assert torch.equal(logits[0][0, 9:20], logits[1][0, 9:20])
    assert not torch.equal(logits[0][0, :9], logits[1][0, :9])
    # The same rows with position ids that do not restart: the test above would notice a leak.
    leaking = [model(**{**batch, "position_ids": torch.arange(CAPACITY).expand(2, -1)}).logits for batch in rows]
    assert not torch.equal(leaking[0][0, 9:20], leaking[1][0, 9:20])


@torch.inference_mode()
def test_flash_attention_gets_one_long_row() -> None:
    rows = [_row(documents) for documents in ROWS]
    assert collator("sdpa") is collator("eager") is collate
    assert collator("flash_attention_2") is collator("flash_attention_3") is collate_flat
    flat = collate_flat(rows)
    assert {name: tuple(tensor.shape) for name, tensor in flat.items()} == dict.fromkeys(flat, (1, 3 * CAPACITY))
    model = _model("sdpa")
    torch.testing.assert_close(model(**flat).logits.view(3, CAPACITY, -1), model(**collate(rows)).logits)


def test_rows_that_were_not_packed_are_padded_to_the_longest() -> None:
    batch = collate([_document(3, 1), _document(5, 2)])
    assert batch["labels"][0, 3:].tolist() == [-100, -100]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
