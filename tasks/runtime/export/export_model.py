"""Write the trained model as a plain Hugging Face folder, with tokenizer and model card."""

from __future__ import annotations

import logging
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from safetensors import safe_open
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from strata_platform.redact import redacted
from strata_platform.spec import RunSpec, dump_spec
from strata_platform.spec.sections.model import Lora, Model
from tasks.runtime.data import PreparedData
from tasks.runtime.data.preparation.tokenizer_files import PROCESSOR_FILES
from tasks.runtime.export.adapter_export import export_adapter
from tasks.runtime.export.check_folder import expected_of, media_results, verify
from tasks.runtime.export.publish import RECORD, publish
from tasks.runtime.export.serving_formats import write_formats
from tasks.runtime.models.build import set_special_tokens
from tasks.runtime.models.config import PRESETS, load_config
from tasks.runtime.models.score_head import class_of
from tasks.runtime.models.trained_weights import build_trained_model
from tasks.runtime.preflight import run_checks
from tasks.runtime.process.ranks import Processes
from tasks.runtime.report import render_report
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord

log = logging.getLogger(__name__)
# The class that builds a model → the task that the Hub lists it under, and what reads its input.
_USES = {
    "AutoModelForCausalLM": ("text-generation", "tokenizer"),
    "AutoModelForSequenceClassification": ("text-classification", "tokenizer"),
    "AutoModelForImageTextToText": ("image-text-to-text", "processor"),
    "AutoModelForMultimodalLM": ("audio-text-to-text", "processor"),
}


def export(spec: RunSpec, record: CompletionRecord, data: PreparedData, weights: Path) -> RunFolder:
    """Write `model/`, `report.html` and `record.json` to the run's folder, and publish the model.

    `weights`: the folder of `collect_weights`. The model folder is replaced as a whole, after a separate process has
    read the trained model from the new one.

    Raises:
        ValueError: the run is not complete, the folder does not hold the trained model, or a target rejects the copy.
    """
    record.require_complete()
    run_checks("export", "spec", spec=spec)
    folder = RunFolder.of(spec)
    folder.root.mkdir(parents=True, exist_ok=True)
    # A fixed name, so that the next export removes what a killed one left, which is as large as the model.
    temporary = folder.root / ".model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    write_model(spec, data, weights, temporary)
    card = model_card(spec, record, load_config(spec.model), parameters=_parameters(temporary))
    (temporary / "README.md").write_text(card, encoding="utf-8")
    # Users of the model do not need the path of the run's folder.
    record.model_copy(update={"checkpoint": Path(record.checkpoint).name}).save(temporary / RECORD)
    _replace(temporary, folder.model)

    record.save(folder.record)
    html = render_report(record, read_points(weights / folder.metrics.name), redacted(dump_spec(spec)))
    folder.report.write_text(html, encoding="utf-8")
    log.info("model:  %s", folder.model)
    log.info("report: %s", folder.report)
    how = f"{record.status}, stopped early" if record.stopped_early else record.status
    log.info("record: %s (%s, %d of %d steps)", folder.record, how, record.steps, record.steps_asked)
    publish(spec.export, spec.name, folder.model)
    return folder


