"""Vision-language models: their class, the inputs that images add to a batch, and positions of several dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from strata_kernels.patch.structure import original_class, unwrap
from strata_platform.spec import RunSpec
from strata_platform.spec.objectives import LABELLED, PAIRED
from tasks.runtime.data import PreparedData
from tasks.runtime.data.columns import PREFERENCES
from tasks.runtime.data.dataset import (
    IGNORE_INDEX,
    IMAGE_COLUMNS,
    MODEL_INPUT,
    ROPE_COLUMNS,
    TOKENIZER,
    Batch,
    Row,
)
from tasks.runtime.data.image_files import open_picture
from tasks.runtime.data.image_packing import require_separate_images
from tasks.runtime.data.image_processor import ImageProcessor, saved_processor
from tasks.runtime.models.cross_attention import (
    cross_attention_inputs,
    cross_attention_layers,
    has_cross_attention,
)
from tasks.runtime.models.image_masks import sees_later_tokens, types_are_prompts

if TYPE_CHECKING:
    from PIL import Image

# Whether a token is of an image, or of an answer, under the names of different families.
_TYPES = ("token_type_ids", "mm_token_type_ids")


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether a model takes other input than text: its text part has a configuration of its own."""
    return config.get_text_config() is not config


def has_rope_index(model: nn.Module) -> bool:
    """Whether the model rotates by positions in three dimensions, which it computes from tokens and images (M-RoPE)."""
    return hasattr(getattr(model, "model", None), "get_rope_index")


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class that builds the model of a configuration: of a vision-language model, the one with its tower.

    For some families `AutoModelForCausalLM` has no class, and for others one that leaves the tower out.
    """
    if is_multimodal(config) and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def require_planned_image_support(spec: RunSpec) -> None:
    """`require_image_support` before data is prepared, if the spec names images. Of others, preparation finds out."""
    if any(
        (data.images_column or data.image_folder or data.image_max_pixels or data.image_min_pixels) is not None
        for data, _ in spec.data.single_sources()
    ):
        _require_image_support(spec, packing=spec.data.packing, pairs=spec.objective.type in PAIRED)


def require_image_support(spec: RunSpec, data: PreparedData) -> None:
    """Raises ValueError if rows have images and a section of the spec does not go with that."""
    if data.manifest.has_images:
        pairs = data.manifest.format in PREFERENCES
        _require_image_support(spec, packing=data.manifest.packing, pairs=pairs)


def _require_image_support(spec: RunSpec, *, packing: bool, pairs: bool) -> None:
    if spec.objective.type in LABELLED:
        raise ValueError(
            f"objective.type {spec.objective.type!r} does not support rows with images; choose 'sft' or 'dpo', or name "
            "the column of images in data.ignore_columns"
        )
    config = AutoConfig.from_pretrained(spec.model.name, revision=spec.model.revision, trust_remote_code=False)
    require_separate_images(
        config.model_type, spec.model.name, packing=packing, pairs=spec.objective.type if pairs else None
    )
    if spec.model.attention.startswith("flash") and sees_later_tokens(config):
        raise ValueError(
            f"model.attention {spec.model.attention!r}: {config.model_type} attends to later tokens of an image or a "
            "prompt, which flash attention does not; set model.attention to 'auto'"
        )
    for ways, field in ((spec.parallel.context_parallel, "context"), (spec.parallel.tensor_parallel, "tensor")):
        if ways > 1:
            raise ValueError(
                f"parallel.{field}_parallel {ways} does not support rows with images; set it to 1, or name the column "
                "of images in data.ignore_columns"
            )


def beyond_text(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of a multimodal model that text does not reach; none of another."""
    if not is_multimodal(model.config):
        return []
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    reached = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    reached -= {id(parameter) for layer in cross_attention_layers(model) for parameter in layer.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in reached]


def with_model_inputs(
    collate: Callable[[list[Row]], Batch], model: nn.Module, data: PreparedData | None
) -> Callable[[list[Row]], Batch]:
    """Make `collate` add to its batches what a vision-language model takes beside tokens and their positions.

    `data`: whose processor prepares the images; without images in it, or without it, there are none to prepare.
    """
    base: Any = unwrap(model)
    processor = None
    if data is not None and data.manifest.has_images:
        processor = saved_processor(data.folder / TOKENIZER, data.tokenizer())
        assert processor is not None, f"{data.folder} has images and no processor"
    rope_index = base.model.get_rope_index if has_rope_index(base) else None
    if processor is None and rope_index is None and not types_are_prompts(base.config):
        return collate
    return _Collator(collate, base, processor, rope_index)


