"""Stores and entries that tests of the store and of the cache filler share."""

from pathlib import Path

from strata_kernels.warmup.blob_storage import FolderStorage
from strata_kernels.warmup.store import Store
from tests.kernels.helpers.cache_entries import kernel_entry, launcher_entry

KEY, FILES = kernel_entry(0)
ENTRIES = [kernel_entry(seed) for seed in range(4)] + [launcher_entry(0)]
SECRET = b"thirty-two bytes that nobody has"


def signed(root: Path, **options) -> Store:
    return Store(FolderStorage(root), "triton/python", **{"signing_key": SECRET, **options})


def archives(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())
