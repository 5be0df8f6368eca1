"""Training with the Hugging Face Trainer.

The Trainer runs the loop: forward and backward passes, accumulation, clipping, steps and callbacks. The job provides
model, optimizer, data order, loss and checkpoints, as for every framework.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from strata_platform.spec import RunSpec
from tasks.runtime.training.job import Job


def train(job: Job) -> None:
    """Train `job.model` in place until `job.steps`."""
    with _own_environment():
        trainer = _Trainer(job)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


@contextmanager
def _own_environment() -> Iterator[None]:
    """Hide the variables with which `accelerate launch` tells the Trainer how to distribute a model.

    They may be set for other work on the machine. The job's strategy has distributed the model already.
    """
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        os.environ.update(hidden)


class _Arguments(TrainingArguments):
    """Arguments for a model that is on its device already."""

    @property
    def place_model_on_device(self) -> bool:
        return False


def arguments(spec: RunSpec, folder: Path, steps: int) -> TrainingArguments:
    """The Trainer's settings of the loop. It writes nothing to `folder`."""
    values = _Arguments(
        output_dir=str(folder),
        seed=spec.seed,
        max_steps=steps,
        per_device_train_batch_size=spec.training.micro_batch_size,
        gradient_accumulation_steps=spec.training.gradient_accumulation_steps,
        # Any positive value makes the Trainer call `_clip_grad_norm`, which clips to the spec's norm.
        max_grad_norm=1.0 if spec.optimizer.max_grad_norm or not spec.optimizer.in_backward else 0.0,
        save_strategy="no",
        # The recorder logs metrics and progress: the Trainer's own logging waits for the GPU at every step.
        logging_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    # One process drives one GPU. By default, the Trainer of a single process wraps the model in DataParallel if the
    # machine has more.
    values._n_gpu = min(values.n_gpu, 1)
    # In a Kubeflow pod, the Trainer reports to Kubeflow whatever `report_to` says.
    values.report_to = []
    return values


class _Trainer(Trainer):
    """Runs the Trainer's loop over the job."""

    def __init__(self, job: Job) -> None:
        super().__init__(
            model=job.unwrapped_model,
            args=arguments(job.spec, job.writer.root, job.steps),
            train_dataset=job.data.train,
            optimizers=(
                job.optimizer,
                LambdaLR(job.optimizer, lambda done: job.learning_rate_factor(job.start + done)),
            ),
            callbacks=[_Begin(job)],
        )
        self._job = job
        # The strategy has placed everything. When accelerate prepares an optimizer it would move the state of one that
        # continues to the GPU, also what parallel.cpu_offload keeps in host memory.
        self.accelerator.device_placement = False
        # Otherwise the Trainer divides the loss by the number of micro-batches for models that average their own loss.
        # The job's loss is a part of the step's mean already.
        self.model_accepts_loss_kwargs = True
        # The model is wrapped. The marker keeps accelerate from wrapping it again if the strategy changed it in place.
        self.model_wrapped = job.model
        job.model._is_accelerate_prepared = True  # type: ignore[assignment]

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return self._job.loader()

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device) -> Any:
        return self._job.count(batch_samples)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert num_items_in_batch is not None and not return_outputs
        return self._job.loss(model, inputs, num_items_in_batch)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert num_items_in_batch is not None
        with self._job.backward_pass(model, last=self.accelerator.sync_gradients):
            return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # The Trainer's own copies wait for the GPU, which then waits for the host in each micro-batch.
        return {name: tensor.to(self._job.processes.device, non_blocking=True) for name, tensor in inputs.items()}

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # Nothing reads their sum, and the Trainer would count all parameters again for each micro-batch.
        return 0

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor | None:
        return self._job.clip_gradients()

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor | None:
        # Without clipping, the Trainer would compute the norm only for its log.
        return grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        # The only method where the Trainer has the norm of the finished step. It also runs at the end of an epoch,
        # without an open step. Its learning rate is that of the first group, which may have one of its own.
        if self._job.recorder.step_is_open:
            done = self.state.global_step
            self._job.end_step(done, grad_norm, self._job.learning_rate(done - 1))


class _Begin(TrainerCallback):
    """Starts the Trainer's step count at the resumed step."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.global_step = self._job.start
        self._job.begin()
