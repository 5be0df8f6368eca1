"""Code of its own that a model brings: run only if `model.trust_remote_code` names it.

The classes are loaded once in a process, from the model's own repository or folder, and registered with transformers.
Everything that reads a configuration or a model afterwards, also a checkpoint or an exported folder, finds them by the
configuration's `model_type`, with `trust_remote_code=False`: no other folder's code is ever run.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.utils import cached_file

from strata_platform.file_io import folder_digest
from strata_platform.spec.sections.model import Model
from tasks.runtime.models.pretrained import readable

log = logging.getLogger(__name__)

_FIELD = "model.trust_remote_code"
_CLASSES = ("AutoConfig", "AutoModelForCausalLM")
# What has been registered in this process: model_type, and the code that it came from.
_registered: dict[str, str] = {}


def register_custom_code(model: Model) -> None:
    """Load the code that the model brings and register its classes, if `model.trust_remote_code` names it.

    Raises:
        ValueError: the code is not the one that the field names, is of another repository, or lacks a class.
        Unreachable: the Hub does not answer.
    """
    if not model.trust_remote_code:
        return
    code = code_of(model)
    with readable(model.name):
        file = cached_file(model.name, "config.json", revision=model.revision)
        values: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    kind, classes = str(values.get("model_type")), values.get("auto_map") or {}
    if _registered.get(kind) == code:
        return
    if kind in CONFIG_MAPPING and kind not in _registered:
        raise ValueError(
            f"{_FIELD}: transformers has code of its own for model_type {kind!r} of model.name {model.name!r}; leave "
            f"{_FIELD} out"
        )
    for name in _CLASSES:
        _require_own(model.name, name, classes.get(name))
    with readable(model.name):
        config_class, model_class = (
            get_class_from_dynamic_module(
                classes[name], model.name, revision=model.revision, code_revision=model.revision
            )
            for name in _CLASSES
        )
        # An exported folder has the code beside the weights, and can be read without this repository.
        config_class.register_for_auto_class()
        model_class.register_for_auto_class("AutoModelForCausalLM")
        AutoConfig.register(kind, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, add_generation_mixin_to_remote_model(model_class), exist_ok=True)
    _registered[kind] = code
    log.info("%s: runs %s and %s of %s, %s", _FIELD, *(classes[name] for name in _CLASSES), model.name, code)


def code_of(model: Model) -> str:
    """The code that runs: the commit of a model on the Hub, `sha256:` and the digest of a folder's Python files.

    Raises ValueError if `model.trust_remote_code` names other code.
    """
    named, folder = model.trust_remote_code, Path(model.name)
    assert named
    if not folder.is_dir():
        if named is True or named.startswith("sha256:"):
            raise ValueError(
                f"{_FIELD}: model.name {model.name!r} is a model on the Hub, whose code may change; set {_FIELD} and "
                "model.revision to the full commit of the code that you have read"
            )
        return named
    found = folder_digest(folder)
    if named not in (True, found):
        raise ValueError(
            f"{_FIELD} is {named!r}, but the Python files in model.name {model.name!r} are {found}; read them, and set "
            f"{_FIELD} to that, or to true for a folder that only you can write"
        )
    return found


def model_code(model: Model) -> dict[str, str]:
    """The code of `code_of` by the name of the model; empty for a model whose code is transformers'."""
    return {model.name: code_of(model)} if model.trust_remote_code else {}


def _require_own(model: str, name: str, reference: object) -> None:
    """Raises ValueError unless `auto_map` names a class of the model's own code."""
    if not isinstance(reference, str):
        raise ValueError(
            f"{_FIELD}: config.json of model.name {model!r} names no {name} in auto_map; leave {_FIELD} out"
        )
    if "--" in reference:
        raise ValueError(
            f"{_FIELD}: the code of model.name {model!r} is in another repository, {reference.partition('--')[0]!r}, "
            "whose commit nothing names; download the model, put the code beside it, and give the folder"
        )