def write_model(spec: RunSpec, data: PreparedData, weights: Path, folder: Path) -> None:
    """Write model and tokenizer and verify the folder. One model is in memory at a time."""
    device, tokenizer = Processes().device, data.tokenizer()
    model = build_trained_model(spec, weights)
    set_special_tokens(model, tokenizer)
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = True
    if model.can_generate():
        _stop_at(model.generation_config, data.manifest.stop_token_ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model.config.get_text_config() is not model.config:
        _copy_processor(spec.model, folder)
    expected = expected_of(model.to(device), tokenizer)
    media = media_results(model, folder) if data.manifest.has_media else {}
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    runs_code = bool(spec.model.trust_remote_code)
    verify(folder, expected | media, device, spec.model.attention, runs_code=runs_code)
    log.info("verified: another process reads the same model from its folder")
    write_formats(spec.export, spec.name, folder, expected, device)
    if "adapter" in spec.export.formats:
        export_adapter(spec, weights, folder, tokenizer, device)


def _copy_processor(model: Model, folder: Path) -> None:
    """Copy the processor files of a multimodal model; servers want them for text, too."""
    kept = []
    for file in PROCESSOR_FILES:
        found = cached_file(
            model.name,
            file,
            revision=model.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            kept.append(shutil.copyfile(found, folder / file))
    if not kept:
        log.warning(
            "model.name %r is multimodal, but none of %s could be read; servers may need them: copy them into the "
            "exported folder", model.name, ", ".join(PROCESSOR_FILES),
        )  # fmt: skip


def _stop_at(config: GenerationConfig, tokens: tuple[int, ...]) -> None:
    """Stop generation at the tokens that ended training texts, and at those of the base model."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    found = sorted({*tokens, *(end for end in ends if end is not None)})
    config.eos_token_id = found[0] if len(found) == 1 else found or None


def _parameters(folder: Path) -> int:
    """Parameters of an exported model: those of training may have had an adapter beside them."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def model_card(
    spec: RunSpec, record: CompletionRecord, config: PretrainedConfig, *, parameters: int | None = None
) -> str:
    """A model card: base model, data, steps, losses, and how to load the model.

    The card is public: it names local files and folders without their path. `config`: of the model. `parameters`: those
    of the exported model, by default those of training.
    """
    base = f"fine-tuned from `{_without_folder(spec.model.name)}`"
    if spec.model.from_scratch:
        shape = (
            "" if spec.model.name in PRESETS else f", with the configuration of `{_without_folder(spec.model.name)}`"
        )
        base = f"trained from scratch{shape}"
    if spec.model.revision is not None:
        base += f" at `{spec.model.revision}`"
    if isinstance(spec.adapter, Lora):
        kind = "DoRA" if spec.adapter.use_dora else "LoRA"
        base += f" by {kind} of rank {spec.adapter.r}, merged,"
    sources = [name for source in spec.data.sources or (spec.data,) for name in source.names]
    source = redacted(", ".join(Path(name).name if Path(name).is_absolute() else name for name in sources))
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    size = parameters or record.parameters
    loader = class_of(spec.model.head, config).__name__
    task, reader = _USES[loader]
    about = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=["strata", spec.objective.type],
        **_origin(spec.model),
    )
    return f"""---
{about.to_yaml()}
---

# {spec.name}

{size / 1e6:,.1f} M parameters, {base} on `{source}` ({spec.objective.type}) for {record.steps} steps
and {record.tokens:,} tokens. {_losses(record)}
{_scores(record)}
```python
from transformers import {loader}, Auto{reader.title()}

model = {loader}.from_pretrained("path/to/this/folder")
{reader} = Auto{reader.title()}.from_pretrained("path/to/this/folder")
```

Spec `{record.spec_hash}`, seed {spec.seed}; {versions}. `strata_record.json` holds the completion record.
"""


def _without_folder(name: str) -> str:
    """The model's name; the last part of a local path."""
    folder = Path(name)
    return folder.absolute().name if folder.is_dir() else name


def _origin(model: Model) -> dict[str, Any]:
    """Base model and license for the Hub. The license is that of the base model."""
    name, folder = model.name, Path(model.name)
    if model.from_scratch:
        return {}
    is_local = folder.is_dir()
    origin = {} if is_local else {"base_model": name}
    if is_local and not (folder / "README.md").is_file():
        log.info("model card: no license, because %s has no README.md", name)
        return origin
    try:
        card = folder / "README.md" if is_local else hf_hub_download(name, "README.md", revision=model.revision)
        known = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    # There is no card, no network, or the card's YAML is invalid.
    except Exception as error:
        log.info("model card: no license, because the card of %s could not be read (%s)", name, type(error).__name__)
        return origin
    licence = {
        key: known[key] for key in ("license", "license_name", "license_link") if isinstance(known.get(key), str)
    }
    if not is_local and "://" not in licence.get("license_link", "://"):
        licence["license_link"] = f"https://huggingface.co/{name}/blob/main/{licence['license_link']}"
    return origin | licence


def _losses(record: CompletionRecord) -> str:
    before, after = record.eval_loss_before, record.eval_loss_after
    if before is None or after is None:
        return "It was not validated."
    sentences = [f"Validation loss went from {before:.4f} to {after:.4f} {record.loss_unit}"]
    sentences += [f"{name.replace('_', ' ')} is {value:.4g}" for name, value in record.eval_metrics.items()]
    return ", ".join(sentences) + "."


def _scores(record: CompletionRecord) -> str:
    rows = [f"| {s.task} | {s.metric} | {s.before:.4f} | {s.after:.4f} |" for s in record.task_scores]
    head = ["", "| task | metric | before | after |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows, ""]) if rows else ""


def _replace(new: Path, old: Path) -> None:
    """Replace the folder `old` by `new`. Between the two renames there is no folder, never a mixture."""
    retired = old.with_name(f".{old.name}.old")
    shutil.rmtree(retired, ignore_errors=True)
    if old.exists():
        old.rename(retired)
    new.rename(old)
    shutil.rmtree(retired, ignore_errors=True)
