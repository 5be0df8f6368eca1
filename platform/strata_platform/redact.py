"""What of a URL may be shown."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"(?<=://)[^/?#@\s'\"]*@")
# A question mark alone may be a pattern's.
_QUERY = re.compile(r"(://[^\s?'\"]+)\?[^\s'\"=]*=[^\s'\"]*")


def has_credentials(url: str) -> bool:
    """Whether a user or a password is in it.

    >>> has_credentials("s3://key:secret@bucket/path"), has_credentials("s3://bucket/user@example.com")
    (True, False)
    """
    return _CREDENTIALS.search(url) is not None


def redacted(text: str) -> str:
    """`text` with URLs that have neither credentials nor a query, which may be a signature.

    >>> redacted("source: 'https://user:word@host/rows.jsonl?X-Signature=1'")
    "source: 'https://...@host/rows.jsonl?...'"
    """
    return _QUERY.sub(r"\1?...", _CREDENTIALS.sub("...@", text))
