"""What the log says of a run before its first step."""

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime.training.run_summary import rounded_sums


@pytest.mark.parametrize(
    ("micro_batches", "dtype", "parallel", "warns"),
    [
        (33, torch.bfloat16, "single", True),
        (33, torch.bfloat16, "fsdp", True),
        (32, torch.bfloat16, "single", False),
        (512, torch.float32, "single", False),
        (512, torch.bfloat16, "deepspeed", False),
    ],
)
def test_it_warns_of_many_gradients_that_are_added_in_bfloat16(micro_batches, dtype, parallel, warns):
    spec = RunSpec(
        training={"gradient_accumulation_steps": micro_batches},
        parallel={"type": parallel},
        topology={"nproc_per_node": 1 if parallel == "single" else 2},
    )
    warning = rounded_sums(spec.training, spec.parallel, dtype)
    assert (warning is not None) is warns
    assert warning is None or f"gradient_accumulation_steps {micro_batches}" in warning
