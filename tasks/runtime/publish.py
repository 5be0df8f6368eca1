"""Hand an exported model on: to the Hub, and to an object store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from strata_platform.spec import RunSpec
from tasks.runtime.urls import open_url

log = logging.getLogger(__name__)

# What an earlier model in a repository may have that a library would load in place of the new weights, or on top.
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "adapter_config.json")
# What begins the names in a run's folder, here or in a store.
_OF_A_RUN = ("checkpoint", "metrics.jsonl", "spec.yaml")


def require_targets(spec: RunSpec) -> None:
    """Raises ValueError when what `export` names cannot be opened: before anything is trained, and not at its end."""
    if spec.export.push_to_hub is not None:
        from huggingface_hub import get_token

        if get_token() is None:
            raise ValueError(
                f"export.push_to_hub {spec.export.push_to_hub!r} needs a token that may write there; set the "
                "environment variable HF_TOKEN, also where the model is exported, or leave export.push_to_hub out"
            )
    if spec.export.url is not None:
        open_url(spec.export.url, "export.url")


def publish(spec: RunSpec, model: Path) -> list[str]:
    """Copy the folder `model` to where `export` says; returns the addresses.

    Raises ValueError when one of them does not take it; the folder stays what it is.
    """
    places = []
    if spec.export.push_to_hub is not None:
        places.append(_attempt("export.push_to_hub", model, lambda: _to_hub(spec, model)))
    if spec.export.url is not None:
        places.append(_attempt("export.url", model, lambda: _to_store(spec, model)))
    return places


def _attempt(field: str, model: Path, copy: Callable[[], str]) -> str:
    try:
        place = copy()
    # Errors of the Hub's client and of those of stores have no common class.
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{field}: the model could not be copied: {type(error).__name__}: {said}. It is in {model}, whole; mend "
            "that and start the run again, which copies once more"
        ) from error
    log.info("copied to %s", place)
    return place


def _to_hub(spec: RunSpec, model: Path) -> str:
    from huggingface_hub import HfApi

    assert spec.export.push_to_hub is not None
    hub, name = HfApi(), spec.export.push_to_hub
    # Also where it is there already, whose visibility then stays.
    address = hub.create_repo(name, private=spec.export.private, exist_ok=True)
    told = f"Add the model of run {spec.name}"
    hub.upload_folder(repo_id=name, folder_path=model, commit_message=told, delete_patterns=list(_WEIGHTS))
    return str(address)


def _to_store(spec: RunSpec, model: Path) -> str:
    """Its configuration comes last and goes first: a folder without one is no model.

    Raises ValueError where the folder is that of a run, whose files would be taken for those of an earlier model.
    """
    address = f"{str(spec.export.url).rstrip('/')}/{spec.name}"
    store, root = open_url(address, "export.url")
    store.invalidate_cache()
    store.makedirs(root, exist_ok=True)
    there = store.find(root)
    for path in there:
        if path.removeprefix(root).lstrip("/").startswith(_OF_A_RUN):
            raise ValueError(f"{path} is of a run, and {address} is to be the model's alone; choose another export.url")
    # Files of an earlier export that this one has not.
    for old in sorted(there, key=lambda path: not path.endswith("/config.json")):
        store.rm_file(old)
    names = sorted(str(path.relative_to(model)) for path in model.rglob("*") if path.is_file())
    for name in sorted(names, key=lambda name: name == "config.json"):
        store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        store.put_file(str(model / name), f"{root}/{name}")
    return address
