"""Trains a spec; process 1 hangs once, in step 4, in place of counting what its loss is over. For an elastic agent."""

import os
import sys
import threading

from strata_platform.spec import load_spec
from tasks.runtime.process.log import configure_logging
from tasks.runtime.training.job import Job
from tests.runtime.helpers.train_only import train_spec


def hang(*arguments):
    threading.Event().wait()


def end_step(job, step, *arguments):
    plain_end_step(job, step, *arguments)
    if step == 3:
        # A step may take ten minutes on a busy machine; from here on, three seconds.
        job.watchdog.expect("step 4", 3 / job.spec.faults.hang_timeout)
        if job.processes.rank == 1:
            job.count = hang


if __name__ == "__main__":
    configure_logging()
    plain_end_step = Job.end_step
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Job.end_step = end_step
    train_spec(load_spec(sys.argv[1]))
