"""A vocabulary that two processes hold, and DTensors. The tests that they run are in two_processes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is tested is around the kernels")
def test_two_processes(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "two_processes.py"), str(tmp_path / "rendezvous")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
