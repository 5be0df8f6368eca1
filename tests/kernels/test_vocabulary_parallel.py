"""A vocabulary that two processes hold, and DTensors. Their tests: helpers/vocabulary_parallel_processes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is tested is around the kernels")
def test_two_processes(tmp_path) -> None:
    program = Path(__file__).parent / "helpers" / "vocabulary_parallel_processes.py"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "rendezvous")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
