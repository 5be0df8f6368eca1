"""What rows hold beside text: images and audio, and the names under which messages, columns and texts have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Medium:
    """A kind of input beside text.

    name: in messages, and the type of its part for a chat template. The mark in texts is `<name>`, as in LLaMA-Factory
    and ms-swift.
    stand_in: a character of a private plane that stands for one in the content of a message.
    columns: of a row, under the names that they are looked for. parts: types of the parts of a content.
    values: keys of a part that may hold it. column_field, folder_field: of `data`. model: what takes it.
    changed: what a limit does with it. packages: what reads any of it, beside those of all runs. extra: of Strata, with
    all packages that read some of it.
    """

    name: str
    stand_in: str
    columns: tuple[str, ...]
    parts: tuple[str, ...]
    values: tuple[str, ...]
    column_field: str
    folder_field: str
    model: str
    changed: str
    packages: tuple[str, ...]
    extra: str

    @property
    def one(self) -> str:
        """With its article, for messages."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def several(self) -> str:
        """The plural, for messages."""
        return f"{self.name}s"

    @property
    def mark(self) -> str:
        """What stands for one in a text."""
        return f"<{self.name}>"


IMAGE = Medium(
    name="image",
    stand_in="\U000ffffd",
    columns=("images", "image"),
    parts=("image", "image_url", "input_image"),
    values=("image", "image_url", "url", "path", "base64"),
    column_field="images_column",
    folder_field="image_folder",
    model="vision-language model",
    changed="made smaller by data.image_max_pixels",
    packages=("pillow", "torchvision"),
    extra="vision",
)
AUDIO = Medium(
    name="audio",
    stand_in="\U000ffffc",
    columns=("audios", "audio"),
    parts=("audio", "audio_url", "input_audio"),
    values=("audio", "audio_url", "input_audio", "url", "path", "base64"),
    column_field="audios_column",
    folder_field="audio_folder",
    model="model that takes audio",
    changed="cut",
    # WAV needs none.
    packages=(),
    extra="audio",
)
MEDIA = (IMAGE, AUDIO)


class Item(NamedTuple):
    """An image or an audio as a row gives it: a path, a URL, bytes or `{"bytes": ..., "path": ...}`."""

    medium: Medium
    value: Any


@dataclass
class MediaCounts:
    """How many images or audios were `read`, how many of them were made smaller or cut by a limit of `data`: `changed`,
    and how many the model's processor makes smaller, as far as it says so: `reduced`.
    """

    read: int = 0
    changed: int = 0
    reduced: int = 0
