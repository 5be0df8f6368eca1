"""What of a URL may be shown."""

from __future__ import annotations

import re
from urllib.parse import unquote

# Azure's URLs have a container where others have a user: abfs://container@account.dfs.core.windows.net/path.
_CONTAINER = r"(?:abfss?|wasbs?)://[^/?#@:\s'\"]*@[^/?#@\s'\"]*(?![^/?#\s'\"])"
# A password may have an @ of its own.
_CREDENTIALS = re.compile(rf"(?<![\w+.-])(?!{_CONTAINER})([\w+.-]*://)[^/?#\s'\"]*@", re.IGNORECASE)
# A question mark alone may be a pattern's.
_QUERY = re.compile(r"(://[^\s?'\"]+)\?[^\s'\"=]*=[^\s'\"]*")
_PARAMETER = re.compile(r"[?&;]([^=?&;]+)=")
# Of URLs that let in whoever has them: of S3, Google, Azure, Alibaba, CloudFront, Hugging Face and others.
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
    """Whether a user or a password is in it. Azure's container is none.

    >>> has_credentials("s3://key:secret@bucket/path"), has_credentials("s3://bucket/user@example.com")
    (True, False)
    >>> has_credentials("abfs://container@account.dfs.core.windows.net/path")
    False
    """
    return _CREDENTIALS.search(url) is not None


def secret_parameter(url: str) -> str | None:
    """The name of the first parameter in the URL's query that lets in whoever has it; None where there is none.

    >>> secret_parameter("https://account.blob.core.windows.net/rows.jsonl?sv=2026-01-01&sig=1")
    'sig'
    """
    names = _PARAMETER.findall(url) if "://" in url else ()
    return next((name for name in names if unquote(name).lower() in _SECRET_PARAMETERS), None)


def redacted(text: str) -> str:
    """`text` with URLs that have neither credentials nor a query, which may be a signature.

    >>> redacted("source: 'https://user:word@host/rows.jsonl?X-Signature=1'")
    "source: 'https://...@host/rows.jsonl?...'"
    """
    return _QUERY.sub(r"\1?...", _CREDENTIALS.sub(r"\1...@", text))
