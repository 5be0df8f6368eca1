"""Read the images that rows name, checked and within limits.

An image is kept as the bytes of its file, so that prepared data stays small and the model's processor sees what the
file holds. One that `data.image_max_pixels` makes smaller is kept as PNG, which loses nothing more.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.media.kinds import IMAGE, MediaCounts
from tasks.runtime.data.media.media_files import content_of
from tasks.runtime.data.media.media_messages import describe_value
from tasks.runtime.data.reading.rows import Row, RowError, Skipped

if TYPE_CHECKING:
    from PIL import Image

# Others run programs (EPS) or are no pictures.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Pillow reads gray of 16 bits in these formats as 32 bits with the same values.
_GRAY_16_BITS = ("PNG", "PPM")


class ImageReader:
    """Reads the images of rows by the fields of `data`, and counts them."""

    def __init__(self, data: Data, counts: MediaCounts | None = None) -> None:
        self._data = data
        self.counts = counts or MediaCounts()

    def read(self, value: Any, row: Row) -> tuple[bytes, Image.Image]:
        """The bytes of an image and its picture in RGB.

        Raises:
            RowError: the image cannot be read, is damaged, or is larger than Pillow's limit for pictures.
            Skipped: it is smaller than `data.image_min_pixels`.
        """
        content = content_of(value, IMAGE, row, self._data)
        try:
            picture = open_picture(content)
        except ValueError as error:
            raise RowError(f"{row.where}: image {describe_value(value)}: {error}") from error
        pixels, least, most = picture.width * picture.height, self._data.image_min_pixels, self._data.image_max_pixels
        if least is not None and pixels < least:
            raise Skipped(
                f"{row.where}: image {describe_value(value)} has {picture.width} x {picture.height} pixels, fewer than "
                f"data.image_min_pixels {least:,}",
                "image_size",
            )
        self.counts.read += 1
        if most is not None and pixels > most:
            self.counts.changed += 1
            factor = (most / pixels) ** 0.5
            picture = picture.resize(tuple(max(1, int(side * factor)) for side in picture.size))  # type: ignore[arg-type]
            content = png_of(picture)
        return content, picture


def open_picture(content: bytes) -> Image.Image:
    """The picture in the bytes of a file, upright by its EXIF and in RGB, as transformers' `load_image` gives it.

    Raises ValueError when it is damaged, of another format than common pictures, of 32 bits per shade, or of more
    pixels than Pillow's limit, `Image.MAX_IMAGE_PIXELS`.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Before anything is decoded: a small file may hold billions of pixels.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
                opened.load()
                picture = ImageOps.exif_transpose(opened)
                if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format in _GRAY_16_BITS):
                    # Pillow's own conversion clips at 255.
                    shades = np.asarray(picture).astype(np.float32) / 65535 * 255
                    picture = Image.fromarray(shades.round().astype(np.uint8))
                elif opened.mode in ("F", "I"):
                    # Which value is white is not in the file; Pillow's own conversion clips at 255.
                    raise ValueError(f"its shades have 32 bits (Pillow's mode {opened.mode}); save it with 8 or 16")
                return picture.convert("RGB")
    # A damaged file causes errors of any type.
    except Exception as error:
        reason = "no picture" if "cannot identify" in str(error) else str(error) or type(error).__name__
        raise ValueError(f"{reason} ({len(content):,} bytes)") from error


def png_of(picture: Image.Image) -> bytes:
    """The picture as the bytes of a PNG file."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
