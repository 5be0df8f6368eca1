"""Fetch the images and audio that rows name: files, URLs and bytes."""

from __future__ import annotations

import os
import posixpath
from typing import Any
from urllib.parse import unquote_to_bytes

from strata_platform.spec.data import Data
from tasks.runtime.data.media import Medium
from tasks.runtime.data.media_messages import decode_base64, describe_value
from tasks.runtime.data.rows import Row, RowError

# Bytes of a file that is read.
_LARGEST = 1 << 27
_PROTOCOLS = ("file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf")


class SkippedBySize(RowError):
    """An image or audio is outside of the limits of `data`, so that its row is skipped. reason: of `SKIP_REASONS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def content_of(value: Any, medium: Medium, row: Row, data: Data) -> bytes:
    """The bytes of an image or audio. Raises RowError when it cannot be read."""
    # `datasets` keeps one as its bytes, or where these are.
    if isinstance(value, dict):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return value
    shown = f"{medium.name} {describe_value(value)}"
    if not isinstance(value, str):
        article = "an" if medium.name[0] in "aeiou" else "a"
        raise RowError(f"{row.where}: {article} {medium.name} is a path, a URL or bytes, not {describe_value(value)}")
    try:
        if value.startswith("data:"):
            return _of_data_url(value)
        return _read(_place(value, medium, row, data))
    except RowError:
        raise
    # Stores' clients raise errors without a common base class.
    except Exception as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise RowError(f"{row.where}: {shown} cannot be read: {reason}") from error


def _place(value: str, medium: Medium, row: Row, data: Data) -> str:
    """The path or URL of a file. Raises RowError for a relative path without a folder, and for a file of this machine
    that data from elsewhere names.
    """
    shown = f"{medium.name} {describe_value(value)}"
    if "://" in value and not value.startswith("file://"):
        if "::" in value or value.split("://", 1)[0] not in _PROTOCOLS:
            raise RowError(f"{row.where}: {shown}: the URL begins with none of {', '.join(_PROTOCOLS)}")
        return value
    folder = getattr(data, medium.folder_field) or row.folder
    if not folder:
        raise RowError(
            f"{row.where}: {shown} is a path, but the data is no file that it could be relative to; set "
            f"data.{medium.folder_field}"
        )
    remote = "://" in folder and not folder.startswith("file://")
    path = value.removeprefix("file://")
    if not remote:
        return os.path.join(os.path.expanduser(folder.removeprefix("file://")), path)
    if path.startswith("/") or value.startswith("file://"):
        raise RowError(
            f"{row.where}: {shown} is a file of this machine, but the data is elsewhere; give its path relative to "
            f"data.{medium.folder_field}"
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
