"""Addresses in object stores, opened."""

from __future__ import annotations

from typing import Any


def open_url(url: str, field: str) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the path in it.

    Raises ValueError, which names the `field` of the spec, when there is no client for the URL's scheme, or it cannot
    do with this URL.
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
