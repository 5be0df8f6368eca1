"""`grpo`: answer prompts with the model, and make the answers likelier that rewards prefer to others of their group.

The formulas of its losses are those of `strata_kernels.policy`. In each step, `step_batches` replaces the prompts by
rows of prompt and answer. Means are over the answers, or their tokens, of the whole step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_kernels.policy import policy_losses, policy_weights, truncated_importance_weights
from strata_kernels.preference import sequence_sums
from strata_kernels.row_buckets import row_bucket
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Grpo as Settings
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch
from tasks.runtime.data.prompts import AnswerRows, Prompt, prompts_of, replacement_of
from tasks.runtime.data.row_order import row_order, seed_bits_of
from tasks.runtime.generation.remote_engine import RemoteGenerator
from tasks.runtime.models.adapters.lora import base_fingerprint, without_adapter
from tasks.runtime.models.attention.varlen_attention import has_varlen_attention, set_varlen_attention
from tasks.runtime.models.build import build_model, has_fused_loss, move_to_device, patch
from tasks.runtime.objectives.answer_log_probs import answer_log_probs, frozen_answer_log_probs
from tasks.runtime.objectives.generation_metrics import parts_of_step
from tasks.runtime.objectives.objective import MicroBatchLoss, ObjectiveContext, target_tokens
from tasks.runtime.objectives.rollout import Rollout, WhileTraining, sampling_of
from tasks.runtime.objectives.scored_answers import Step, rows_of
from tasks.runtime.process.ranks import Processes
from tasks.runtime.rewards.scoring import Rewards

log = logging.getLogger(__name__)

UNIT = "per answer"


class Grpo:
    """A loss of policy optimization over groups of generated answers."""

    unit = UNIT

    def __init__(self, spec: RunSpec, *, fused: bool) -> None:
        assert isinstance(spec.objective, Settings)
        self._spec, self._settings, self._fused = spec, spec.objective, fused
        self._temperature = spec.objective.generation.temperature
        self._context: ObjectiveContext | None = None
        self._rollout: Rollout | None = None
        self._reference: PreTrainedModel | None = None
        self._reference_fused = False
        # The answers that steps learn from, and the numbers of those that the first of them asked for.
        self._step: Step | None = None
        self._prompt_numbers: list[int] = []
        self._batches: list[Batch] = []
        # Whether this process has written answers since the start or the last rollback.
        self._written = False
        # With `generate_ahead` or `replacement_rounds`: the rows of all answers.
        self._rows: AnswerRows | None = None
        # With `generate_ahead` and a server, which answers while the model learns.
        self._while_training: WhileTraining | None = None

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Start the processes of rewards, and load the reference model where the run has one. Returns the data."""
        self._context, settings = context, self._settings
        whole, data = context.whole, context.data
        assert whole is not None and context.generator is not None
        tokenizer = data.tokenizer()
        if settings.beta and self._spec.adapter.type == "none":
            self._load_reference(context, varlen=has_varlen_attention(whole.model))
        if settings.generate_ahead and isinstance(context.generator, RemoteGenerator):
            self._while_training = context.generator.generate_while_training
        self._rollout = Rollout(
            settings,
            context.generator,
            sampling_of(settings.generation, data, whole.model),
            Rewards(settings.rewards, context.processes.device),
            tokenizer,
            self._replacement,
            self._while_training,
        )
        if settings.generate_ahead or settings.replacement_rounds:
            seed_bits = seed_bits_of(context.metadata)
            order = row_order(data.manifest, data.train, self._spec.data, self._spec.seed, seed_bits=seed_bits)
            self._rows = AnswerRows(data.train, order, settings.group_size)
        return data

    def _replacement(self, answer: int, round_number: int) -> Prompt:
        """The prompt that replaces that of an answer of a step in a round."""
        assert self._rows is not None
        settings = self._settings
        return self._rows.prompt(
            replacement_of(
                answer,
                round_number,
                rounds=settings.replacement_rounds,
                rows_per_step=self._spec.rows_per_step,
                group_size=settings.group_size,
            )
        )

    def metadata(self) -> dict[str, Any]:
        """Empty: answers are a function of the weights, the seed and the step."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Return the data unchanged."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """The columns of a row with prompt and answer. Loads the reference on the meta device."""
        row = dict.fromkeys(("input_ids", "labels", "position_ids", "sequence", "counted"), tokens)
        row |= dict.fromkeys(("advantage", "generated"), tokens.float())
        return row | ({"old": tokens.float()} if self._settings.num_iterations > 1 else {})

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Answer the prompts of `batches`. Steps that read the same prompts learn from the same answers. A
        collective.
        """
        assert self._rollout is not None and self._context is not None and self._context.whole is not None
        prompts = [prompt for batch in batches for prompt in prompts_of(batch)]
        asked = [prompt.answer or 0 for prompt in prompts if prompt is not None]
        if asked != self._prompt_numbers:
            self._context.whole.update()
            self._rollout.update_weights(processes)
            asking = [prompt for prompt in prompts if prompt is not None]
            self._step = self._rollout.run(asking, processes, self._upcoming(asking))
            self._prompt_numbers = asked
            size = self._spec.training.micro_batch_size
            self._batches = [
                self._context.collate(rows_of(self._step, first, size)) for first in range(0, len(asked), size)
            ]
            if self._settings.num_iterations > 1:
                self._batches = [self._with_old(model, batch, processes) for batch in self._batches]
            if processes.is_main:
                self._write_answers(self._step, min(asked))
                self._warn_of_silence(self._step, min(asked))
        return [dict(batch) for batch in self._batches]

    def rolled_back(self) -> None:
        """Drop the answers: their weights no longer exist."""
        self._step, self._prompt_numbers, self._batches = None, [], []
        self._written = False
        if self._rollout is not None:
            self._rollout.rolled_back()

    def _upcoming(self, prompts: list[Prompt]) -> list[Prompt]:
        """This rank's prompts of the next step, if their answers are generated in this one.

        They are not before a checkpoint, so that a run that resumes there generates what it would have otherwise. Nor
        are they where a server would answer beside an evaluation, which sends it other weights.
        """
        assert self._context is not None
        spec, rows = self._spec, self._rows
        step, data_rows = (prompts[0].answer or 0) // spec.rows_per_step + 1, self._context.data.rows
        if not self._settings.generate_ahead or rows is None or step == self._context.steps:
            return []
        if spec.is_saved(step, data_rows) or (self._while_training and spec.is_evaluated(step, data_rows)):
            return []
        return [rows.prompt((prompt.answer or 0) + spec.rows_per_step) for prompt in prompts]

    def count(self, batch: Batch) -> Tensor:
        """The number of answers."""
        return (batch["counted"] != 0).sum()

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Do nothing: `step_batches` has found the totals."""

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The loss of the batch's answers, divided by the answers or the tokens of the whole step."""
        settings, size = self._settings, self._spec.training.micro_batch_size
        sequences = batch["sequence"].flatten() - 1
        found = answer_log_probs(
            model, batch, temperature=self._temperature, fused=self._fused, max_targets=max_targets
        )
        log_probs = found.log_probs.flatten()
        generated = batch["generated"].flatten()
        reference = self._reference_log_probs(model, batch, max_targets) if settings.beta else None
        # Of the policy that generated the answers: its changes since then are in the ratio.
        old = batch["old"].flatten() if "old" in batch else log_probs.detach()
        weights = None
        if (most := settings.largest_weight) is not None:
            weights = truncated_importance_weights(old, generated, sequences, size, most=most)
        terms = policy_losses(
            log_probs,
            sequence_sums(batch["advantage"].flatten(), sequences, size),
            sequences,
            loss=settings.loss,
            old_log_probs=old,
            reference_log_probs=None if reference is None else reference.flatten(),
            importance_weights=weights,
            beta=settings.beta,
            epsilon_low=settings.epsilon,
            epsilon_high=settings.highest_ratio,
            delta=settings.delta,
        )
        answers, tokens = self._totals(batch)
        own = policy_weights(
            sequences,
            size,
            loss=settings.loss,
            total_sequences=answers,
            total_tokens=tokens,
            max_tokens=settings.generation.max_new_tokens,
        )
        # The mean over the tokens of the step.
        answered = (sequences >= 0).float() / tokens
        with torch.no_grad():
            of_tokens = {
                "entropy": found.entropy.flatten(),
                "clipped": terms.clipped,
                "generation_difference": (old - generated).abs(),
                **({"kl": terms.kl} if settings.beta else {}),
            }
            metrics = {name: (values * answered).sum() for name, values in of_tokens.items()}
        return MicroBatchLoss((terms.loss * own).sum(), self._of_step(items.device) | metrics)

    def _totals(self, batch: Batch) -> tuple[int, int]:
        """Answers and tokens of the step; of a plan, those of the batch."""
        if self._step is None:
            return self._spec.training.micro_batch_size, batch["input_ids"].numel()
        return max(self._step.answers, 1), max(self._step.tokens, 1)

    def _of_step(self, device: torch.device) -> dict[str, Tensor]:
        """This micro-batch's part of the values that were computed for the whole step."""
        if self._step is None:
            return {}
        parts = self._spec.training.gradient_accumulation_steps * self._spec.dp_size
        return parts_of_step(self._step.metrics, parts, device)

    def _reference_log_probs(self, model: nn.Module, batch: Batch, max_targets: int | None) -> Tensor:
        # A plan loads no reference, which is a model like the one that is trained.
        reference: nn.Module = model if self._reference is None else self._reference
        with without_adapter(model) if self._spec.adapter.type != "none" else nullcontext():
            return frozen_answer_log_probs(
                reference,
                batch,
                temperature=self._temperature,
                fused=self._fused if self._reference is None else self._reference_fused,
                max_targets=max_targets,
            )

    def _with_old(self, model: nn.Module, batch: Batch, processes: Processes) -> Batch:
        """The batch with the log-probabilities of the policy that has generated it."""
        bound = row_bucket(int(target_tokens(batch)), batch["input_ids"].numel())
        there = {name: tensor.to(processes.device, non_blocking=True) for name, tensor in batch.items()}
        old = frozen_answer_log_probs(model, there, temperature=self._temperature, fused=self._fused, max_targets=bound)
        return batch | {"old": old.cpu()}

    def _load_reference(self, context: ObjectiveContext, *, varlen: bool) -> None:
        """Load the initial model once more, frozen, on every rank.

        Raises ValueError if it is another one than at the start of the run.
        """
        reference = build_model(self._spec.model, self._spec.seed)
        if base_fingerprint(reference) != context.base:
            raise ValueError(
                f"objective.beta {self._settings.beta} needs the initial model as the reference, but model.name "
                f"{self._spec.model.name!r} has other weights than at the start of the run; restore them, or choose "
                "another name and train again"
            )
        reference.requires_grad_(False)
        reference.eval()
        self._reference_fused = has_fused_loss(patch(reference, self._spec.kernels))
        if varlen:
            set_varlen_attention(reference)
        move_to_device(reference, context.processes.device)
        self._reference = reference
        log.info("reference: the initial model, %.1f M parameters, frozen", reference.num_parameters() / 1e6)

    def _warn_of_silence(self, step: Step, first: int) -> None:
        rounds, groups = self._settings.replacement_rounds, self._spec.rows_per_step // self._settings.group_size
        left_out = groups - step.answers // self._settings.group_size
        if rounds and left_out:
            log.warning(
                "step %d: the rewards of %d of %d groups are all equal after objective.replacement_rounds %d; they are "
                "left out of the loss", self._number_of(first), left_out, groups, rounds,
            )  # fmt: skip

    def _number_of(self, answer: int) -> int:
        """The first step that learns from an answer, counted from 1; data that was skipped counts, too."""
        return answer // self._spec.rows_per_step * self._settings.num_iterations + 1

    def _write_answers(self, step: Step, first: int) -> None:
        """Write the answers to the first prompt of a step to `answers.jsonl` of the run's folder, in the place of what
        stands there of this step and of later ones.
        """
        spec = self._spec
        number = self._number_of(first)
        path = answers_file(Path(spec.output), spec.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._written and path.exists():
            _cut(path, number)
        self._written = True
        with path.open("a", encoding="utf-8") as file:
            for answer in step.logged:
                file.write(json.dumps({"step": number, **answer}, ensure_ascii=False) + "\n")


def _cut(path: Path, step: int) -> None:
    """Truncate a file of answers before those of a step and of later ones, and before a line without its end, which a
    process that was killed has begun.
    """
    with path.open("rb+") as file:
        kept = 0
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                break
            kept += len(line)
        file.truncate(kept)


def answers_file(output: Path, name: str) -> Path:
    """The file with some answers of each step."""
    return output.absolute() / name / "answers.jsonl"
