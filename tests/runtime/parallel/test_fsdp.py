"""What FSDP cannot shard is rejected before it is sharded, and what it gathers in FP8."""

import pytest
import torch

from strata_platform.spec.sections.model import Model
from tasks.runtime.models.build import build_model
from tasks.runtime.parallel.fsdp import require_one_dtype
from tests.runtime.helpers.train_forked import launch


@pytest.mark.usefixtures("narrowed")
def test_weights_that_learn_in_another_type_are_refused():
    """Such as the routers of ERNIE 4.5, which are kept in fp32."""
    model = build_model(Model(dtype="bfloat16"), 0)
    require_one_dtype(model)
    norm = model.model.layers[1].input_layernorm.float()
    with pytest.raises(ValueError, match=r"'model.layers.1.input_layernorm.weight' is not bfloat16 .*compute_dtype"):
        require_one_dtype(model)
    norm.requires_grad_(False)
    require_one_dtype(model)
    assert norm.weight.dtype == torch.float32


def test_weights_gathered_in_fp8_have_the_bits_of_a_cast_after_gathering():
    """Of trained and frozen weights, in both dtypes, recomputed or not, in two processes; fewer bytes are sent."""
    launch(module="tests.runtime.helpers.gathered_float8")


def test_the_norm_of_sharded_gradients_is_not_rounded_to_their_type():
    """Of all placements on two dimensions of a mesh, in four processes."""
    launch(module="tests.runtime.helpers.sharded_norm")
