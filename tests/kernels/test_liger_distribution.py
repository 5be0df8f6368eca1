"""kernels/compat: the distribution that gives programs `liger_kernel`, and refuses to be beside Liger-Kernel itself."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from strata_kernels.compat.liger import VERSION

COMPAT = Path(__file__).parents[2] / "kernels" / "compat"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=COMPAT, check=True, capture_output=True)
    (wheel,) = folder.glob("liger_kernel-*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "installed")
    return folder / "installed"


def liger_itself(folder: Path) -> Path:
    """A folder that looks as if Liger-Kernel were installed in it."""
    metadata = folder / "liger_kernel-0.8.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.8.5\n")
    return folder


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_programs_find_it(site) -> None:
    code = """
from importlib.metadata import version
from transformers.utils import is_liger_kernel_available
assert is_liger_kernel_available()
import liger_kernel
from liger_kernel.transformers.rms_norm import LigerRMSNorm
print(version("liger-kernel"), liger_kernel.__version__, LigerRMSNorm.__module__)
"""
    done = run(code, site)
    assert done.stdout.split() == [VERSION, VERSION, "strata_kernels.compat.liger.norms"], done.stderr


def test_it_is_not_imported_beside_liger_itself(site, tmp_path) -> None:
    done = run("import liger_kernel", site, liger_itself(tmp_path / "other"))
    assert f"liger-kernel 0.8.5 is installed in {tmp_path / 'other'}" in done.stderr
    assert "uninstall one of them" in done.stderr


def test_it_is_not_built_beside_liger_itself(tmp_path) -> None:
    code = f"""
import os, sysconfig
sysconfig.get_path = lambda name: {str(liger_itself(tmp_path))!r}
os.chdir({str(COMPAT)!r})
from hatchling.build import build_wheel
build_wheel({str(tmp_path)!r})
"""
    done = run(code)
    assert "liger-kernel 0.8.5 is installed" in done.stderr and "pip uninstall liger-kernel" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_versions() -> None:
    projects = {
        folder: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (COMPAT, COMPAT.parent)
    }
    assert projects[COMPAT]["version"] == VERSION
    assert projects[COMPAT]["dependencies"] == [f"strata-kernels=={projects[COMPAT.parent]['version']}"]
