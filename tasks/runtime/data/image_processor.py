"""The processor of a vision-language model: the tokens that stand for an image, and the inputs that a model takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from strata_platform.spec.model import PRESETS
from strata_platform.spec.objectives import PAIRED
from tasks.runtime.data.image_files import png_of
from tasks.runtime.data.image_packing import require_separate_images
from tasks.runtime.data.special_tokens import special_tokens_of
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.hub import asking_hub

if TYPE_CHECKING:
    from PIL import Image

# Sizes of pictures whose texts are kept.
_REMEMBERED = 1024
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def processor_of(recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[], ImageProcessor] | None:
    """A function that gives the processor of the recipe's model, with the tokenizer of the data; None for a preset.

    The first call loads it, and raises:
        ValueError: a package is missing, the model has no processor of images, or rows share sequences with images
            that its family does not keep apart.
        Unreachable: the Hub does not answer.
    """
    if recipe.model in PRESETS:
        return None

    def load() -> ImageProcessor:
        require_vision_packages()
        # At the first image, not when all rows are prepared.
        with asking_hub(f"model.name {recipe.model!r}"):
            config = AutoConfig.from_pretrained(recipe.model, revision=recipe.revision, trust_remote_code=False)
        pairs = recipe.objective if recipe.objective in PAIRED else None
        require_separate_images(config.model_type, recipe.model, packing=recipe.data.packing, pairs=pairs)
        return _read(recipe.model, recipe.revision, tokenizer)

    return cache(load)


def require_vision_packages() -> None:
    """Raises ValueError if the packages that read images are not installed."""
    for module, package in (("PIL", "pillow"), ("torchvision", "torchvision")):
        if find_spec(module) is None:
            raise ValueError(
                f"the data has images, which need the package {package}, which is not installed; install "
                "strata[vision], or name the column of images in data.ignore_columns"
            )


def saved_processor(folder: Path, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """The processor in a tokenizer's folder of prepared data; None if it has none."""
    if not any((folder / file).is_file() for file in PROCESSOR_FILES):
        return None
    return _read(str(folder), None, tokenizer)


def copy_processor(source: Path, target: Path) -> None:
    """Copy the files of a processor, if there are any, from one tokenizer's folder to another."""
    for file in PROCESSOR_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, target / file)


def _read(name: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor:
    from transformers import AutoProcessor

    try:
        with asking_hub(f"model.name {name!r}"):
            processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Unreachable:
        raise
    except ImportError as error:
        raise ValueError(
            f"the data has images, and the processor of model.name {name!r} needs a package that is not installed: "
            f"{' '.join(str(error).split())[:300]}; install it, or name the column of images in data.ignore_columns"
        ) from error
    # Settings of processors cause errors of any type.
    except Exception as error:
        raise ValueError(_no_processor(name, " ".join(str(error).split()))) from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "image_token", None) is None:
        raise ValueError(_no_processor(name, f"it has a {type(processor).__name__}"))
    return ImageProcessor(processor, tokenizer)


def _no_processor(name: str, reason: str) -> str:
    return (
        f"the data has images, but model.name {name!r} has no processor of images ({reason[:300]}); choose a "
        "vision-language model, or name the column of images in data.ignore_columns"
    )


class ImageProcessor:
    """A processor of transformers, with the tokenizer of the data.

    placeholder: what a chat template writes for an image. token_ids: of tokens that stand for images; they carry no
    loss.
    """

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._processor = processor
        processor.tokenizer = tokenizer
        if tokenizer.chat_template and not isinstance(tokenizer.chat_template, dict):
            processor.chat_template = tokenizer.chat_template
        self._tokenizer = tokenizer
        self.placeholder: str = processor.image_token
        if processor.image_token not in tokenizer.get_vocab():
            raise ValueError(
                f"model.tokenizer lacks the token {processor.image_token!r}, which the processor of model.name puts in "
                "the places of images; use the model's own tokenizer"
            )
        self.token_ids = {number for number in processor.image_token_ids if number is not None}
        self._special = set(tokenizer.convert_tokens_to_ids(list(special_tokens_of(tokenizer))))
        self._known: set[str] = set()
        self._by_sizes: dict[tuple[tuple[int, int], ...], list[str]] = {}

    def save(self, folder: Path) -> None:
        """Write the processor with its tokenizer to a folder, for `AutoProcessor.from_pretrained`."""
        self._processor.save_pretrained(str(folder))

    def replacements(self, pictures: list[Image.Image]) -> list[str]:
        """The text that stands for each picture of a chat in place of the placeholder."""
        if "cross_attention_mask" in self._processor.model_input_names:
            # Texts attend to images, which are no tokens of them.
            return [self.placeholder] * len(pictures)
        sizes = tuple(picture.size for picture in pictures)
        if sizes not in self._by_sizes:
            if len(self._by_sizes) == _REMEMBERED:
                self._by_sizes.clear()
            self._by_sizes[sizes] = self._replacements(pictures)
        return self._by_sizes[sizes]

    def _replacements(self, pictures: list[Image.Image]) -> list[str]:
        """They depend on the sizes of the pictures alone, and the processor takes milliseconds to make their pixels."""
        # The tokenizer, which encodes all rows, would remember a padding.
        encoded = self._processor(
            images=[pictures],
            text=[self.placeholder * len(pictures)],
            padding=False,
            return_text_replacement_offsets=True,
        )
        found = [str(one["replacement"]) for one in encoded["text_replacement_offsets"][0]]
        assert len(found) == len(pictures)
        for text in {*found} - self._known:
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            self.token_ids |= self._special & {*ids}
            self._known.add(text)
        return found

    def inputs(self, pictures: list[list[Image.Image]]) -> dict[str, Any]:
        """What the model takes beside tokens, as tensors, for the images of each chat of a batch that has some."""
        return dict(self._processor.image_processor(pictures, return_tensors="pt"))

    def blank(self) -> tuple[bytes, list[int]]:
        """The bytes of a blank image, and the ids of the tokens that stand for it."""
        from PIL import Image

        picture = Image.new("RGB", (64, 64))
        (text,) = self.replacements([picture])
        return png_of(picture), list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def image_ids(self) -> list[int]:
        """Ids of the tokens in whose places the model puts image features."""
        return [number for number in self._processor.image_token_ids if number is not None]
