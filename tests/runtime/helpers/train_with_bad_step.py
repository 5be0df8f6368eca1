"""Trains as `train_forked` does, on data that ruins a step.

    python -m tests.runtime.helpers.train_with_bad_step PROCESSES SPEC[@STEP]...

Whatever process reads the first row of the data of step BAD gets gradients from it that are not finite; or, where the
spec watches for that, a great loss.
"""

import sys

import torch

from tasks.runtime.objectives import MicroBatchLoss
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.training import job, step_guard
from tests.runtime.helpers.all_imports import import_everything
from tests.runtime.helpers.train_forked import in_turn, run_forked

BAD = 4


def ruin(rows_per_step=4, patch=setattr):
    """Have the loss of a batch that has that row multiplied."""
    of_run = {}
    plain_loader, plain_share = job.training_loader, NextToken.micro_batch_loss

    def training_loader(spec, data, processes, **options):
        loader = plain_loader(spec, data, processes, **options)
        row = loader.batch_sampler._order[(BAD - 1) * rows_per_step]
        of_run["row"] = data.train[row]["input_ids"].to(processes.device)
        of_run["factor"] = torch.nan if spec.faults.spike == "ignore" else 100.0
        return loader

    def micro_batch_loss(self, model, batch, *arguments):
        clean = plain_share(self, model, batch, *arguments)
        bad = (batch["input_ids"] == of_run["row"]).all(dim=-1).any()
        return MicroBatchLoss(clean.loss * torch.where(bad, of_run["factor"], 1.0), clean.metrics)

    patch(job, "training_loader", training_loader)
    patch(NextToken, "micro_batch_loss", micro_batch_loss)
    # The shortest window that the spec allows is longer than these runs.
    patch(step_guard, "spike_limit", lambda losses, deviations: losses[-1:].max() + 1)


if __name__ == "__main__":
    import_everything()
    ruin()
    sys.exit(run_forked(int(sys.argv[1]), in_turn(sys.argv[2:])))
