"""The weights that a run began with, told from those that its fields name now.

A run of the whole model reads `model.name` at its first start alone: later ones continue with the weights of its
checkpoint. Without a check, such a run would go on, or be complete, as if it had begun with weights that were put there
since. So would one that got another teacher or reward model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, cached_file

from strata_platform.file_io import require_regular_files
from strata_platform.model_config import read_config_file
from strata_platform.spec import RunSpec
from strata_platform.spec.named_weights import NamedWeights, named_weights
from tasks.runtime.data.reading.sources import COMMIT_TIMEOUT, is_commit
from tasks.runtime.models.adapters import adapter_folder
from tasks.runtime.models.weight_files import open_tensors, some_values

log = logging.getLogger(__name__)

# Configuration and weights, by the field that names their folder.
_MODEL_FILES = CONFIG_NAME, SAFE_WEIGHTS_NAME
_FILES = {"adapter.init_from": (adapter_folder.CONFIG, adapter_folder.WEIGHTS)}
# Between the digests of weights and configuration.
_AND = "-"
# What does not change the model, and saving it anew may change in its configuration.
_UNREAD = frozenset(
    (
        "transformers_version", "peft_version", "dtype", "torch_dtype", "_name_or_path", "base_model_name_or_path",
        "inference_mode", "use_cache",
    )
)  # fmt: skip
# Sets, which PEFT writes in another order each time.
_SETS = frozenset(("target_modules", "exclude_modules", "modules_to_save"))


def initial_weights(spec: RunSpec) -> dict[str, str]:
    """What tells weights from others, by the field that names them: digests of those in a local folder and of its
    configuration, or the Hub's commit. Without those whose commit the Hub does not tell.

    Raises ValueError if a file of weights cannot be read.
    """
    found = {weights.field: _identity(weights) for weights in named_weights(spec)}
    return {field: identity for field, identity in found.items() if identity is not None}


def require_initial_weights(spec: RunSpec, expected: Mapping[str, str]) -> None:
    """Raises ValueError if a folder has other weights, or another configuration, than when the run began and
    `initial_weights` was `expected`.

    Warns of another commit on the Hub, which may have the same weights.
    """
    for weights in named_weights(spec):
        field, name = weights.field, weights.name
        found = _identity(weights) if field in expected else None
        if found is None or found == expected[field]:
            continue
        if Path(name).is_dir():
            (before, *configs), (now, *others) = expected[field].split(_AND), found.split(_AND)
            same_weights = now == before
            # Either the file, or what transformers reads of it, is the same.
            if same_weights and not {*configs}.isdisjoint(others):
                continue
            config, _ = _FILES.get(field, _MODEL_FILES)
            raise ValueError(
                f"{field} {name!r} has {f'another {config}' if same_weights else 'other weights'} than when this run "
                "began; restore the folder to continue, or choose another name to train with the new one"
            )
        _warn_of_commit(weights, expected[field], found)


def _warn_of_commit(weights: NamedWeights, expected: str, found: str) -> None:
    way_out = None
    if not is_commit(expected):
        began, way_out = f"a local folder, which is gone, and the Hub has commit {found}", "restore the folder"
    else:
        began = f"commit {expected} of the Hub, which has {found} now"
        if weights.revision_field is not None:
            way_out = f"set {weights.revision_field} to {expected}"
    log.warning(
        "%s %r: this run began with %s. It reads the new commit for all that its checkpoints do not have. %s "
        "with the new one from the first step, choose another name",
        weights.field,
        weights.name,
        began,
        f"To read the first one, {way_out}; to train" if way_out else "To train",
    )


def _identity(weights: NamedWeights) -> str | None:
    return _digest(weights) if Path(weights.name).is_dir() else _commit(weights)


def _commit(weights: NamedWeights) -> str | None:
    """The commit that the revision means on the Hub now; if the Hub does not answer, in the cache."""
    if weights.revision is not None and is_commit(weights.revision):
        return weights.revision
    try:
        return HfApi().model_info(weights.name, revision=weights.revision, timeout=COMMIT_TIMEOUT).sha
    # The client's errors have no common base class.
    except Exception as error:
        log.info("the Hub does not tell the commit of %s %r: %s", weights.field, weights.name, error)
    config, _ = _FILES.get(weights.field, _MODEL_FILES)
    try:
        file = cached_file(weights.name, config, revision=weights.revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    # The cache has a folder for each commit.
    commit = Path(file).parent.name
    return commit if is_commit(commit) else None


def _digest(weights: NamedWeights) -> str | None:
    """Digests of the names, shapes and some values of the weights in a folder, and of its configuration; None if it has
    neither.
    """
    folder, digest = Path(weights.name), hashlib.sha256()
    name, file = _FILES.get(weights.field, _MODEL_FILES)
    try:
        require_regular_files(folder)
        config = _without_unread(read_config_file(folder / name)) if (folder / name).is_file() else {}
        tied = config.get("tie_word_embeddings") is True
        with ExitStack() as opened:
            tensors = {} if weights.random else open_tensors(folder, opened, file)
            for tensor, held in sorted(tensors.items()):
                # A copy of the embeddings, which may be in the file or not; with other values a model is rejected.
                if tied and f".{tensor}".endswith(".lm_head.weight"):
                    continue
                digest.update(f"{tensor} {held.get_slice(tensor).get_shape()}".encode())
                digest.update(some_values(held, tensor).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{weights.field} {weights.name!r} cannot be read: {reason}; fetch the folder's files again"
        ) from error
    if not tensors and not config:
        return None
    settings = [json.dumps(each, sort_keys=True).encode() for each in (config, _as_read(folder, config))]
    return _AND.join((digest.hexdigest()[:16], *(hashlib.sha256(each).hexdigest()[:16] for each in settings)))


def _as_read(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's configuration as this version of transformers would save it, for which it may rename settings and add
    defaults; that in the file if transformers cannot read it.
    """
    if "model_type" not in config:
        return config
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return _without_unread(json.loads(found.to_json_string(use_diff=False)))
    # Wrong settings cause errors of any type; those of the model are told when it is built.
    except Exception:
        return config


def _without_unread(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, and those within it, without what does not change the model."""
    found = {
        key: _without_unread(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _UNREAD
    }
    return found | {key: sorted(found[key], key=str) for key in _SETS & found.keys() if isinstance(found[key], list)}
