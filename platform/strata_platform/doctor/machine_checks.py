"""The doctor's checks of a machine: a laptop, a node, or an image from its inside. They start no CUDA themselves."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from strata_platform.doctor.finding import Finding, ok, problem, skipped, warning
from strata_platform.doctor.gpu_health import faults
from strata_platform.doctor.nvml import LIBRARY, Nvml, NvmlError, NvmlMissing

_MIB = 2**20
_GIB = 2**30
# The oldest driver for each CUDA major version, by NVIDIA's table of minor version compatibility.
_DRIVERS = {11: 450, 12: 525, 13: 580}
# Shared memory for each GPU: NCCL's buffers, and the rows that data loaders pass on.
_SHARED_MEMORY = _GIB
_REMOTE_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "fuse.")
_SHADOWED = {
    "platform": "Python's own module, without which pip, flytekit and torch do not start",
    "kernels": "Hugging Face's package, which transformers imports from",
}
# Runs in a process of its own: torch is no dependency of this package, and a broken driver may kill the process.
_PROBE = """\
import json, warnings
warnings.simplefilter("ignore")
try:
    import torch
except ImportError as error:
    print(json.dumps({"missing": str(error)}))
else:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "error": None}
    found["archs"] = torch.cuda.get_arch_list() if torch.cuda.is_available() else []
    found["gpus"] = []
    try:
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                torch.ones(1, device=f"cuda:{index}").add_(1).item()
                major, minor = torch.cuda.get_device_capability(index)
                found["gpus"].append([torch.cuda.get_device_name(index), major, minor])
        elif torch.version.cuda or torch.version.hip:
            torch.cuda.init()
    except Exception as error:
        found["error"] = str(error).strip().splitlines()[0]
    print(json.dumps(found))
"""


@dataclass(frozen=True)
class Machine:
    """The machine to check."""

    environment: Mapping[str, str]
    folder: Path
    user: int
    shared_memory: Path = Path("/dev/shm")  # noqa: S108
    mounts: Path = Path("/proc/mounts")
    probe: str = field(default=_PROBE, repr=False)
    nvml: str = LIBRARY

    @classmethod
    def here(cls) -> Machine:
        """This machine, with this process's environment and working directory."""
        return cls(dict(os.environ), Path.cwd(), os.getuid())

    def which(self, program: str) -> str | None:
        """The path of a program, by the environment's PATH."""
        return shutil.which(program, path=self.environment.get("PATH", os.defpath))

    @cached_property
    def torch(self) -> dict[str, Any]:
        """What torch reports: versions, GPUs, and its error."""
        result = subprocess.run(
            [sys.executable, "-c", self.probe], env=dict(self.environment), text=True, capture_output=True, timeout=120
        )
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            return {"error": f"it ended with {result.returncode}: {last}", "torch": "", "gpus": [], "archs": []}
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return found

    @cached_property
    def driver(self) -> tuple[str, int] | None:
        """The NVIDIA driver's version and number of GPUs; None without a driver."""
        program = self.which("nvidia-smi")
        if program is None:
            return None
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(command, env=dict(self.environment), text=True, capture_output=True, timeout=60)
        lines = [line.strip() for line in result.stdout.splitlines() if re.match(r"\d+\.", line.strip())]
        return (lines[0], len(lines)) if lines else None


def _python(machine: Machine) -> Finding:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return ok(running)
    return problem(f"{running}; flytekit and this package need 3.11 or 3.12", "create an environment with Python 3.12")


def _packages(machine: Machine) -> Finding:
    found = {name: _version(name) for name in ("flytekit", "flytekitplugins-kfpytorch", "kubernetes")}
    install = "install the versions of requirements.lock"
    for name, installed in found.items():
        if installed is None:
            return problem(f"{name} is not installed", install)
    if found["flytekit"] != found["flytekitplugins-kfpytorch"]:
        installed = (
            f"flytekit {found['flytekit']} beside flytekitplugins-kfpytorch {found['flytekitplugins-kfpytorch']}"
        )
        return problem(f"{installed}: they are released together", install)
    if not str(found["flytekit"]).startswith("1.16."):
        return problem(f"flytekit {found['flytekit']}; the workflows are written for Flyte 1.16", install)
    if int(str(found["kubernetes"]).partition(".")[0]) >= 37:
        return problem(f"kubernetes {found['kubernetes']}, which flytekit cannot use", "install kubernetes<37")
    return ok(", ".join(f"{name} {installed}" for name, installed in found.items()))


def _shadowing(machine: Machine) -> Finding:
    for name, whose in _SHADOWED.items():
        if (machine.folder / name / "__init__.py").exists() or (machine.folder / f"{name}.py").exists():
            return problem(
                f"{machine.folder} has a Python package called {name}, which hides {whose}",
                f"rename it, or remove {name}/__init__.py",
            )
    return ok("no module here hides one that is needed")


