"""Training with Lightning's Trainer.

The Trainer runs the loop: it runs forward and backward passes, accumulates, clips, steps, and calls the usual hooks.
The job provides model, optimizer, data order, loss, checkpoints and distribution, through a LightningModule and a
Strategy.
"""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tasks.runtime.data.dataset import Batch
from tasks.runtime.training.job import Job

# Hides the hardware summary and the tips that Lightning logs at every start.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)

MicroBatch = tuple[Batch, Tensor]
"""A micro-batch, and the number of items in its step; see `Job.count`."""


def train(job: Job) -> None:
    """Train `job.model` in place until `job.steps`."""
    job.model.train()
    with warnings.catch_warnings():
        # Lightning's use of deprecated PyTorch functions: users cannot change it.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
        _Trainer(job).fit(_Module(job), train_dataloaders=_MicroBatches(job))


class _MicroBatches:
    """The job's micro-batches. It reads all of a step together, because the loss of each depends on the count
    of all.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._loader = job, job.loader()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[MicroBatch]:
        micro_batches = iter(self._loader)
        for _ in range(self._job.start, self._job.steps):
            batches = [next(micro_batches) for _ in range(self._job.spec.training.gradient_accumulation_steps)]
            items = self._job.count(batches)
            for batch in batches:
                yield batch, items


class _Module(LightningModule):
    """Maps Lightning's hooks to the job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model
        self._job = job
        self._loss: Tensor | None = None
        self._grad_norm: Tensor | None = None

    def configure_optimizers(self) -> Any:
        job = self._job
        schedule = LambdaLR(job.optimizer, lambda done: job.learning_rate_factor(job.start + done))
        return {"optimizer": job.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self._job.begin()

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        self._loss = self._job.loss(self.model, *batch)
        return self._loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # Lightning divides `loss` by the number of micro-batches, but the job's loss is a part of the step's mean
        # already.
        assert self._loss is not None
        self._loss.backward()
        self._loss = None

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self._grad_norm = self._job.clip_gradients()

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            done = self.trainer.global_step
            self._job.end_step(done, self._grad_norm, self._job.learning_rate(done - 1))


class _Strategy(ParallelStrategy):
    """Adapts the job's strategy, which has wrapped the model already, to Lightning's interface."""

    def __init__(self, job: Job) -> None:
        super().__init__(parallel_devices=[job.processes.device])
        self._job = job
        self._on_interrupt = signal.getsignal(signal.SIGINT)

    @property
    def root_device(self) -> torch.device:
        return self._job.processes.device

    @property
    def global_rank(self) -> int:
        return self._job.processes.rank

    @property
    def local_rank(self) -> int:
        return self._job.processes.local_rank

    @property
    def node_rank(self) -> int:
        return self.global_rank // self._job.spec.topology.nproc_per_node

    @property
    def world_size(self) -> int:
        return self._job.processes.world_size

    def setup(self, trainer: Trainer) -> None:
        # Lightning's own setup would move the optimizer's state to the device, even state that is in host memory on
        # purpose.
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Do nothing: the model is on its device."""

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Wraps every backward pass of a step except the last."""
        return self._job.backward_pass(self._job.model, last=False)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure, which is the step's last forward and backward pass, and update the weights."""

        def last_pass() -> Any:
            with self._job.backward_pass(self._job.model, last=True):
                return closure()

        output = super().optimizer_step(optimizer, last_pass, model, **kwargs)
        # Lightning zeroes gradients only after the next forward pass, so they would overlap with its activations in
        # memory.
        optimizer.zero_grad()
        return output

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor

    def barrier(self, name: str | None = None) -> None:
        self._job.processes.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src=src, device=torch.device("cpu"))
        return objects[0]

    def on_exception(self, exception: BaseException) -> None:
        """Re-raise Ctrl-C and restore its handler. Lightning would exit, and a notebook would ignore the next
        Ctrl-C.
        """
        if isinstance(exception, KeyboardInterrupt):
            signal.signal(signal.SIGINT, self._on_interrupt)
            raise exception

    def teardown(self) -> None:
        """Do nothing: Lightning would move the model to the host."""


class _Trainer(Trainer):
    """A Trainer without metrics, checkpoints and signal handlers: the job has its own."""

    def __init__(self, job: Job) -> None:
        super().__init__(
            accelerator=job.processes.device.type,
            devices=1,
            strategy=_Strategy(job),
            # Otherwise Lightning looks for launchers that it knows, and uses the first one.
            plugins=[LightningEnvironment()],
            max_steps=job.steps,
            limit_val_batches=0,
            accumulate_grad_batches=job.spec.training.gradient_accumulation_steps,
            use_distributed_sampler=False,
            default_root_dir=job.writer.root,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self._signal_connector = _NoSignals(self)
        self.fit_loop.epoch_loop = _EpochLoop(self, max_steps=job.steps)
        self.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = job.start


class _NoSignals(_SignalConnector):
    """Leaves SIGTERM to the job. Lightning's handler would start a collective from wherever the process is."""

    def register_signal_handlers(self) -> None:
        """Register nothing."""


class _EpochLoop(_TrainingEpochLoop):
    """Lightning's loop without the broadcast that tells all ranks about SIGTERM.

    The broadcast runs before every micro-batch and waits for the GPU, which would then idle.
    """

    def _broadcast_sigterm_tensor(self) -> None:
        pass
