"""What is wrong with GPUs is seen through NVML, here a library whose GPUs a file describes."""

import shutil

import pytest

from strata_platform.doctor.gpu_health import faults, xid_fault
from strata_platform.doctor.machine_checks import CHECKS, Machine
from strata_platform.doctor.nvml import Nvml, NvmlError, NvmlMissing, Xid
from tests.platform.helpers.fake_nvml import build, describe

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the library with")
BARE = {"width": 8, "width_max": 8}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    return {"new": build(folder), "old": build(folder, "old.so", "-DOLD_DRIVER")}


@pytest.fixture
def machine(libraries, tmp_path, monkeypatch):
    """Makes the library tell of a machine."""
    file = tmp_path / "gpus"
    monkeypatch.setenv("FAKE_NVML", str(file))
    opened = []

    def of(driver="new", **changes):
        describe(file, **changes)
        opened.append(Nvml(str(libraries[driver])))
        return opened[-1]

    yield of
    for nvml in opened:
        nvml.close()


def test_healthy_gpus_have_no_fault(machine):
    gpus = machine(gpus=8).gpus()
    assert faults(gpus, expected=8) == []
    assert [gpu.index for gpu in gpus] == list(range(8))
    first = gpus[0]
    assert (first.links, first.pcie_width, first.uncorrected_errors) == (18, 16, 0)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"ecc__1": 3}, "ecc", "GPU 1: 3 uncorrectable memory errors"),
        ({"pending__1": 1}, "row-remapping", "GPU 1: memory rows are to be remapped"),
        ({"failed__1": 1}, "row-remapping", "GPU 1: memory rows could not be remapped"),
        ({"slowdown__1": 0x8 | 0x40}, "slowdown", "GPU 1: its clocks are lowered: it is too hot"),
        ({"slowdown__1": 0x8 | 0x80}, "slowdown", "GPU 1: its clocks are lowered: the power supply"),
        ({"width__1": 8}, "pcie", "GPU 1: 8 of 16 PCIe lanes"),
        ({"links__1": 17}, "nvlink", "GPU 1: 17 NVLinks are up, and 18 of other GPUs"),
        ({"links__1": None}, "nvlink", "GPU 1: 0 NVLinks are up"),
        ({"error__1": 15}, "lost", "GPU 1: it does not answer: nvmlDeviceGetRemappedRows: GPU is lost"),
        ({"error__1": 999}, "lost", "GPU 1: it does not answer: nvmlDeviceGetRemappedRows: Unknown Error"),
        ({"handle__1": 15}, "lost", "GPU 1: it does not answer: nvmlDeviceGetHandleByIndex_v2: GPU is lost"),
    ],
)
def test_a_fault_is_named_with_its_gpu(machine, changes, kind, words):
    (found,) = faults(machine(**changes).gpus(), expected=2)
    assert found.kind == kind and str(found).startswith(words) and found.advice


@pytest.mark.parametrize("reasons", [0x1, 0x4, 0x20, 0x1 | 0x4 | 0x100])
def test_an_idle_gpu_and_one_at_its_power_cap_are_well(machine, reasons):
    assert faults(machine(slowdown__0=reasons).gpus()) == []


def test_what_a_gpu_does_not_have_is_no_fault(machine):
    gpus = machine(healthy=BARE).gpus()
    assert faults(gpus) == [] and gpus[0].links is None and gpus[0].uncorrected_errors is None


def test_gpus_that_retire_pages_and_drivers_without_row_remapping(machine):
    gpus = machine("old", healthy=BARE | {"retired": 1}, gpus=1).gpus()
    assert [fault.kind for fault in faults(gpus)] == ["row-remapping"]


def test_a_gpu_that_is_not_there_is_missed(machine):
    (found,) = faults(machine(gpus=7).gpus(), expected=8)
    assert found.kind == "missing" and "the driver has 7 GPUs, and the node should have 8" in str(found)


def test_xids_come_once_and_those_of_programs_are_no_fault(machine):
    nvml = machine(xid__1=79, xid__0=31)
    assert list(nvml.xids(0)) == [Xid(1, 79), Xid(0, 31)] and list(nvml.xids(0)) == []
    assert "XID 79, the GPU has fallen off the bus" in str(xid_fault(Xid(1, 79)))
    assert xid_fault(Xid(0, 31)) is None


def test_no_driver_is_something_else_than_a_broken_one(machine):
    with pytest.raises(NvmlMissing, match="no-such"):
        Nvml("no-such.so")
    with pytest.raises(NvmlError, match="nvmlInit_v2: Driver Not Loaded"):
        machine(init=9)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", "2 GPUs without faults"),
        ({"ecc__0": 1, "width__1": 4}, "problem", "memory errors since the driver was loaded; GPU 1: 4 of 16"),
        ({"recoveries__1": 7}, "warning", "NVLinks of GPU 1 had to be trained again 7 times"),
        ({"init": 9}, "problem", "the driver does not work: nvmlInit_v2: Driver Not Loaded"),
    ],
)
def test_the_doctor_looks_at_the_gpus_of_a_node(libraries, tmp_path, monkeypatch, changes, status, words):
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus"))
    describe(tmp_path / "gpus", **changes)
    check = dict(CHECKS["node"])["GPU health"]
    found = check(Machine({}, tmp_path, 0, nvml=str(libraries["new"])))
    assert found.status == status and words in found.message
    assert check(Machine({}, tmp_path, 0, nvml="no-such.so")).status == "skipped"
