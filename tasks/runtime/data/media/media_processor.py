"""The processor of a multimodal model: the tokens of an image or audio, and the inputs of the model."""

from __future__ import annotations

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import AutoConfig, PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from strata_platform.spec.sections.data import SHORTEST_AUDIO, Data
from strata_platform.spec.sections.model import PRESETS
from strata_platform.spec.sections.objectives import PAIRED
from tasks.runtime.data.chat.special_tokens import special_tokens_of
from tasks.runtime.data.media.audio_files import AudioReader, Sound, open_sound, wav_of
from tasks.runtime.data.media.image_files import ImageReader, open_picture, png_of
from tasks.runtime.data.media.kinds import AUDIO, IMAGE, MediaCounts, Medium
from tasks.runtime.data.media.media_packing import require_separate_media
from tasks.runtime.data.preparation.tokenizer_files import PROCESSOR_FILES
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.hub import asking_hub

# Sizes of images or audio whose texts are kept.
_REMEMBERED = 4096


def processor_of(recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[Medium], MediaProcessor] | None:
    """A function that gives the processor of the recipe's model for rows with a medium, with the tokenizer of the data;
    None for a preset.

    The first call loads it, and raises:
        ValueError: a package is missing, the model's processor takes no such medium, or rows share sequences with
            images or audio that its family does not keep apart.
        Unreachable: the Hub does not answer.
    """
    if recipe.model in PRESETS:
        return None

    @cache
    def load(medium: Medium) -> MediaProcessor:
        require_packages(medium)
        # At the first image, not when all rows are prepared.
        with asking_hub(f"model.name {recipe.model!r}"):
            config = AutoConfig.from_pretrained(recipe.model, revision=recipe.revision, trust_remote_code=False)
        pairs = recipe.objective if recipe.objective in PAIRED else None
        require_separate_media(config.model_type, recipe.model, packing=recipe.data.packing, pairs=pairs)
        return _read(recipe.model, recipe.revision, tokenizer, medium)

    return load


def require_packages(medium: Medium) -> None:
    """Raises ValueError if a package that reads a medium is not installed."""
    for package in medium.packages:
        try:
            version(package)
        except PackageNotFoundError:
            raise ValueError(
                f"the data has {medium.several}, which need the package {package}, which is not installed; install "
                f"strata[{medium.extra}], or {_ignored(medium)}"
            ) from None


def saved_processor(folder: Path, tokenizer: PreTrainedTokenizerBase) -> MediaProcessor | None:
    """The processor in a folder of prepared data, or of a published model; None if it has none.

    Raises ValueError when it cannot be loaded.
    """
    if not any((folder / file).is_file() for file in PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(str(folder), trust_remote_code=False)
    # Settings of processors cause errors of any type.
    except Exception as error:
        way_out = "install it" if isinstance(error, ImportError) else "delete the folder and prepare the data again"
        raise ValueError(f"the processor in {folder} cannot be loaded: {_shown(error)}; {way_out}") from error
    cls = _class_of(processor)
    if cls is None:
        raise ValueError(f"{folder} has a {type(processor).__name__}, no processor of images or audio")
    return cls(processor, tokenizer)


def copy_processor(source: Path, target: Path) -> None:
    """Copy the files of a processor, if there are any, from one tokenizer's folder to another."""
    for file in PROCESSOR_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, target / file)


def _read(name: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, medium: Medium) -> MediaProcessor:
    """The processor of a model. medium: what the data has."""
    from transformers import AutoProcessor

    way_out = f"choose a {medium.model}, or {_ignored(medium)}"
    try:
        with asking_hub(f"model.name {name!r}"):
            processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Unreachable:
        raise
    except ImportError as error:
        raise ValueError(
            f"the data has {medium.several}, and the processor of model.name {name!r} needs a package that is not "
            f"installed: {_shown(error)}; install it, or {_ignored(medium)}"
        ) from error
    # Settings of processors cause errors of any type.
    except Exception as error:
        raise ValueError(
            f"the data has {medium.several}, but the processor of model.name {name!r} cannot be loaded: "
            f"{_shown(error)}; {way_out}"
        ) from error
    cls = _class_of(processor)
    if cls is None or cls.medium is not medium:
        raise ValueError(
            f"the data has {medium.several}, but model.name {name!r} has no processor of {medium.several} (it has a "
            f"{type(processor).__name__}); {way_out}"
        )
    return cls(processor, tokenizer)


def _class_of(processor: Any) -> type[MediaProcessor] | None:
    return next((cls for cls in _CLASSES if cls.takes(processor)), None)


def _ignored(medium: Medium) -> str:
    return f"name the column of {medium.several} in data.ignore_columns"


