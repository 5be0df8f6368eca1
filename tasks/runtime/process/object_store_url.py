"""URLs of object stores, opened through fsspec."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def open_url(url: str, field: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. fsspec: `url_to_fs(url)`.

    Raises ValueError, which names the spec's `field`, when no client is installed for the scheme or it rejects the URL.
    """
    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        raise ValueError(
            f"{field} {url!r} cannot be opened: {error}; install what fsspec needs for {scheme}://, such as s3fs for "
            "s3:// and gcsfs for gs://, or choose another store"
        ) from error
    return filesystem, str(path)


def url_to_fs(url: str) -> tuple[Any, str]:
    """`fsspec.core.url_to_fs(url)`, by fsspec's own client of the scheme.

    The SDK of Flyte 2 registers obstore's clients in the place of s3fs and gcsfs. They take other settings, and
    `FSSPEC_S3_KEY` would be an error.
    """
    from fsspec import core
    from fsspec.registry import get_filesystem_class, known_implementations

    scheme = url.partition("://")[0]
    if "://" not in url or "::" in url or not get_filesystem_class(scheme).__module__.startswith("obstore."):
        return core.url_to_fs(url)  # type: ignore[no-any-return]
    module, _, name = known_implementations[scheme]["class"].rpartition(".")
    client = getattr(import_module(module), name)
    return client(**client._get_kwargs_from_urls(url)), str(client._strip_protocol(url))
