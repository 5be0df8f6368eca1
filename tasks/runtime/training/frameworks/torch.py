"""Training in a plain PyTorch loop."""

from __future__ import annotations

from tasks.runtime.optim.lr_schedule import set_learning_rate
from tasks.runtime.training.job import Job


def train(job: Job) -> None:
    """Train `job.model` in place until `job.steps`."""
    device = job.processes.device
    micro_batches = iter(job.loader())
    job.model.train()
    job.begin()
    for done in range(job.start, job.steps):
        batches = [next(micro_batches) for _ in range(job.spec.training.gradient_accumulation_steps)]
        items = job.count(batches)
        rate = job.learning_rate(done)
        set_learning_rate(job.optimizer, rate)
        for number, batch in enumerate(batches, start=1):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with job.backward_pass(job.model, last=number == len(batches)):
                job.loss(job.model, batch, items).backward()
        grad_norm = job.clip_gradients()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.end_step(done + 1, grad_norm, rate)
