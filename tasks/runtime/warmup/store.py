"""Open the kernel store that a spec or the cluster names."""

from __future__ import annotations

import os
from pathlib import Path

from strata_kernels.warmup.blob_storage import open_storage
from strata_kernels.warmup.store import ArchiveKind, Store
from strata_platform.spec import KernelStore

_SHORTEST_KEY = 32
# Variables that charts/strata sets in the pods of a cluster with a store.
URL, SIGNING_KEY = "STRATA_KERNEL_STORE", "KERNEL_STORE_KEY"


def open_store(spec: KernelStore, environment: str, kind: ArchiveKind, problems: list[str]) -> Store | None:
    """The store's archives for an environment; None without a store, or with a new entry in `problems` if opening
    fails.

    A spec that names no store uses that of the pod's environment variables.
    """
    url = spec.url or os.environ.get(URL)
    if not url:
        return None
    key = spec.signing_key if spec.url else f"env:{SIGNING_KEY}"
    try:
        return Store(
            open_storage(url),
            environment,
            signing_key=None if key is None else read_secret(key),
            allow_unsigned=spec.allow_unsigned,
            size_limit=spec.size_limit_mb << 20,
            kind=kind,
        )
    # The clients of stores raise errors of many classes.
    except Exception as error:
        problems.append(f"the store cannot be opened: {type(error).__name__}: {error}")
        return None


def read_secret(reference: str) -> bytes:
    """Read the key that `env:NAME` or `file:PATH` refers to. Raises ValueError if it is missing or too short."""
    field = f"kernels.store.signing_key {reference!r}"
    kind, _, name = reference.partition(":")
    try:
        key = Path(name).read_bytes().strip() if kind == "file" else os.environb[name.encode()]
    except (OSError, KeyError) as error:
        raise ValueError(f"{field} is not there") from error
    if len(key) < _SHORTEST_KEY:
        raise ValueError(f"{field} has {len(key)} bytes; give it {_SHORTEST_KEY} or more")
    return key
