"""The kernels themselves, where there is no GPU: the same test files under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# Few processes, about as long as each other, since a process takes some seconds to start.
FILES = {
    "norms": [
        "test_launch.py",
        "test_norm.py",
        "test_rms_norm.py",
        "test_add_rms_norm.py",
        "test_layer_norm.py",
    ],
    "other norms": ["test_group_norm.py", "test_modulated_norm.py", "test_poly_norm.py"],
    "rotary": ["test_rope.py", "test_rotations.py", "test_qk_norm_rope.py"],
    "activations": [
        "test_swiglu.py",
        "test_geglu.py",
        "test_gelu.py",
        "test_relu_squared.py",
        "test_activation_linear.py",
        "test_tiled_mlp.py",
    ],
    "experts": ["test_experts.py", "test_experts_adapters.py"],
    "optimizer": ["test_adamw.py", "test_adamw_8bit.py"],
    "float8": ["test_float8.py", "test_lora_linear.py"],
    "loss": ["test_cross_entropy.py", "test_linear_cross_entropy.py"],
    "log-probabilities": [
        "test_linear_logprobs.py",
        "test_selective_log_softmax.py",
        "test_softmax.py",
        "test_sparsemax.py",
        "test_dyt.py",
    ],
    "divergences": ["test_divergence.py", "test_linear_divergence.py"],
    "layouts": ["test_layouts.py"],
    "models": ["test_patched_models.py", "test_double_backward.py"],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is the interpreter's process")
@pytest.mark.parametrize("files", FILES.values(), ids=FILES.keys())
def test_interpreted(files: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / file) for file in files)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