def _shown(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class MediaProcessor(ABC):
    """A processor of transformers, with the tokenizer of the data.

    medium: what it takes beside text. placeholder: what a chat template writes for one. ids: of tokens in whose places
    the model puts features. token_ids: of all tokens that stand for images or audio; they carry no loss.
    """

    medium: ClassVar[Medium]

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._processor = processor
        processor.tokenizer = tokenizer
        if tokenizer.chat_template and not isinstance(tokenizer.chat_template, dict):
            processor.chat_template = tokenizer.chat_template
        self._tokenizer = tokenizer
        self.placeholder: str = getattr(processor, f"{self.medium.name}_token")
        if self.placeholder not in tokenizer.get_vocab():
            raise ValueError(
                f"model.tokenizer lacks the token {self.placeholder!r}, which the processor of model.name puts in the "
                f"places of {self.medium.several}; use the model's own tokenizer"
            )
        ids = getattr(processor, f"{self.medium.name}_token_ids")
        self.ids: list[int] = [number for number in ids if number is not None]
        self.token_ids = {*self.ids}
        self._special = set(tokenizer.convert_tokens_to_ids(list(special_tokens_of(tokenizer))))
        self._known: set[str] = set()
        self._by_sizes: dict[tuple[Hashable, ...], list[str]] = {}
        self._reduced: dict[Hashable, bool] = {}

    @staticmethod
    @abstractmethod
    def takes(processor: Any) -> bool:
        """Whether a processor of transformers is of this kind."""

    @abstractmethod
    def reader(self, data: Data, counts: MediaCounts) -> ImageReader | AudioReader:
        """The reader of the rows' images or audio for this processor."""

    @abstractmethod
    def open(self, content: bytes) -> Any:
        """The decoded image or audio of a file."""

    @abstractmethod
    def inputs(self, opened: list[list[Any]]) -> dict[str, Any]:
        """What the model takes beside tokens, as tensors, for those of each chat of a batch that has some."""

    @abstractmethod
    def _example(self) -> tuple[bytes, Any]:
        """The bytes of a small image or audio, and its decoded content."""

    @abstractmethod
    def _size(self, opened: Any) -> Hashable:
        """The size on which the number of tokens depends."""

    @abstractmethod
    def _texts(self, opened: list[Any]) -> list[str]:
        """The text with which the processor replaces each placeholder of a chat."""

    def save(self, folder: Path) -> None:
        """Write the processor with its tokenizer to a folder, for `AutoProcessor.from_pretrained`."""
        self._processor.save_pretrained(str(folder))

    def replacements(self, opened: list[Any]) -> list[str]:
        """The text that replaces the placeholder of each image or audio of a chat.

        It depends on sizes alone, and the processor takes milliseconds to make pixels or spectra.
        """
        sizes = tuple(map(self._size, opened))
        if sizes not in self._by_sizes:
            if len(self._by_sizes) == _REMEMBERED:
                self._by_sizes.clear()
            found = self._texts(opened)
            assert len(found) == len(opened)
            for text in {*found} - self._known:
                self.token_ids |= self._special & {*self.encode(text)}
                self._known.add(text)
            self._by_sizes[sizes] = found
        return self._by_sizes[sizes]

    def reduced(self, opened: list[Any]) -> int:
        """How many of them, whose texts have been asked for, the processor makes smaller, as far as it says so."""
        return sum(self._reduced.get(self._size(one), False) for one in opened)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def example(self) -> tuple[bytes, list[int]]:
        """The bytes of a small image or audio, and the ids of its tokens."""
        content, opened = self._example()
        (text,) = self.replacements([opened])
        return content, self.encode(text)


class ImageProcessor(MediaProcessor):
    """A processor of images."""

    medium = IMAGE

    @staticmethod
    def takes(processor: Any) -> bool:
        """Whether it has one of images, and a token for them."""
        return all(getattr(processor, name, None) is not None for name in ("image_processor", "image_token"))

    def reader(self, data: Data, counts: MediaCounts) -> ImageReader:
        """Reads images."""
        return ImageReader(data, counts)

    def open(self, content: bytes) -> Any:
        """A picture in RGB."""
        return open_picture(content)

    def inputs(self, opened: list[list[Any]]) -> dict[str, Any]:
        """Pixels, and their sizes or masks."""
        settings = {**_image_settings(self._processor), "return_tensors": "pt"}
        unused = getattr(self._processor, "unused_input_names", ())
        found = self._processor.image_processor(opened, **settings)
        return {name: value for name, value in found.items() if name not in unused}

    def _example(self) -> tuple[bytes, Any]:
        from PIL import Image

        picture = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
        return png_of(picture), picture

    def _size(self, opened: Any) -> Hashable:
        size: tuple[int, int] = opened.size
        return size

    def _texts(self, opened: list[Any]) -> list[str]:
        if "cross_attention_mask" in self._processor.model_input_names:
            # Texts attend to images, which are no tokens of them.
            return [self.placeholder] * len(opened)
        # The tokenizer, which encodes all rows, would remember a padding.
        encoded = self._processor(
            images=[opened],
            text=[self.placeholder * len(opened)],
            padding=False,
            return_text_replacement_offsets=True,
        )
        patch, merged = (getattr(self._processor.image_processor, name, None) for name in ("patch_size", "merge_size"))
        if isinstance(patch, int) and isinstance(merged, int):
            # For families that report the grid of patches, such as Qwen's. Rounding to whole tokens does not count.
            for picture, (_, *grid) in zip(opened, encoded.get("image_grid_thw", ()), strict=False):
                height, width = (int(patches) * patch + patch * merged / 2 for patches in grid)
                self._reduced[picture.size] = height < picture.height or width < picture.width
        return [str(one["replacement"]) for one in encoded["text_replacement_offsets"][0]]


def _image_settings(processor: Any) -> dict[str, Any]:
    """The settings with which the whole processor calls that of images, and counts the tokens.

    InternVL's cuts an image into tiles, whatever preprocessor_config.json says.
    """
    kind = type(processor)
    # Where transformers 5.17 has them; later versions warn of the name.
    options = vars(sys.modules[kind.__module__]).get(f"{kind.__name__}Kwargs")
    defaults: dict[str, Any] = getattr(options, "_defaults", {}).get("images_kwargs", {})
    return {**getattr(processor, "images_kwargs", {}), **defaults}


class AudioProcessor(MediaProcessor):
    """A processor of audio, which makes a spectrum of 30 seconds of each, such as Qwen2-Audio's."""

    medium = AUDIO

    @staticmethod
    def takes(processor: Any) -> bool:
        """Whether it has one of audio, and a token for it."""
        return all(getattr(processor, name, None) is not None for name in ("feature_extractor", "audio_token"))

    @property
    def _extractor(self) -> Any:
        return self._processor.feature_extractor

    @property
    def _rate(self) -> int:
        rate: int = self._extractor.sampling_rate
        return rate

    def _longest(self) -> float | None:
        """Seconds of an audio, of which the processor drops the rest."""
        return float(self._extractor.n_samples / self._rate)

    def reader(self, data: Data, counts: MediaCounts) -> AudioReader:
        """Reads audio at any rate, and of no more seconds than the processor takes."""
        return AudioReader(data, counts, rate=self._rate, longest=self._longest())

    def open(self, content: bytes) -> Any:
        """A sound."""
        return open_sound(content)

    def inputs(self, opened: list[list[Any]]) -> dict[str, Any]:
        """Spectra, and their masks."""
        return self._features([sound.at(self._rate) for chat in opened for sound in chat])

    def _example(self) -> tuple[bytes, Any]:
        places = np.arange(int(2 * SHORTEST_AUDIO * self._rate)) / self._rate
        tone = Sound(np.sin(2 * np.pi * 440 * places).astype(np.float32), self._rate)
        return wav_of(tone), tone

    def _size(self, opened: Any) -> Hashable:
        # Of a spectrum, the frames.
        return -(-opened.size_at(self._rate) // self._extractor.hop_length)

    def _texts(self, opened: list[Any]) -> list[str]:
        encoded = self._called([sound.at(self._rate) for sound in opened], return_text_replacement_offsets=True)
        return [str(one["replacement"]) for one in encoded["text_replacement_offsets"][0]]

    def _features(self, samples: list[Any]) -> dict[str, Any]:
        inputs = self._called(samples, return_tensors="pt")
        return {name: tensor for name, tensor in inputs.items() if name not in self._tokenizer.model_input_names}

    def _called(self, samples: list[Any], **options: Any) -> Any:
        return self._processor(
            audio=samples,
            text=[self.placeholder * len(samples)],
            sampling_rate=self._rate,
            padding=False,
            **options,
        )


class VoxtralProcessor(AudioProcessor):
    """Voxtral's: it takes audio through mistral-common's requests alone, and any number of 30 seconds.

    The methods that it calls for them make the spectra here, of what Strata has read.
    """

    # 12.5 tokens a second: the encoder halves the 100 frames, and the projector joins four.
    _FRAMES = 8

    @staticmethod
    def takes(processor: Any) -> bool:
        """Whether it is Voxtral's."""
        return type(processor).__name__ == "VoxtralProcessor"

    def _longest(self) -> float | None:
        return None

    def _size(self, opened: Any) -> Hashable:
        return -(-opened.size_at(self._rate) // self._extractor.n_samples)

    def _texts(self, opened: list[Any]) -> list[str]:
        frames = self._extractor.nb_max_frames
        return [self.placeholder * (self._size(sound) * frames // self._FRAMES) for sound in opened]  # type: ignore[operator]

    def _features(self, samples: list[Any]) -> dict[str, Any]:
        # Not read from the processor: where its defaults are depends on the version of transformers.
        features = self._processor._retrieve_input_features(
            samples,
            max_source_positions=self._extractor.nb_max_frames,
            pad_to_multiple_of=self._extractor.n_samples,
            sampling_rate=self._rate,
            padding=True,
            truncation=False,
            return_tensors="pt",
        )
        return {"input_features": features}


# In this order: a model that takes both counts as a model of images.
_CLASSES: tuple[type[MediaProcessor], ...] = (VoxtralProcessor, ImageProcessor, AudioProcessor)
