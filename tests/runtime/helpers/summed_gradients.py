"""Gradients of a step of many micro-batches, under each strategy: `-m tests.runtime.helpers.summed_gradients FOLDER`.

Each is compared with the same step in fp64 by transformers alone.
"""

import os
import sys
from pathlib import Path

import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.run_folder.folder import data_folder
from tasks.runtime.verification.exact import exact_step
from tasks.runtime.verification.observe import first_step
from tests.runtime.helpers.all_imports import import_everything
from tests.runtime.helpers.free_port import free_port
from tests.runtime.helpers.train_forked import run_forked

MICRO_BATCHES = 64
# Of each of two processes.
EACH = MICRO_BATCHES // 2
STRATEGIES = (
    {"type": "ddp"},
    {"type": "fsdp"},
    {"type": "fsdp", "cpu_offload": True},
    *({"type": "deepspeed", "stage": stage} for stage in (1, 2, 3)),
    {"type": "deepspeed", "stage": 1, "offload_optimizer": "cpu"},
)


def prepared(folder, framework="torch", parallel=None, **training):
    """The spec and the data of a run that reads one row of `folder`'s model in each of its micro-batches."""
    spec = RunSpec.model_validate({
        "output": str(folder),
        "model": {"name": f"{folder}/pretrained", "dtype": "bfloat16"},
        "data": {"sequence_length": 32, "max_samples": 600, "validation_fraction": 0},
        "training": {"steps": 1, "micro_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES, **training},
        "runtime": {"framework": framework},
        "tracking": {"report_to": []},
        "parallel": parallel or {"type": "single"},
        "topology": {"nproc_per_node": 2 if parallel else 1},
    })  # fmt: skip
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return spec, prepare(recipe, data_folder(spec.output, recipe), report=print)


def exact_gradients(folder, rows=MICRO_BATCHES):
    """Of a step of so many rows, in fp64."""
    return exact_step(*prepared(folder, gradient_accumulation_steps=rows)).gradients


def error(exact, folder, *arguments, **changes):
    """The norm of the difference of a run's gradients from those in fp64, relative to the norm of the latter."""
    found = first_step(*prepared(folder, *arguments, **changes)).gradients
    differences = torch.stack([(found[name].double() - exact[name]).norm() for name in exact])
    return float(differences.norm() / torch.stack([gradient.norm() for gradient in exact.values()]).norm())


def check(folder, exact, ports):
    """Raise AssertionError unless the sum in fp32 has less error under each strategy than one in bf16."""
    ports = iter(ports)

    def observed(parallel, **training):
        # On the port of the last process group, a rank could still find its store.
        os.environ["MASTER_PORT"] = str(next(ports))
        return error(exact, folder, parallel=parallel, gradient_accumulation_steps=EACH, **training)

    rounded = observed({"type": "ddp"}, gradient_accumulation_dtype="bfloat16")
    for parallel in STRATEGIES:
        summed = observed(parallel)
        assert 0 < summed < 0.75 * rounded, (parallel, summed, rounded)


if __name__ == "__main__":
    import_everything()
    folder, free = Path(sys.argv[1]), [free_port() for _ in range(1 + len(STRATEGIES))]
    # Once, for all processes.
    exact = exact_gradients(folder)
    sys.exit(run_forked(2, lambda: check(folder, exact, free)))
