"""Modules are loaded beside the model, and whatever is wrong with them costs time alone."""

import threading
from contextlib import nullcontext

import pytest
import torch

from strata_kernels import rms_norm
from strata_kernels.warmup import Compiled, Failed, Plan, WarmupReport, count_compiles, record, warmup
from strata_platform.spec import RunSpec
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.warmup import training_process as module
from tasks.runtime.warmup.pod import warmup_files
from tasks.runtime.warmup.training_process import ModuleLoader, training_warmup
from tasks.runtime.warmup.warmup_metadata import WarmupMetadata

PLANNED = WarmupReport("GPU", 2, (Compiled("a", "", 0.1, hit=True),), (Failed("b", "x=1", "no room"),), 0.1)


class OnGpu(Processes):
    """A process that has one, for what is not launched."""

    device = torch.device("cuda", 0)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The file of a plan; what CUDA would do is left out."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    path = tmp_path / "plan.json"
    path.write_text(Plan(()).to_json())
    return path


def test_the_model_is_built_meanwhile(plan, monkeypatch, caplog):
    built = threading.Event()

    def load(plan, workers):
        assert built.wait(10), "loading kept the model waiting"
        return PLANNED

    monkeypatch.setattr(module, "warmup", load)
    loading = ModuleLoader(plan, OnGpu())
    built.set()
    loading.wait()
    loading.wait()
    report = loading.metadata().to_dict()
    assert report["modules"] == 1 and report["module_seconds"] > 0 and report["module_wait_seconds"] > 0
    assert "b was not loaded: no room" in caplog.text


@pytest.mark.parametrize("text", ["", '{"plan": "changed", "kernels": []}'])
def test_a_plan_that_cannot_be_read_is_told(plan, caplog, text):
    plan.write_text(text)
    loading = ModuleLoader(plan, OnGpu())
    loading.wait()
    assert loading.metadata().to_dict() == {} and "modules load when they are launched" in caplog.text


@pytest.mark.parametrize("processes", [Processes(), OnGpu()], ids=["no GPU", "no plan"])
def test_where_nothing_is_planned_nothing_is_loaded(tmp_path, processes):
    loading = ModuleLoader(tmp_path / "none.json", processes)
    loading.wait()
    assert loading.metadata().to_dict() == {}


@pytest.mark.gpu
def test_a_first_launch_finds_its_module_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    spec, folder = RunSpec(output=str(tmp_path)), RunFolder(tmp_path)

    def step(device):
        x, weight = (torch.ones(*shape, device=device, requires_grad=True) for shape in ((8, 112), (112,)))
        rms_norm(x, weight, 1e-6).sum().backward()

    plan = record(lambda: step("meta"))
    assert not warmup(plan).failed
    for item in plan.specializations:
        item.kernel.device_caches.clear()
    warmup_files(folder).plan.write_text(plan.to_json())
    with training_warmup(spec, folder, Processes(), WarmupMetadata()) as warm:
        warm.wait_until_loaded()
        with count_compiles() as counted:
            step("cuda")
    assert counted.compiled == counted.cached == []
    assert warm.to_dict()["modules"] == len(plan) and warm.misses == []