class _Collator:
    """A collate function with the inputs of images.

    Attributes of a batch whose names begin with MODEL_INPUT are passed to the model under the rest of the name.
    """

    def __init__(
        self,
        collate: Callable[[list[Row]], Batch],
        model: PreTrainedModel,
        processor: ImageProcessor | None,
        rope_index: Callable[..., Any] | None,
    ) -> None:
        self._collate, self._processor, self._rope_index = collate, processor, rope_index
        self._dtype = model.dtype
        self._prompts, self._crosses = types_are_prompts(model.config), has_cross_attention(model.config)
        self._blank: tuple[Tensor, Tensor] | None = None
        self._accepted = set(inspect.signature(original_class(model).forward).parameters)
        self._rope_takes = set(inspect.signature(rope_index).parameters) if rope_index else set()

    def __call__(self, rows: list[Row]) -> Batch:
        if self._processor is not None and not any("images" in row for row in rows):
            # Every batch runs the tower, so that sharded weights are gathered, and moments decay, on all ranks alike.
            rows = [*rows, self._blank_row(rows[0])]
        pictures = [chat for row in rows for chat in _pictures_of(row)]
        inputs: dict[str, Any] = {}
        if pictures:
            assert self._processor is not None
            inputs = self._processor.inputs(pictures)
        if self._rope_index is not None:
            rows = self._with_rope_positions(rows, inputs)
        batch = self._collate([{name: row[name] for name in row if name not in IMAGE_COLUMNS} for row in rows])
        if self._crosses and self._processor is not None:
            inputs = cross_attention_inputs(inputs, batch["input_ids"], self._processor.image_ids[0])
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

    def _blank_row(self, like: Row) -> Row:
        """A row with the tokens of a blank image and nothing that is learned."""
        assert self._processor is not None
        if self._blank is None:
            content, numbers = self._processor.blank()
            self._blank = torch.tensor(list(content), dtype=torch.uint8), torch.tensor(numbers)
        image, ids = self._blank
        row = {name: torch.zeros(ids.numel(), dtype=tensor.dtype) for name, tensor in like.items()}
        row |= {
            "input_ids": ids,
            "labels": torch.full_like(ids, IGNORE_INDEX),
            "position_ids": torch.arange(ids.numel()),
        }
        sizes = torch.tensor([image.numel()]), torch.tensor([1])
        return row | dict(zip(IMAGE_COLUMNS, (image, *sizes), strict=True))

    def _types(self, ids: Tensor) -> Tensor:
        """1 for the tokens of images, 0 for others."""
        known = self._processor.image_ids if self._processor else []
        return torch.isin(ids, torch.tensor(known, dtype=ids.dtype)).long()

    def _with_rope_positions(self, rows: list[Row], inputs: dict[str, Any]) -> list[Row]:
        """The rows with the columns of ROPE_COLUMNS, computed by the model for each document alone."""
        first = 0
        found = []
        for row in rows:
            starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
            counts = row["document_images"].tolist() if "document_images" in row else []
            counts += [0] * (len(starts) - len(counts))
            positions = []
            for begin, end, count in zip(starts, [*starts[1:], None], counts, strict=True):
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


def answers(labels: Tensor, position_ids: Tensor) -> Tensor:
    """[B, T]: 0 for the tokens of a sequence before its first label, and 1 from there on."""
    places = torch.arange(labels.shape[1])
    begins = places - position_ids
    # The latest label so far lies in the sequence.
    return ((places * (labels != IGNORE_INDEX)).cummax(dim=1).values > begins).long()


def _pictures_of(row: Row) -> list[list[Image.Image]]:
    """The pictures of each document of a row that has some."""
    if "images" not in row:
        return []
    content, sizes, counts = (row[name] for name in IMAGE_COLUMNS)
    left = iter(content.split(sizes.tolist()))
    return [[open_picture(next(left).numpy().tobytes()) for _ in range(count)] for count in counts.tolist() if count]


def sample_inputs(processor: ImageProcessor, model: PreTrainedModel, ids: Tensor, images: list[bytes]) -> Batch:
    """What `model` takes beside `ids` [1, T] to continue a prompt with images, on its device."""
    accepted = set(inspect.signature(original_class(unwrap(model)).forward).parameters)
    inputs = processor.inputs([[open_picture(image) for image in images]])
    if has_cross_attention(model.config):
        inputs = cross_attention_inputs(inputs, ids.cpu(), processor.image_ids[0])
    stands = torch.isin(ids.cpu(), torch.tensor(processor.image_ids)).long()
    if types_are_prompts(model.config):
        stands = torch.zeros_like(stands)
    inputs |= {name: stands for name in _TYPES}
    return {
        name: (tensor.to(model.dtype) if tensor.is_floating_point() else tensor).to(model.device)
        for name, tensor in inputs.items()
        if name in accepted
    }
