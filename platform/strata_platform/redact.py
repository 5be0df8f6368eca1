"""Removes credentials from URLs before they are shown."""

from __future__ import annotations

import re
from urllib.parse import unquote

# Azure's URLs have the container where others have a user: abfs://container@account.dfs.core.windows.net/path.
_CONTAINER = r"(?:abfss?|wasbs?)://[^/?#@:\s'\"]*@[^/?#@\s'\"]*(?![^/?#\s'\"])"
# A password may contain an @.
_CREDENTIALS = re.compile(rf"(?<![\w+.-])(?!{_CONTAINER})([\w+.-]*://)[^/?#\s'\"]*@", re.IGNORECASE)
# A question mark without a parameter may be part of a glob pattern.
_QUERY = re.compile(r"(://[^\s?'\"]+)\?[^\s'\"=]*=[^\s'\"]*")
_PARAMETER = re.compile(r"[?&;]([^=?&;]+)=")
# Parameters that grant access to whoever has the URL: of S3, Google, Azure, Alibaba, CloudFront, Hugging Face and
# others.
_SECRET_PARAMETERS = frozenset(
    {
        "access_token",
        "api_key",
        "apikey",
        "auth",
        "password",
        "secret",
        "sig",
        "signature",
        "token",
        "x-amz-credential",
        "x-amz-security-token",
        "x-amz-signature",
        "x-goog-credential",
        "x-goog-signature",
        "x-oss-security-token",
        "x-oss-signature",
    }
)


def has_credentials(url: str) -> bool:
    """Whether the URL contains a user or a password. Azure's container is neither.

    >>> has_credentials("s3://key:secret@bucket/path"), has_credentials("s3://bucket/user@example.com")
    (True, False)
    >>> has_credentials("abfs://container@account.dfs.core.windows.net/path")
    False
    """
    return _CREDENTIALS.search(url) is not None


def secret_parameter(url: str) -> str | None:
    """The first parameter of the URL that grants access to whoever has it; None if there is none.

    >>> secret_parameter("https://account.blob.core.windows.net/rows.jsonl?sv=2026-01-01&sig=1")
    'sig'
    """
    names = _PARAMETER.findall(url) if "://" in url else ()
    return next((name for name in names if unquote(name).lower() in _SECRET_PARAMETERS), None)


def redacted(text: str) -> str:
    """`text` without the credentials and the queries of its URLs; a query may be a signature.

    >>> redacted("source: 'https://user:word@host/rows.jsonl?X-Signature=1'")
    "source: 'https://...@host/rows.jsonl?...'"
    """
    return _QUERY.sub(r"\1?...", _CREDENTIALS.sub(r"\1...@", text))