def _flyte(machine: Machine) -> Finding:
    home = machine.environment.get("HOME", "/")
    file = Path(machine.environment.get("FLYTECTL_CONFIG") or f"{home}/.flyte/config.yaml")
    if not file.is_file():
        return warning(
            f"no configuration of Flyte at {file}: runs stay on this machine",
            "write one that names the cluster (admin: {endpoint: dns:///flyte.example.com}), or set FLYTECTL_CONFIG",
        )
    admin = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("admin") or {}
    endpoint = str(admin.get("endpoint", ""))
    host, _, port = endpoint.removeprefix("dns:///").partition(":")
    if not host:
        return problem(f"{file} names no admin.endpoint", "add it: admin: {endpoint: dns:///flyte.example.com}")
    try:
        socket.create_connection((host, int(port or 443)), timeout=5).close()
    except OSError as error:
        return problem(f"{endpoint} of {file} does not answer: {error}", "check the address, the network and the VPN")
    return ok(f"{endpoint} answers")


def _gpu(machine: Machine) -> Finding:
    """Whether driver, torch and GPU fit together."""
    found, driver = machine.torch, machine.driver
    if "missing" in found:
        return skipped("torch is not installed")
    if not found["gpus"] and driver is None and not found["error"]:
        return skipped(f"torch {found['torch']}, and no GPU: runs train on the CPU")
    if not found["gpus"]:
        return _unusable(found, driver)
    names = {name: (major, minor) for name, major, minor in found["gpus"]}
    for name, capability in names.items():
        if found["archs"] and not _runs_on(capability, found["archs"]):
            return problem(
                f"torch {found['torch']} has no code for {name} (sm_{capability[0]}{capability[1]}), only "
                f"{', '.join(found['archs'])}",
                "install a build of torch for a newer CUDA",
            )
    if driver and driver[1] > len(found["gpus"]):
        return warning(
            f"the driver has {driver[1]} GPUs and torch sees {len(found['gpus'])}",
            "look at CUDA_VISIBLE_DEVICES, and at nvidia-smi for a GPU that has failed",
        )
    return ok(
        f"{len(found['gpus'])} x {', '.join(names)}, driver {driver[0] if driver else '?'}, torch {found['torch']}"
    )


def _gpu_health(machine: Machine) -> Finding:
    """What the driver counts, such as memory errors."""
    try:
        nvml = Nvml(machine.nvml)
    except NvmlMissing:
        return skipped("no NVML: there is no NVIDIA driver, or the container does not see it")
    except NvmlError as error:
        return problem(f"the driver does not work: {error}", "look at dmesg, then reload the driver or reboot")
    try:
        gpus = nvml.gpus()
    finally:
        nvml.close()
    found = faults(gpus)
    if found:
        return problem("; ".join(map(str, found)), found[0].advice)
    trained = [gpu for gpu in gpus if gpu.link_recoveries]
    if trained:
        return warning(
            f"NVLinks of GPU {trained[0].index} had to be trained again {trained[0].link_recoveries} times since the "
            "driver was loaded",
            "watch the number; if it grows, have the GPU reseated or replaced",
        )
    return ok(f"{len(gpus)} GPUs without faults")


def _unusable(found: Mapping[str, Any], driver: tuple[str, int] | None) -> Finding:
    """Why torch sees no GPU although there may be one."""
    if not found.get("cuda") and not found.get("hip") and not found["error"]:
        assert driver is not None
        return problem(
            f"there are {driver[1]} GPUs, and torch {found['torch']} is built for the CPU alone",
            "install a build of torch for CUDA",
        )
    why = f": {found['error']}" if found["error"] else ""
    if driver is None:
        if not found["torch"]:
            return problem(f"torch does not start{why}", "reinstall it")
        return skipped(f"torch {found['torch']}, and no driver: runs train on the CPU")
    major = int(str(found.get("cuda") or "0").partition(".")[0])
    oldest = _DRIVERS.get(major)
    if oldest and int(driver[0].partition(".")[0]) < oldest:
        return problem(
            f"driver {driver[0]} is too old for torch {found['torch']}, which is built for CUDA {found['cuda']}",
            f"install driver {oldest} or newer, or a build of torch for an older CUDA",
        )
    return problem(
        f"driver {driver[0]} has {driver[1]} GPUs, and torch {found['torch']} sees none{why}",
        "look at CUDA_VISIBLE_DEVICES, at the container's runtime class, and at nvidia-smi",
    )


def _runs_on(capability: tuple[int, int], archs: list[str]) -> bool:
    """Whether torch has code for a GPU: cubins run on later GPUs of one major version, PTX on all later ones."""
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch)
        if match:
            built = int(match[2]), int(match[3])
            if built <= capability and (match[1] == "compute" or built[0] == capability[0]):
                return True
    # ROCm names its architectures differently (gfx942), and torch has already refused those that it has no code for.
    return all(arch.startswith("gfx") for arch in archs)


