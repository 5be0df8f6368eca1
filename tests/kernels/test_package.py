"""What importing the package does and offers."""

import subprocess
import sys
from pathlib import Path

import pytest

import strata_kernels


def test_importing_starts_no_cuda_and_no_transformers() -> None:
    code = "import sys, torch, strata_kernels as s, strata_kernels.warmup; [getattr(s, n) for n in s.__all__]; "
    code += "assert not torch.cuda.is_initialized(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_is_exported_once() -> None:
    assert len(strata_kernels.__all__) == len(set(strata_kernels.__all__))
    assert sorted(strata_kernels.__all__) == strata_kernels.__all__


def test_the_auto_model_is_imported_when_asked_for() -> None:
    pytest.importorskip("transformers")
    assert strata_kernels.AutoModelForCausalLM.__module__ == "strata_kernels.auto"
    with pytest.raises(AttributeError, match="'strata_kernels' has no attribute 'rmsnorm'"):
        strata_kernels.rmsnorm  # noqa: B018


def test_every_folder_is_a_package_and_the_types_are_declared() -> None:
    """import-linter and some build back ends do not see a folder without an `__init__.py`."""
    root = Path(strata_kernels.__file__).parent
    assert all((file.parent / "__init__.py").exists() for file in root.rglob("*.py"))
    assert (root / "py.typed").exists()
