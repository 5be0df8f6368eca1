"""The weights that a run began with, told from those that its fields name now.

A run of the whole model reads `model.name` at its first start alone: later ones continue with the weights of its
checkpoint. Without a check, such a run would go on, or be complete, as if it had begun with weights that were put there
since. So would one that got another teacher or reward model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, cached_file

from strata_platform.file_io import require_regular_files
from strata_platform.model_config import read_config_file
from strata_platform.spec import RunSpec
from strata_platform.spec.named_weights import NamedWeights, named_weights
from tasks.runtime.data.reading.sources import is_commit
from tasks.runtime.models.adapters import adapter_folder
from tasks.runtime.models.weight_files import open_tensors, some_values

log = logging.getLogger(__name__)

# Configuration and weights, by the field that names their folder.
_MODEL_FILES = CONFIG_NAME, SAFE_WEIGHTS_NAME
_FILES = {"adapter.init_from": (adapter_folder.CONFIG, adapter_folder.WEIGHTS)}


def initial_weights(spec: RunSpec) -> dict[str, str]:
    """What tells weights from others, by the field that names them: a digest of those in a local folder, or the Hub's
    commit. Without those whose commit the Hub does not tell.

    Raises ValueError if a file of weights cannot be read.
    """
    found = {weights.field: _identity(weights) for weights in named_weights(spec)}
    return {field: identity for field, identity in found.items() if identity is not None}


def require_initial_weights(spec: RunSpec, expected: Mapping[str, str]) -> None:
    """Raises ValueError if a folder has other weights than when the run began and `initial_weights` was `expected`.

    Warns of another commit on the Hub, which may have the same weights.
    """
    for weights in named_weights(spec):
        field, name = weights.field, weights.name
        found = _identity(weights) if field in expected else None
        if found is None or found == expected[field]:
            continue
        if Path(name).is_dir():
            raise ValueError(
                f"{field} {name!r} has other weights than those that this run began with; restore them to continue, "
                "or choose another name to train with the new ones"
            )
        _warn_of_commit(weights, expected[field], found)


def _warn_of_commit(weights: NamedWeights, expected: str, found: str) -> None:
    way_out = ""
    if not is_commit(expected):
        began, way_out = f"a local folder, which is gone, and the Hub has commit {found}", "restore the folder"
    else:
        began = f"commit {expected} of the Hub, which has {found} now"
        if weights.revision_field is not None:
            way_out = f"set {weights.revision_field} to {expected}"
    log.warning(
        "%s %r: this run began with %s. It reads the new commit for all that its checkpoints do not have. %sto train "
        "with the new one from the first step, choose another name",
        weights.field,
        weights.name,
        began,
        f"To read the first one, {way_out}; " if way_out else "",
    )


def _identity(weights: NamedWeights) -> str | None:
    return _digest(weights) if Path(weights.name).is_dir() else _commit(weights)


def _commit(weights: NamedWeights) -> str | None:
    """The commit that the revision means on the Hub now; offline, in the cache."""
    if weights.revision is not None and is_commit(weights.revision):
        return weights.revision
    config, _ = _FILES.get(weights.field, _MODEL_FILES)
    try:
        file = cached_file(weights.name, config, revision=weights.revision)
    # The client's errors have no common base class.
    except Exception as error:
        log.info("the commit of %s %r is unknown: %s", weights.field, weights.name, error)
        return None
    # The cache has a folder for each commit.
    commit = Path(file).parent.name
    return commit if is_commit(commit) else None


def _digest(weights: NamedWeights) -> str | None:
    """A digest of the names, shapes and some values of the weights in a folder; None if it has none."""
    folder, digest = Path(weights.name), hashlib.sha256()
    config, file = _FILES.get(weights.field, _MODEL_FILES)
    try:
        require_regular_files(folder)
        tied = (folder / config).is_file() and read_config_file(folder / config).get("tie_word_embeddings") is True
        with ExitStack() as opened:
            tensors = open_tensors(folder, opened, file)
            for name, held in sorted(tensors.items()):
                # A copy of the embeddings, which may be in the file or not; with other values a model is rejected.
                if tied and f".{name}".endswith(".lm_head.weight"):
                    continue
                digest.update(f"{name} {held.get_slice(name).get_shape()}".encode())
                digest.update(some_values(held, name).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{weights.field} {weights.name!r} cannot be read: {reason}; fetch the folder's files again"
        ) from error
    return digest.hexdigest()[:16] if tensors else None
