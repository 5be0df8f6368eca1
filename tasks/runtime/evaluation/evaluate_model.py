"""Measure a model before and after training: validation loss, samples, scores of lm-evaluation-harness tasks."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Grpo
from tasks.runtime.data import PreparedData, collator
from tasks.runtime.data import Sample as Prompt
from tasks.runtime.data.dataset import TOKENIZER
from tasks.runtime.data.media.media_processor import saved_processor
from tasks.runtime.evaluation.lm_eval_harness import Score, task_scores
from tasks.runtime.extensions.callback_runner import CallbackRunner
from tasks.runtime.generation import start_engine
from tasks.runtime.models.attention.packing_support import learned_position_count
from tasks.runtime.models.build import has_fused_loss, patch, set_special_tokens
from tasks.runtime.models.media.media_inputs import sample_inputs, with_model_inputs
from tasks.runtime.models.score_head import score_positions
from tasks.runtime.models.trained_weights import build_initial_model, build_trained_model
from tasks.runtime.objectives import build_validation_objective
from tasks.runtime.objectives.rollout import end_tokens
from tasks.runtime.objectives.validation_loss import validation_means
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.log import indented
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.record import CompletionRecord, Sample, TaskScore

log = logging.getLogger(__name__)


class Measurements(NamedTuple):
    """Results for one model. `means`: loss and metrics over the validation split; {} if the split is empty.

    by_source: the same over the rows of each source.
    """

    means: dict[str, float]
    written: list[str]
    scores: dict[tuple[str, str], Score]
    by_source: tuple[dict[str, float], ...] = ()


def evaluate(spec: RunSpec, record: CompletionRecord, data: PreparedData, weights: Path) -> CompletionRecord:
    """Evaluate the model before and after training and add losses, samples and scores to the record.

    `weights`: the folder of `collect_weights`.

    Raises:
        ValueError: the run is not complete, or a task cannot be loaded.
    """
    record.require_complete()
    # A model that scores texts writes none.
    prompts = data.samples(0 if spec.model.head == "score" else spec.evaluation.samples)
    # One after the other, so that one model is in memory at a time.
    before, data = _measure(spec, data, prompts, weights=None)
    after, _ = _measure(spec, data, prompts, weights=weights)
    samples = tuple(
        Sample(prompt=prompt.prompt, reference=prompt.completion, before=first, after=second)
        for prompt, first, second in zip(prompts, before.written, after.written, strict=True)
    )
    scores = tuple(
        TaskScore(
            task=task,
            metric=metric,
            before=before.scores[task, metric].value,
            after=score.value,
            error=score.error,
            higher_is_better=score.higher_is_better,
        )
        for (task, metric), score in after.scores.items()
    )
    record = record.model_copy(
        update={
            "eval_loss_before": before.means.get("loss"),
            "eval_loss_after": after.means.get("loss"),
            "eval_metrics": {name: value for name, value in after.means.items() if name != "loss"},
            "sources": tuple(
                share.model_copy(update={"eval_loss_before": first.get("loss"), "eval_loss_after": second.get("loss")})
                for share, first, second in zip(record.sources, before.by_source, after.by_source, strict=False)
            ),
            "task_scores": scores,
            "samples": samples,
        }
    )
    _log_results(record)
    callbacks = CallbackRunner(spec.runtime.callbacks)
    callbacks.evaluation(0, record.eval_loss_before, before.means)
    callbacks.evaluation(record.steps, record.eval_loss_after, record.eval_metrics)
    return record


def _log_results(record: CompletionRecord) -> None:
    before, after = record.eval_loss_before, record.eval_loss_after
    if before is None or after is None:
        log.warning("data.validation_fraction leaves no validation rows; no loss before and after")
    else:
        change = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
        log.info("validation loss %.4f before, %.4f after%s", before, after, change)
    for share in record.sources:
        if share.eval_loss_before is not None and share.eval_loss_after is not None:
            losses = share.eval_loss_before, share.eval_loss_after
            log.info("validation loss %.4f before, %.4f after: %s", *losses, share.source)
    for name, value in record.eval_metrics.items():
        log.info("validation %s %.4f after", name, value)
    for score in record.task_scores:
        log.info("%s: %s %.4f before, %.4f after", score.task, score.metric, score.before, score.after)
    for sample in record.samples:
        log.info("prompt: %s\n  after training: %s", indented(sample.prompt), indented(sample.after))


def _measure(
    spec: RunSpec, data: PreparedData, prompts: list[Prompt], *, weights: Path | None
) -> tuple[Measurements, PreparedData]:
    """Measurements, and the data with the columns that the objective computes with the model before training."""
    tokenizer = data.tokenizer()
    model = (build_trained_model(spec, weights) if weights else build_initial_model(spec)).to(Processes().device).eval()
    set_special_tokens(model, tokenizer)
    score_positions(model)
    patched = patch(model, spec.kernels)
    log.info("kernels in evaluation: %s", patched.summary() if patched else "off")
    objective = build_validation_objective(spec, fused=has_fused_loss(patched), data=data, **_engine(spec, model, data))
    if weights is None:
        data = objective.prepare_validation(model, data, spec)
    with without_router_loss(model):
        means = validation_means(
            model,
            objective,
            data.validation_by_source(),
            Processes(),
            micro_batch_size=spec.training.micro_batch_size,
            max_batches=spec.evaluation.max_batches,
            collate=with_model_inputs(collator(spec.model.attention), model, data),
        )
    written = [generate(model, tokenizer, prompt, data, spec.evaluation.max_new_tokens) for prompt in prompts]
    scores = task_scores(model, tokenizer, spec.evaluation, batch_size=spec.training.micro_batch_size)
    return Measurements(means.of_all, written, scores, means.by_source), data


def _engine(spec: RunSpec, model: PreTrainedModel, data: PreparedData) -> dict[str, Any]:
    """What answers held-out prompts: the engine of the run. Empty where none are answered."""
    if not (isinstance(spec.objective, Grpo) and len(data.validation)):
        return {}
    whole = WholeModel(model)
    return {"whole": whole, "generator": start_engine(spec, whole, data, Processes())}


@contextmanager
def without_router_loss(model: PreTrainedModel) -> Iterator[None]:
    """Leave the auxiliary loss of routers out, so that the exponential of the loss is a perplexity."""
    config = model.config.get_text_config()
    before = getattr(config, "output_router_logits", None)
    if before is not None:
        config.output_router_logits = False
    try:
        yield
    finally:
        if before is not None:
            config.output_router_logits = before


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, data: PreparedData, max_new_tokens: int
) -> str:
    """The model's greedy continuation of the prompt, without the prompt, within its position embeddings."""
    ids = torch.tensor([prompt.prompt_ids], device=model.device)
    positions = learned_position_count(model)
    if positions is not None and (left := positions - ids.shape[1]) < max_new_tokens:
        log.warning(
            "evaluation.max_new_tokens %d: the model has positions for %d after this prompt", max_new_tokens, left
        )
        if left <= 0:
            return ""
        max_new_tokens = left
    inputs = {}
    if prompt.media:
        processor = saved_processor(data.folder / TOKENIZER, tokenizer)
        assert processor is not None
        inputs = sample_inputs(processor, model, ids, [b64decode(content) for content in prompt.media])
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **inputs,
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(end_tokens(model, data)) or None,
            pad_token_id=data.manifest.pad_token_id,
        ),
    )
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
