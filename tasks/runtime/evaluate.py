"""Measure a model before and after training: loss on the validation split, and what it writes."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, collate
from tasks.runtime.model import adopt_tokenizer, build_model, patch
from tasks.runtime.record import CompletionRecord, Sample

log = logging.getLogger(__name__)


def evaluate(spec: RunSpec, record: CompletionRecord, data: PreparedData, weights: Path) -> CompletionRecord:
    """The record with losses and samples of the model before training and with `weights`, a Hugging Face folder.

    Raises ValueError when the run did not finish.
    """
    record.require_complete()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts = data.samples(spec.evaluation.samples)
    # One model in memory at a time.
    before_loss, before = _measure(spec, data, [prompt for prompt, _ in prompts], device, weights=None)
    after_loss, after = _measure(spec, data, [prompt for prompt, _ in prompts], device, weights=str(weights))
    if before_loss is None or after_loss is None:
        log.warning("data.validation_fraction leaves no validation rows; no loss before and after")
    else:
        log.info(
            "validation loss %.4f before, %.4f after (%+.1f %%)",
            before_loss,
            after_loss,
            100 * (after_loss / before_loss - 1),
        )
    samples = tuple(
        Sample(prompt=prompt, reference=reference, before=first, after=second)
        for (prompt, reference), first, second in zip(prompts, before, after, strict=True)
    )
    for sample in samples:
        log.info("prompt: %s\n  after training: %s", sample.prompt.strip(), sample.after.strip())
    return record.model_copy(
        update={"eval_loss_before": before_loss, "eval_loss_after": after_loss, "samples": samples}
    )


def _measure(
    spec: RunSpec, data: PreparedData, prompts: list[str], device: torch.device, *, weights: str | None
) -> tuple[float | None, list[str]]:
    tokenizer = data.tokenizer()
    model = build_model(spec, weights=weights).to(device).eval()
    adopt_tokenizer(model, tokenizer)
    patch(model, spec)
    loss = mean_loss(model, data, batch_size=spec.training.micro_batch_size, max_batches=spec.evaluation.max_batches)
    return loss, [generate(model, tokenizer, prompt, spec.evaluation.max_new_tokens) for prompt in prompts]


@torch.inference_mode()
def mean_loss(
    model: PreTrainedModel, data: PreparedData, *, batch_size: int, max_batches: int | None = None
) -> float | None:
    """Mean loss per target token of the validation split, nats; None when the split is empty."""
    total, targets = 0.0, 0
    for number, batch in enumerate(DataLoader(data.validation, batch_size=batch_size, collate_fn=collate)):
        if number == max_batches:
            break
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        count = int((batch["labels"][:, 1:] != -100).sum())
        if count:
            # Divided by one: the sum, so that short batches weigh as much as they hold.
            total += float(model(**batch, num_items_in_batch=1).loss)
            targets += count
    return total / targets if targets else None


@torch.inference_mode()
def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int) -> str:
    """The model's most likely continuation of `prompt`, without the prompt."""
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    written = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
    )
    return str(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
