"""Write the formats of `export.formats` from an exported model folder, and verify each."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.export import Export, Format
from strata_platform.spec.sections.model import PRESETS, Lora, Model
from tasks.runtime.data.chat.template_source import templates_to_save
from tasks.runtime.data.preparation.tokenizer import read_tokenizer
from tasks.runtime.export.check_folder import verify
from tasks.runtime.export.gguf_families import family_of
from tasks.runtime.export.gguf_file import write_gguf
from tasks.runtime.export.gguf_vocabulary import require_vocabulary
from tasks.runtime.export.quantized_folder import SCHEMES, group_size, write_quantized
from tasks.runtime.models.adapters.adapted_layers import adapts_embeddings
from tasks.runtime.models.build import build_model_on_meta
from tasks.runtime.models.config import load_config

log = logging.getLogger(__name__)

# Format → the package that it needs, and its module.
_PACKAGES: dict[Format, tuple[str, str]] = {
    "gguf": ("gguf", "gguf"),
    "fp8": ("compressed-tensors", "compressed_tensors"),
    "int4": ("compressed-tensors", "compressed_tensors"),
}


def require_formats(export: Export, model: Model, data: Data, adapter: Adapter) -> None:
    """Raises ValueError if the model cannot be written in a format of `export.formats`. Reads no weights."""
    for name in export.formats:
        package, module = _PACKAGES.get(name, ("", ""))
        if module and find_spec(module) is None:
            raise ValueError(
                f"export.formats {name!r} needs the package {package}, which is not installed; install "
                f"strata[{package}], or leave {name!r} out"
            )
    converted = [name for name in export.formats if name in _PACKAGES]
    if converted and getattr(load_config(model), "quantization_config", None) is not None:
        raise ValueError(
            f"export.formats {converted[0]!r} is made from exact weights, and those of model.name {model.name!r} are "
            f"quantized; leave {converted[0]!r} out, or name the model that they were made from"
        )
    if "int4" in export.formats:
        try:
            group_size(build_model_on_meta(model))
        except ValueError as error:
            raise ValueError(f"export.formats 'int4': model.name {model.name!r}: {error}; leave 'int4' out") from error
    if "gguf" in export.formats:
        try:
            config = load_config(model)
            if isinstance(adapter, Lora) and adapts_embeddings(build_model_on_meta(model), adapter):
                # The exported head has a weight of its own.
                config.tie_word_embeddings = False
            family_of(config)
            # The tokenizer that a preset trains is GPT-2's kind.
            if (tokenizer := model.tokenizer or model.name) not in PRESETS:
                revision = None if model.tokenizer else model.revision
                found = read_tokenizer(tokenizer, revision, field="export.formats")
                found.chat_template = templates_to_save(data.chat_template, found)
                require_vocabulary(found)
        except ValueError as error:
            raise ValueError(
                f"export.formats 'gguf': model.name {model.name!r}: {error}; leave 'gguf' out, and convert the "
                "exported folder with llama.cpp's own script if it has the model"
            ) from error


def write_formats(export: Export, name: str, folder: Path, expected: dict[str, Tensor], device: torch.device) -> None:
    """Write the formats besides safetensors to the exported model's folder, and read each in another process.

    Args:
        export: the spec's `export`.
        name: the run's name, which a GGUF file gets.
        folder: the exported model, already verified.
        expected: the trained model's results, of `expected_of`.
        device: where the other process computes.

    Raises:
        ValueError: a format does not hold the trained model.
    """
    if "gguf" in export.formats:
        file = folder / f"{name}-{export.gguf_type}.gguf"
        write_gguf(folder, file, name, export.gguf_type)
        found = verify(folder, expected, device, "sdpa", file=file.name, stored=export.gguf_type)
        log.info("verified: %s holds the trained model (%s)", file.name, found)
    for form in SCHEMES:
        if form in export.formats:
            write_quantized(folder, folder / form, form)
            found = verify(folder, expected, device, "sdpa", file=form, stored=form)
            log.info("verified: %s/ holds the trained model (%s)", form, found)