def _compiler(machine: Machine) -> Finding:
    baked = machine.environment.get("STRATA_BAKED_KERNELS")
    given = machine.environment.get("CC")
    found = next((path for name in filter(None, (given, "gcc", "clang", "cc")) if (path := machine.which(name))), None)
    if found is None:
        if baked:
            return warning(
                "no C compiler: kernels that are not baked in cannot be launched", "install gcc, or bake every model"
            )
        return problem("no C compiler, which Triton needs to build launchers", "install gcc, or set CC")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return problem(f"{found}, but no Python.h, which launchers need", "install Python's headers (python3-dev)")
    return ok(f"{found}, with Python's headers")


def _triton_cache(machine: Machine) -> Finding:
    home = machine.environment.get("HOME", "/")
    folder = Path(machine.environment.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return problem(
            f"{folder} cannot be written: {error.strerror}; the first kernel that has to be compiled ends the run",
            "set TRITON_CACHE_DIR to a folder of the node that can be",
        )
    kind = _file_system(existing, machine.mounts)
    if kind.startswith(_REMOTE_FILE_SYSTEMS):
        return problem(
            f"{folder} is on {kind}: pods that compile there at the same time read each other's incomplete files",
            "set TRITON_CACHE_DIR to a folder of the node, and share kernels with kernels.store",
        )
    if "TRITON_CACHE_DIR" not in machine.environment and machine.environment.get("KUBERNETES_SERVICE_HOST"):
        return warning(
            f"TRITON_CACHE_DIR is not set; the default is {folder}",
            "set it to one path on all nodes: kernels compiled for another path are compiled again",
        )
    return ok(f"{folder} can be written")


def _shared_memory(machine: Machine) -> Finding:
    if not machine.shared_memory.exists():
        return skipped(f"there is no {machine.shared_memory}")
    size = shutil.disk_usage(machine.shared_memory).total
    wanted = _SHARED_MEMORY * max(1, len(machine.torch.get("gpus", [])))
    if size >= wanted:
        return ok(f"{machine.shared_memory} has {size / _GIB:.1f} GiB")
    return problem(
        f"{machine.shared_memory} has {size / _MIB:.0f} MiB: NCCL and data loaders end with a bus error",
        f"raise resources.shared_memory of the spec to {wanted / _GIB:.0f}Gi; with docker run, --shm-size",
    )


def _tar(machine: Machine) -> Finding:
    if machine.which("tar"):
        return ok("tar is there to unpack the code that a run is registered with")
    return problem("no tar, which unpacks the code that a run is registered with", "install tar")


def _user(machine: Machine) -> Finding:
    if machine.user:
        return ok(f"user {machine.user}")
    return warning("runs as root, which the restricted pod security standard refuses", "set USER in the image")


def _baked(machine: Machine) -> Finding:
    folder = machine.environment.get("STRATA_BAKED_KERNELS")
    if not folder:
        return warning(
            "no kernels are baked in: every pod compiles them or downloads them from a store",
            "build the image with --build-arg MODELS, or set STRATA_BAKED_KERNELS to their folder",
        )
    manifests = sorted(Path(folder).glob("**/manifest.json"))
    if not manifests:
        return problem(f"STRATA_BAKED_KERNELS is {folder}, which has no manifest.json", "bake again, or unset it")
    return ok(f"kernels of {len(manifests)} bakes in {folder}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _file_system(path: Path, mounts: Path) -> str:
    """The type of the file system of `path`."""
    kind, longest = "", -1
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else []:
        _, point, found, *_ = line.split(" ")
        if len(point) > longest and path.resolve().is_relative_to(point):
            kind, longest = found, len(point)
    return kind


Check = Callable[[Machine], Finding]
_TRAINS: tuple[tuple[str, Check], ...] = (
    ("GPU, driver and torch", _gpu),
    ("GPU health", _gpu_health),
    ("C compiler", _compiler),
    ("Triton's cache", _triton_cache),
    ("shared memory", _shared_memory),
)
CHECKS: Mapping[str, tuple[tuple[str, Check], ...]] = {
    "laptop": (
        ("Python", _python),
        ("packages", _packages),
        ("hidden modules", _shadowing),
        ("Flyte", _flyte),
        ("GPU, driver and torch", _gpu),
    ),
    "image": (
        ("Python", _python),
        ("packages", _packages),
        ("hidden modules", _shadowing),
        ("user", _user),
        ("tar", _tar),
        ("C compiler", _compiler),
        ("Triton's cache", _triton_cache),
        ("baked kernels", _baked),
    ),
    "node": _TRAINS,
}
OF_FLYTE = (_packages, _flyte)
"""Checks of what machines have for Flyte alone."""
