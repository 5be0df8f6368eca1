"""Fetch the images and audio that rows name: files, URLs and bytes."""

from __future__ import annotations

import os
import posixpath
from typing import Any
from urllib.parse import unquote_to_bytes

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.media.kinds import Medium
from tasks.runtime.data.media.media_messages import decode_base64, describe_value
from tasks.runtime.data.reading.rows import Row, RowError
from tasks.runtime.process.object_store_url import url_to_fs

# Bytes of a file that is read.
_LARGEST = 1 << 27
_PROTOCOLS = ("file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf")


def content_of(value: Any, medium: Medium, row: Row, data: Data) -> bytes:
    """The bytes of an image or audio. Raises RowError when it cannot be read."""
    # `datasets` keeps one as its bytes, or where these are.
    if isinstance(value, dict):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    shown = f"{row.where}: {medium.name} {describe_value(value)}"
    if not isinstance(value, bytes | str):
        raise RowError(f"{row.where}: {medium.one} is a path, a URL or bytes, not {describe_value(value)}")
    if isinstance(value, bytes):
        content = value
    elif value.startswith("data:"):
        try:
            content = _of_data_url(value)
        except ValueError as error:
            raise RowError(f"{shown} cannot be read: {error}") from error
    else:
        place = _place(value, medium, row, data)
        try:
            content = _read(place)
        # Stores' clients raise errors without a common base class.
        except Exception as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            relative = place not in (value, value.removeprefix("file://"))
            found = f" at {place!r}; it is relative to data.{medium.folder_field}" if relative else ""
            raise RowError(f"{shown} cannot be read: {reason}{found}") from error
    if len(content) > _LARGEST:
        raise RowError(f"{shown} is larger than {_LARGEST >> 20} MiB; make it smaller")
    return content


def _place(value: str, medium: Medium, row: Row, data: Data) -> str:
    """The path or URL of a file. Raises RowError for a relative path without a folder, and for a file of this machine
    that data from elsewhere names.
    """
    shown = f"{medium.name} {describe_value(value)}"
    if "://" in value and not value.startswith("file://"):
        if "::" in value or value.split("://", 1)[0] not in _PROTOCOLS:
            raise RowError(
                f"{row.where}: {shown}: the URL begins with none of {', '.join(_PROTOCOLS)}; give one that does, or a "
                "path"
            )
        return value
    folder = getattr(data, medium.folder_field) or row.folder
    if not folder:
        raise RowError(
            f"{row.where}: {shown} is a path, but the data is not a file that it could be relative to; set "
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
    """The bytes of a file, or more than are allowed if it has more."""
    if "://" not in place:
        with open(place, "rb") as file:
            return file.read(_LARGEST + 1)
    filesystem, path = url_to_fs(place)
    with filesystem.open(path, "rb") as remote:
        return bytes(remote.read(_LARGEST + 1))
