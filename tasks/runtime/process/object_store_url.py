"""URLs of object stores, opened through fsspec."""

from __future__ import annotations

from typing import Any


def open_url(url: str, field: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. fsspec: `url_to_fs(url)`.

    Raises ValueError, which names the spec's `field`, when no client is installed for the scheme or it rejects the URL.
    """
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        raise ValueError(
            f"{field} {url!r} cannot be opened: {error}; install what fsspec needs for {scheme}://, such as s3fs for "
            "s3:// and gcsfs for gs://, or choose another store"
        ) from error
    return filesystem, str(path)
