"""What a multimodal model takes beside tokens and their positions: the inputs of images or audio, and of M-RoPE."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_kernels.patch.structure import original_class, unwrap
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import (
    IGNORE_INDEX,
    MEDIA_COLUMNS,
    MODEL_INPUT,
    ROPE_COLUMNS,
    TOKENIZER,
    Batch,
    Row,
    document_of,
)
from tasks.runtime.data.media.media_processor import MediaProcessor, saved_processor
from tasks.runtime.models.media.cross_attention import cross_attention_inputs, has_cross_attention
from tasks.runtime.models.media.image_masks import types_are_prompts
from tasks.runtime.models.media.multimodal import has_rope_index

# Whether a token is of an image, or of an answer, under the names of different families.
_TYPES = ("token_type_ids", "mm_token_type_ids")


def with_model_inputs(
    collate: Callable[[list[Row]], Batch], model: nn.Module, data: PreparedData | None
) -> Callable[[list[Row]], Batch]:
    """Make `collate` add to its batches what a multimodal model takes beside tokens and their positions.

    `data`: whose processor prepares images or audio; without any in it, or without it, there is nothing to prepare.
    """
    base: Any = unwrap(model)
    processor = None
    if data is not None and data.manifest.has_media:
        processor = saved_processor(data.folder / TOKENIZER, data.tokenizer())
        assert processor is not None, f"{data.folder} has images or audio and no processor"
    rope_index = base.model.get_rope_index if has_rope_index(base) else None
    if processor is None and rope_index is None and not types_are_prompts(base.config):
        return collate
    return _Collator(collate, base, processor, rope_index)


class _Collator:
    """A collate function with the inputs of images or audio.

    Attributes of a batch whose names begin with MODEL_INPUT are passed to the model under the rest of the name.
    """

    def __init__(
        self,
        collate: Callable[[list[Row]], Batch],
        model: PreTrainedModel,
        processor: MediaProcessor | None,
        rope_index: Callable[..., Any] | None,
    ) -> None:
        self._collate, self._processor, self._rope_index = collate, processor, rope_index
        self._dtype = model.dtype
        self._prompts, self._crosses = types_are_prompts(model.config), has_cross_attention(model.config)
        self._example: tuple[Tensor, Tensor] | None = None
        self._accepted = set(inspect.signature(original_class(model).forward).parameters)
        self._rope_takes = set(inspect.signature(rope_index).parameters) if rope_index else set()

    def __call__(self, rows: list[Row]) -> Batch:
        if self._processor is not None and not any("media" in row for row in rows):
            # Every batch runs the tower, so that sharded weights are gathered, and moments decay, on all ranks alike.
            rows = [*rows, self._unlearned_row(rows[0])]
        if self._crosses:
            # A row's tokens may attend to all of its images.
            rows = [document_of(row, number) for row in rows for number in range(len(_documents(row)))]
        inputs: dict[str, Any] = {}
        if self._processor is not None:
            inputs = self._processor.inputs([chat for row in rows for chat in _media_of(row, self._processor)])
        if self._rope_index is not None:
            rows = self._with_rope_positions(rows, inputs)
        batch = self._collate([{name: row[name] for name in row if name not in MEDIA_COLUMNS} for row in rows])
        if self._crosses and self._processor is not None:
            inputs = cross_attention_inputs(inputs, batch["input_ids"], self._processor.ids[0])
        for name, tensor in inputs.items():
            if name in self._accepted:
                floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
                batch[MODEL_INPUT + name] = tensor.to(self._dtype) if floating else tensor
        if self._prompts:
            batch[MODEL_INPUT + "token_type_ids"] = answers(batch["labels"], batch["position_ids"])
        elif self._processor is not None:
            stands = self._types(batch["input_ids"])
            batch |= {MODEL_INPUT + name: stands for name in _TYPES if name in self._accepted}
        return batch

    def _unlearned_row(self, like: Row) -> Row:
        """A row with the tokens of an image or audio and nothing that is learned."""
        assert self._processor is not None
        if self._example is None:
            content, numbers = self._processor.example()
            self._example = torch.tensor(list(content), dtype=torch.uint8), torch.tensor(numbers)
        example, ids = self._example
        row = {name: torch.zeros(ids.numel(), dtype=tensor.dtype) for name, tensor in like.items()}
        row |= {
            "input_ids": ids,
            "labels": torch.full_like(ids, IGNORE_INDEX),
            "position_ids": torch.arange(ids.numel()),
        }
        sizes = torch.tensor([example.numel()]), torch.tensor([1])
        return row | dict(zip(MEDIA_COLUMNS, (example, *sizes), strict=True))

    def _types(self, ids: Tensor) -> Tensor:
        """1 for the tokens of images or audio, 0 for others."""
        known = self._processor.ids if self._processor else []
        return torch.isin(ids, torch.tensor(known, dtype=ids.dtype)).long()

    def _with_rope_positions(self, rows: list[Row], inputs: dict[str, Any]) -> list[Row]:
        """The rows with the columns of ROPE_COLUMNS, computed by the model for each document alone."""
        first = 0
        found = []
        for row in rows:
            positions = []
            for begin, end, count in _documents(row):
                ids = row["input_ids"][begin:end]
                positions.append(self._positions(ids, inputs, first, first + count))
                first += count
            found.append(row | dict(zip(ROPE_COLUMNS, torch.cat(positions, dim=1), strict=True)))
        return found

    def _positions(self, ids: Tensor, inputs: dict[str, Any], first: int, last: int) -> Tensor:
        """[3, T]: positions of a document whose images are those from `first` to before `last`."""
        if first == last:
            return torch.arange(ids.numel()).expand(3, -1)
        assert self._rope_index is not None
        arguments = {
            "input_ids": ids[None],
            "mm_token_type_ids": self._types(ids)[None].int(),
            **{name: tensor[first:last] for name, tensor in inputs.items() if name in self._rope_takes},
        }
        positions, _ = self._rope_index(**{k: v for k, v in arguments.items() if k in self._rope_takes})
        return positions[:, 0]


def _documents(row: Row) -> list[tuple[int, int, int]]:
    """Where each document of a row begins and ends, and how many images or sounds it has."""
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    counts = row["document_media"].tolist() if "document_media" in row else []
    counts += [0] * (len(starts) - len(counts))
    return list(zip(starts, [*starts[1:], row["position_ids"].numel()], counts, strict=True))


def answers(labels: Tensor, position_ids: Tensor) -> Tensor:
    """[B, T]: 0 for the tokens of a sequence before its first label, and 1 from there on."""
    places = torch.arange(labels.shape[1])
    begins = places - position_ids
    # The latest label so far lies in the sequence.
    return ((places * (labels != IGNORE_INDEX)).cummax(dim=1).values > begins).long()


def _media_of(row: Row, processor: MediaProcessor) -> list[list[Any]]:
    """The pictures or sounds of each document of a row that has some."""
    if "media" not in row:
        return []
    content, sizes, counts = (row[name] for name in MEDIA_COLUMNS)
    left = iter(content.split(sizes.tolist()))
    return [[processor.open(next(left).numpy().tobytes()) for _ in range(count)] for count in counts.tolist() if count]


def sample_inputs(processor: MediaProcessor, model: PreTrainedModel, ids: Tensor, media: list[bytes]) -> Batch:
    """What `model` takes beside `ids` [1, T] to continue a prompt with images or audio, on its device."""
    accepted = set(inspect.signature(original_class(unwrap(model)).forward).parameters)
    inputs = processor.inputs([[processor.open(content) for content in media]])
    if has_cross_attention(model.config):
        inputs = cross_attention_inputs(inputs, ids.cpu(), processor.ids[0])
    stands = torch.isin(ids.cpu(), torch.tensor(processor.ids)).long()
    if types_are_prompts(model.config):
        stands = torch.zeros_like(stands)
    inputs |= {name: stands for name in _TYPES}
    return {
        name: (tensor.to(model.dtype) if tensor.is_floating_point() else tensor).to(model.device)
        for name, tensor in inputs.items()
        if name in accepted
    }
