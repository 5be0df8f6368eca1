"""Measure a model before and after training: loss on the validation split, and what it writes."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, collator
from tasks.runtime.data import Sample as Prompt
from tasks.runtime.model import adopt_tokenizer, build_model, patch
from tasks.runtime.record import CompletionRecord, Sample
from tasks.runtime.weights import build_trained_model

log = logging.getLogger(__name__)


def evaluate(spec: RunSpec, record: CompletionRecord, data: PreparedData, weights: Path) -> CompletionRecord:
    """The record with losses and samples of the model before training and with `weights`, of `collect_weights`.

    Raises ValueError when the run did not finish.
    """
    record.require_complete()
    prompts = data.samples(spec.evaluation.samples)
    # One model in memory at a time.
    before_loss, before = _measure(spec, data, prompts, weights=None)
    after_loss, after = _measure(spec, data, prompts, weights=weights)
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
        Sample(prompt=prompt.prompt, reference=prompt.completion, before=first, after=second)
        for prompt, first, second in zip(prompts, before, after, strict=True)
    )
    for sample in samples:
        log.info("prompt: %s\n  after training: %s", sample.prompt.strip(), sample.after.strip())
    return record.model_copy(
        update={"eval_loss_before": before_loss, "eval_loss_after": after_loss, "samples": samples}
    )


def _measure(
    spec: RunSpec, data: PreparedData, prompts: list[Prompt], *, weights: Path | None
) -> tuple[float | None, list[str]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = data.tokenizer()
    model = (build_trained_model(spec, weights) if weights else build_model(spec)).to(device).eval()
    adopt_tokenizer(model, tokenizer)
    patched = patch(model, spec)
    # In evaluation the patched forward returns logits, as transformers does, unless it is told that nobody wants them.
    quiet = {"skip_logits": True} if patched and "linear_cross_entropy" in patched.counts else {}
    return mean_loss(model, data, spec, **quiet), [generate(model, tokenizer, prompt, data, spec) for prompt in prompts]


@torch.inference_mode()
def mean_loss(model: PreTrainedModel, data: PreparedData, spec: RunSpec, **forward: bool) -> float | None:
    """Mean loss per target token of the validation split, nats; None when the split is empty.

    `forward` are further arguments of the model.
    """
    batches = DataLoader(
        data.validation, batch_size=spec.training.micro_batch_size, collate_fn=collator(spec.model.attention)
    )
    total, targets = 0.0, 0
    for batch in islice(batches, spec.evaluation.max_batches):
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        count = int((batch["labels"][:, 1:] != -100).sum())
        if count:
            # Divided by one: the sum, so that every token weighs the same.
            total += float(model(**batch, num_items_in_batch=1, **forward).loss)
            targets += count
    return total / targets if targets else None


@torch.inference_mode()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, data: PreparedData, spec: RunSpec
) -> str:
    """The model's most likely continuation of the prompt, without the prompt."""
    ids = torch.tensor([prompt.prompt_ids], device=model.device)
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=spec.evaluation.max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(data.manifest.stop_token_ids) or None,
            pad_token_id=data.manifest.pad_token_id,
        ),
    )
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
