"""The kernels themselves, where there is no GPU: the same test files under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = (
    "test_launch", "test_norm", "test_rms_norm", "test_add_rms_norm", "test_layer_norm", "test_group_norm",
    "test_modulated_norm", "test_poly_norm", "test_rope", "test_rotations", "test_qk_norm_rope", "test_swiglu",
    "test_geglu", "test_gelu", "test_relu_squared", "test_activation_linear", "test_tiled_mlp", "test_experts",
    "test_experts_adapters", "test_adamw", "test_adamw_8bit", "test_float8", "test_lora_linear", "test_cross_entropy",
    "test_linear_cross_entropy", "test_linear_logprobs", "test_selective_log_softmax", "test_softmax",
    "test_sparsemax", "test_dyt", "test_divergence", "test_linear_divergence", "test_layouts", "test_patched_models",
    "test_double_backward",
)  # fmt: skip
CODE = """
import sys, pytest
from tests.helpers.process_cost import leave
leave(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is the interpreter's process")
def test_interpreted() -> None:
    """In one process, since each takes seconds to start."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, "-q", "-p", "no:cacheprovider", *(f"{HERE / file}.py" for file in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
