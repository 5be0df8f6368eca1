"""strata_kernels.compat.liger: `import liger_kernel` in a process, its metadata, what it says of what is missing."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap

import pytest
import transformers
from packaging.requirements import Requirement
from transformers.utils import is_liger_kernel_available
from trl.import_utils import is_liger_kernel_available as trl_finds_liger

from strata_kernels.compat import liger
from strata_kernels.compat.liger.families import FAMILIES, FAMILY_OF
from strata_kernels.compat.liger.surface import INSTEAD, PROVIDED


@pytest.mark.usefixtures("liger_kernel")
def test_programs_find_it_and_no_longer() -> None:
    assert is_liger_kernel_available() and trl_finds_liger()
    assert Requirement("liger-kernel>=0.8.0").specifier.contains(importlib.metadata.version("liger-kernel"))
    assert importlib.metadata.distribution("Liger_Kernel").metadata["Name"] == "liger_kernel"
    assert "liger_kernel" in importlib.metadata.packages_distributions()
    import liger_kernel.transformers

    assert liger_kernel.__version__ == liger.VERSION
    liger.install()
    assert sum(type(finder).__name__ == "Finder" for finder in sys.meta_path) == 1
    liger.uninstall()
    assert not is_liger_kernel_available() and importlib.util.find_spec("liger_kernel") is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("liger-kernel")


@pytest.mark.usefixtures("liger_kernel")
def test_every_name_is_there() -> None:
    for module, names in PROVIDED.items():
        found = importlib.import_module(f"liger_kernel.{module}".rstrip("."))
        assert sorted(found.__all__) == sorted(names) == sorted(dir(found))
        for name in names:
            assert getattr(found, name) is not None
    assert not PROVIDED.keys() & INSTEAD.keys()
    assert not {name for names in PROVIDED.values() for name in names} & INSTEAD.keys()


@pytest.mark.usefixtures("liger_kernel")
def test_modules_are_attributes() -> None:
    import liger_kernel

    assert liger_kernel.functional.rms_norm and liger_kernel.transformers.functional.liger_rms_norm


@pytest.mark.usefixtures("liger_kernel")
@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("from liger_kernel.transformers import LigerMHC", "LigerMHC; use PyTorch"),
        ("import liger_kernel.megatron", "liger_kernel.megatron; use strata_kernels"),
        ("from liger_kernel.ops.rms_norm import rms_norm_forward", "rms_norm_forward; use `apply`"),
        ("from liger_kernel.transformers.model.llama import lce_forward", "llama; use strata_kernels.patch_model"),
        ("from liger_kernel import set_impl", "set_impl; use the one implementation"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(statement, hint) -> None:
    with pytest.raises(ImportError, match=r"^Strata provides no liger_kernel") as caught:
        exec(statement)
    assert hint in str(caught.value)


@pytest.mark.usefixtures("liger_kernel")
def test_unknown_names_are_unknown() -> None:
    import liger_kernel.transformers

    assert not hasattr(liger_kernel.transformers, "LigerNothing")
    with pytest.raises(ModuleNotFoundError, match=r"liger_kernel\.nothing"):
        importlib.import_module("liger_kernel.nothing")


def test_liger_itself_was_imported_before(monkeypatch) -> None:
    real = importlib.util.module_from_spec(importlib.util.spec_from_loader("liger_kernel", None))
    monkeypatch.setitem(sys.modules, "liger_kernel", real)
    with pytest.raises(RuntimeError, match=r"call install\(\) before"):
        liger.install()


def test_every_type_is_one_of_transformers() -> None:
    assert len(FAMILIES) == 45 and len(FAMILY_OF) == 53
    assert set(FAMILY_OF) <= set(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)


def test_transformers_is_needed_by_what_patches_alone() -> None:
    code = """
        import sys
        sys.modules["transformers"] = None
        from strata_kernels.compat.liger import install
        install()
        from liger_kernel.transformers import LigerRMSNorm, is_transformers_available
        try:
            from liger_kernel.transformers import apply_liger_kernel_to_llama
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "pip install 'transformers>=5.17,<5.25'" in done.stdout
