"""Copy an exported model to the Hub and to an object store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from strata_platform.spec.sections.export import Export
from tasks.runtime.data.preparation.tokenizer_files import PROCESSOR_FILES, TOKENIZER_FILES
from tasks.runtime.process.object_store_url import open_url

log = logging.getLogger(__name__)

# Files of an earlier model that a library would load instead of the new ones, or in addition to them.
_EARLIER = ("*.safetensors", "*.bin", "*.gguf", "*.index.json", "adapter_config.json", *TOKENIZER_FILES,
            "fp8/*", "int4/*")  # fmt: skip
RECORD = "strata_record.json"
"""Name of the run's record, which only exported models have."""
# Patterns of all files that an export writes.
_EXPORTED = (RECORD, "README.md", "config.json", "generation_config.json", "model*.safetensors",
             "model.safetensors.index.json", "*.gguf", *TOKENIZER_FILES, *PROCESSOR_FILES,
             "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
             *(f"{folder}/{name}" for folder in ("adapter", "fp8", "int4") for name in TOKENIZER_FILES),
             *(f"{folder}/{name}" for folder in ("fp8", "int4")
               for name in ("config.json", "generation_config.json", "model*.safetensors",
                            "model.safetensors.index.json")))  # fmt: skip


def require_export_targets(export: Export, name: str) -> None:
    """Raises ValueError if a target of `export` cannot be opened, or holds files that no export wrote."""
    if export.push_to_hub is not None:
        from huggingface_hub import get_token

        if get_token() is None:
            raise ValueError(
                f"export.push_to_hub {export.push_to_hub!r} needs a token with write access; set the environment "
                "variable HF_TOKEN here and where the model is exported, or remove export.push_to_hub"
            )
    if export.url is not None:
        address, store, root = _place(export.url, name)
        try:
            there = _names(store, root)
        # Clients of stores raise errors without a common base class.
        except Exception as error:
            raise ValueError(
                f"export.url: {address} cannot be read: {type(error).__name__}: {error}; fix the cause, choose "
                "another export.url, or remove it"
            ) from error
        _require_exported(address, there)


def publish(export: Export, run: str, model: Path) -> list[str]:
    """Copy the folder `model` of the run with the name `run` to the targets and return their addresses.

    Raises:
        ValueError: a target rejects the copy; the folder stays as it is.
    """
    places = []
    if (repository := export.push_to_hub) is not None:
        places.append(
            _attempt("export.push_to_hub", model, lambda: _to_hub(repository, run, model, private=export.private))
        )
    if (url := export.url) is not None:
        places.append(_attempt("export.url", model, lambda: _to_store(url, run, model)))
    return places


def _attempt(field: str, model: Path, copy: Callable[[], str]) -> str:
    try:
        place = copy()
    # The clients of the Hub and of stores raise errors without a common base class.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{field}: the model could not be copied: {type(error).__name__}: {reason}. It is complete in {model}; fix "
            "the cause and start the run again, which copies it again"
        ) from error
    log.info("copied to %s", place)
    return place


def _to_hub(repository: str, run: str, model: Path, *, private: bool) -> str:
    from huggingface_hub import HfApi

    hub = HfApi()
    # An existing repository keeps its visibility.
    address = hub.create_repo(repository, private=private, exist_ok=True)
    message = f"Add the model of run {run}"
    hub.upload_folder(repo_id=repository, folder_path=model, commit_message=message, delete_patterns=list(_EARLIER))
    return str(address)


def _to_store(url: str, run: str, model: Path) -> str:
    """Copy the model to `export.url`.

    `config.json` is written last and removed first: a folder without it is not a model. The record is written first and
    never removed: it identifies the rest of an interrupted copy.
    """
    address, store, root = _place(url, run)
    there = _names(store, root)
    _require_exported(address, there)
    for old in sorted({*there} - {RECORD}, key=lambda name: name != "config.json"):
        store.rm_file(f"{root}/{old}")
    names = [str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()]
    for name in sorted(names, key=lambda name: (name != RECORD, name == "config.json", name)):
        store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        store.put_file(str(model / name), f"{root}/{name}")
    return address


def _place(url: str, run: str) -> tuple[str, Any, str]:
    """The model's address under `export.url`, its file system, and the folder in that."""
    store, root = open_url(url, "export.url")
    return f"{url.rstrip('/')}/{run}", store, f"{root.rstrip('/')}/{run}"


def _names(store: Any, root: str) -> list[str]:
    """Paths of the files below the folder `root`, relative to it."""
    store.invalidate_cache()
    try:
        # A name that ends with a slash marks an empty folder, which object stores do not have.
        return sorted(path.removeprefix(root).lstrip("/") for path in store.find(root) if not path.endswith("/"))
    except FileNotFoundError:
        return []


def _require_exported(address: str, there: list[str]) -> None:
    """Raises ValueError if there are files that no export wrote, because replaced files are deleted for good."""
    foreign = [name for name in there if RECORD not in there or not _is_exported(name)]
    if foreign:
        more = f" and {len(foreign) - 1} more" if foreign[1:] else ""
        raise ValueError(
            f"export.url: {address} has files that no export wrote: {foreign[0] or 'it is a file'}{more}; choose "
            "another export.url or name, or move them away"
        )


def _is_exported(name: str) -> bool:
    path = PurePosixPath(name)
    # `PurePath.match` compares a shorter pattern with the end of the path.
    return any(len(path.parts) == pattern.count("/") + 1 and path.match(pattern) for pattern in _EXPORTED)
