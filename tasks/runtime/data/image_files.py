"""Read the images that rows name: files, URLs and bytes, checked and within limits.

An image is kept as the bytes of its file, so that prepared data stays small and the model's processor sees what the
file holds. One that `data.image_max_pixels` makes smaller is kept as PNG, which loses nothing more.
"""

from __future__ import annotations

import io
import os
import posixpath
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from strata_platform.spec.data import Data
from tasks.runtime.data.image_messages import decode_base64, describe_image
from tasks.runtime.data.rows import Row, RowError

if TYPE_CHECKING:
    from PIL import Image

# Bytes of a file that is read.
_LARGEST = 1 << 27
# Others run programs (EPS) or are no pictures.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_PROTOCOLS = ("file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf")


class TooFewPixels(RowError):
    """An image is smaller than `data.image_min_pixels`."""


@dataclass
class ImageCounts:
    """What became of the images: how many were `read`, and how many of them made smaller."""

    read: int = 0
    resized: int = 0


class ImageReader:
    """Reads the images of rows by the fields of `data`."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self.counts = ImageCounts()

    def read(self, value: Any, row: Row) -> tuple[bytes, Image.Image]:
        """The bytes of an image and its picture in RGB.

        Raises:
            RowError: the image cannot be read, is damaged, or is larger than Pillow's limit for pictures.
            TooFewPixels: it is smaller than `data.image_min_pixels`.
        """
        content = self._content(value, row)
        try:
            picture = open_picture(content)
        except ValueError as error:
            raise RowError(f"{row.where}: image {describe_image(value)}: {error}") from error
        pixels, least, most = picture.width * picture.height, self._data.image_min_pixels, self._data.image_max_pixels
        if least is not None and pixels < least:
            raise TooFewPixels(
                f"{row.where}: image {describe_image(value)} has {picture.width} x {picture.height} pixels, fewer than "
                f"data.image_min_pixels {least:,}"
            )
        self.counts.read += 1
        if most is not None and pixels > most:
            self.counts.resized += 1
            factor = (most / pixels) ** 0.5
            picture = picture.resize(tuple(max(1, int(side * factor)) for side in picture.size))  # type: ignore[arg-type]
            content = png_of(picture)
        return content, picture

    def _content(self, value: Any, row: Row) -> bytes:
        # `datasets` keeps an image as its bytes, or where these are.
        if isinstance(value, dict):
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise RowError(f"{row.where}: an image is a path, a URL or bytes, not {describe_image(value)}")
        try:
            if value.startswith("data:"):
                return _of_data_url(value)
            return _read(self._place(value, row))
        except RowError:
            raise
        # Stores' clients raise errors without a common base class.
        except Exception as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise RowError(f"{row.where}: image {describe_image(value)} cannot be read: {reason}") from error

    def _place(self, value: str, row: Row) -> str:
        """The path or URL of an image. Raises RowError for a relative path without a folder, and for a file of this
        machine that data from elsewhere names.
        """
        if "://" in value and not value.startswith("file://"):
            if "::" in value or value.split("://", 1)[0] not in _PROTOCOLS:
                raise RowError(
                    f"{row.where}: image {describe_image(value)}: the URL begins with none of {', '.join(_PROTOCOLS)}"
                )
            return value
        folder = self._data.image_folder or row.folder
        if not folder:
            raise RowError(
                f"{row.where}: image {describe_image(value)} is a path, but the data is no file that it could be "
                "relative to; set data.image_folder"
            )
        remote = "://" in folder and not folder.startswith("file://")
        path = value.removeprefix("file://")
        if not remote:
            return os.path.join(os.path.expanduser(folder.removeprefix("file://")), path)
        if path.startswith("/") or value.startswith("file://"):
            raise RowError(
                f"{row.where}: image {describe_image(value)} is a file of this machine, but the data is elsewhere; "
                "give its path relative to data.image_folder"
            )
        return posixpath.join(folder, path)


def _of_data_url(value: str) -> bytes:
    header, comma, body = value.partition(",")
    if not comma:
        raise ValueError("a data: URL has a comma before the data")
    return decode_base64(body) if header.endswith(";base64") else unquote_to_bytes(body)


def _read(place: str) -> bytes:
    if "://" not in place:
        with open(place, "rb") as file:
            content = file.read(_LARGEST + 1)
    else:
        import fsspec

        with fsspec.open(place, "rb") as remote:
            content = remote.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"larger than {_LARGEST >> 20} MiB")
    return bytes(content)


def open_picture(content: bytes) -> Image.Image:
    """The picture in the bytes of a file, upright by its EXIF and in RGB, as transformers' `load_image` gives it.

    Raises ValueError when it is damaged, of another format than common pictures, or of more pixels than Pillow's limit,
    `Image.MAX_IMAGE_PIXELS`.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Before anything is decoded: a small file may hold billions of pixels.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
                opened.load()
                picture = ImageOps.exif_transpose(opened)
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
