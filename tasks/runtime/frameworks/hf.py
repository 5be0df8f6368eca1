"""Training under the Hugging Face Trainer.

The Trainer owns the loop, the optimizer and the wrapping. What it leaves open is added at its hooks: metrics of every
step without a synchronization per step, checkpoints that count only when they are whole, and a line of progress.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.data import PreparedData, collator
from tasks.runtime.folder import RunFolder
from tasks.runtime.processes import Processes
from tasks.runtime.recorder import Recorder


def train(
    spec: RunSpec,
    model: PreTrainedModel,
    data: PreparedData,
    processes: Processes,
    folder: RunFolder,
    recorder: Recorder,
    *,
    steps: int,
    resume_from: Path | None,
) -> None:
    """Train `model` in place until `steps`; the last step is always saved as a checkpoint."""
    trainer = _Trainer(
        recorder=recorder,
        model=model,
        args=_arguments(spec, folder, steps),
        train_dataset=data.train,
        data_collator=collator(spec.model.attention),
        callbacks=[_Checkpoints(spec, data, processes, folder, recorder)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)


def _arguments(spec: RunSpec, folder: RunFolder, steps: int) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder.checkpoints),
        seed=spec.seed,
        data_seed=spec.seed,
        max_steps=steps,
        per_device_train_batch_size=spec.training.micro_batch_size,
        gradient_accumulation_steps=spec.training.gradient_accumulation_steps,
        optim="adamw_torch_fused",
        learning_rate=spec.peak_lr,
        adam_beta1=spec.optimizer.betas[0],
        adam_beta2=spec.optimizer.betas[1],
        adam_epsilon=spec.optimizer.eps,
        weight_decay=spec.optimizer.weight_decay,
        max_grad_norm=spec.optimizer.max_grad_norm,
        lr_scheduler_type=spec.schedule.type if spec.schedule.type != "constant" else "constant_with_warmup",
        warmup_steps=math.ceil(spec.schedule.warmup_ratio * steps),
        save_strategy="steps",
        save_steps=spec.checkpoint.every,
        # Old checkpoints go when the new one is whole, which the Trainer cannot know.
        save_total_limit=None,
        # Metrics, progress and TensorBoard are the recorder's: the Trainer's logging waits for the GPU at every step.
        logging_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        # Rows of a batch have only the model's inputs, and the loss is divided by the target tokens of all processes.
        remove_unused_columns=False,
        # Every batch has the shape that the kernels were compiled for; the next epoch is shuffled anew.
        dataloader_drop_last=True,
        average_tokens_across_devices=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        ddp_bucket_cap_mb=spec.parallel.bucket_cap_mb if spec.parallel.type == "ddp" else None,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    # One process drives one GPU. Left to itself, the Trainer of a single process wraps the model in DataParallel on a
    # machine that has more.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class _Trainer(Trainer):
    """The Trainer, with its per-step numbers handed to the recorder as device tensors."""

    def __init__(self, *, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._recorder = recorder

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert num_items_in_batch is not None, "the patched forward divides by the target tokens of the whole step"
        self._recorder.add_micro_batch(loss, tokens=inputs["input_ids"].numel(), targets=num_items_in_batch)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        # The one place where the Trainer has the norm and the rate of the step just done, before it saves. It comes
        # here at the end of an epoch, too, when no step is open.
        if self._recorder.step_is_open:
            self._recorder.end_step(self.state.global_step, grad_norm, kwargs["learning_rate"])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)


class _Checkpoints(TrainerCallback):
    """Declares a checkpoint whole after all processes have written it, then removes the oldest."""

    def __init__(
        self, spec: RunSpec, data: PreparedData, processes: Processes, folder: RunFolder, recorder: Recorder
    ) -> None:
        self._spec, self._data = spec, data
        self._processes, self._folder, self._recorder = processes, folder, recorder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._recorder.begin(state.global_step, state.max_steps)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Metrics first: a whole checkpoint implies that every step up to it is on record.
        self._recorder.flush()
        self._recorder.sync()
        self._processes.barrier()
        if self._processes.is_main:
            path = self._folder.checkpoints / f"{checkpoint.PREFIX}{state.global_step}"
            checkpoint.commit(
                path,
                spec_hash=self._spec.hash(),
                data_hash=self._data.manifest.recipe_hash,
                world_size=self._processes.world_size,
            )
            checkpoint.prune(self._folder.checkpoints, self._spec.checkpoint.keep_last)
        self._processes.barrier()
        self._recorder.restart_clock()
