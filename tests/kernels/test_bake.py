"""Baking without a GPU: what is written, that Triton finds it, and what changes a key."""

import hashlib
import importlib.util
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITCallable

from images import check as images
from strata_kernels import ops
from strata_kernels.__main__ import _progress, main
from strata_kernels.ops._stable_cache_keys import omit_line_numbers
from strata_kernels.warmup import Plan, count_compiles, record
from strata_kernels.warmup.bake import MANIFEST, bake, built_with
from strata_kernels.warmup.cross_compile import (
    build_library,
    compile_for_target,
    library_folders,
    load_library,
    target_of,
)
from strata_kernels.warmup.plan_model import load_config, plan_model, presets
from strata_kernels.warmup.triton_cache import keys, load, relocate
from tests.kernels.helpers import kernels_to_bake

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")

ROOT = Path(__file__).parents[2]
# One layer, everything small.
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfile's own step bakes for the tiny model."""
    root = tmp_path_factory.mktemp("root")
    stages = images.read((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    cores = os.sched_getaffinity(0)
    # A worker costs more than these kernels do.
    os.sched_setaffinity(0, {min(cores)})
    try:
        (step,) = images.execute(stages, "kernels", root, {"MODELS": str(tiny), "ARCHS": "sm_90"})
    finally:
        os.sched_setaffinity(0, cores)
    assert step.endswith(f"--out {root}/opt/kernels")
    return root


@pytest.fixture(scope="module")
def baked(root: Path) -> Path:
    return root / "opt/kernels/sm_90"


@pytest.fixture(scope="module")
def plan(tiny: Path, root: Path) -> Plan:
    assert main(["plan", "--model", str(tiny), "--out", str(root / "plan.json")]) == 0
    return Plan.from_json((root / "plan.json").read_text(encoding="utf-8"))


@pytest.fixture
def library(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the image: one path of CUDA's library, in which the bake has put one to link to."""
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(root / "opt/libcuda"))
    monkeypatch.setenv("LIBRARY_PATH", "")
    load_library(root / "opt/libcuda/libcuda.so.1")


def manifest(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def found(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90") -> tuple[int, int]:
    """(kernels compiled, kernels found) by a process that starts with this cache and without a C compiler."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setenv("CC", "/bin/false")
    for item in plan.specializations:
        item.kernel.device_caches.clear()
    with count_compiles() as compiles:
        for item in plan.on(target_of(arch)).specializations:
            compile_for_target(item, target_of(arch))
    return compiles.count, len(compiles.cached)


def test_the_manifest_says_what_was_baked_with_what(baked, plan, library):
    said = manifest(baked)
    assert said["arch"] == "sm_90" and said["plan"] == plan.on(target_of("sm_90")).hash and not said["failed"]
    assert said["without_launchers"] is None and said["library_folders"] == list(library_folders())
    assert {name: said[name] for name in built_with(plan)} == built_with(plan)
    assert {kernel["entry"] for kernel in said["kernels"]} <= said["entries"].keys() == set(keys(baked))
    assert len(said["kernels"]) == len(plan)
    for key, files in said["entries"].items():
        for name, file in files.items():
            data = (baked / key / name).read_bytes()
            assert file == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert all(load(baked, key) for key in keys(baked))


def test_what_was_baked_is_found_where_nothing_can_be_written_or_built(baked, plan, library, monkeypatch):
    before = sorted(baked.rglob("*"))
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert found(plan, baked, monkeypatch) == (0, len(plan))
    assert sorted(baked.rglob("*")) == before


def test_what_the_plan_does_not_hold_is_compiled(baked, tiny, library, monkeypatch, tmp_path):
    """As a run in another dtype would: the counter tells, so a test that counts none has seen a plan that is whole."""
    here = Path(shutil.copytree(baked, tmp_path / "cache"))
    relocate(here)
    plan = plan_model(load_config(str(tiny)), batch=1, length=4096, dtype=torch.float32)
    other = Plan(tuple(item for item in plan.specializations if item.name == "multiply_kernel"))
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    assert found(other, here, monkeypatch) == (1, 0)


def test_a_moved_cache_is_found_after_relocation_alone(baked, plan, library, monkeypatch, tmp_path):
    item = plan.specializations[0]
    moved = Path(shutil.copytree(baked, tmp_path / "elsewhere" / "cache"))
    hidden = baked.rename(baked.with_name("hidden"))
    try:
        assert relocate(moved) == len(manifest(moved)["kernels"])
        assert found(Plan((item,)), moved, monkeypatch) == (0, 1)
        unrelocated = Path(shutil.copytree(hidden, tmp_path / "unrelocated"))
        monkeypatch.setenv("CC", "cc")
        assert found(Plan((item,)), unrelocated, monkeypatch) == (1, 0)
    finally:
        hidden.rename(baked)


def test_a_kernel_that_fails_and_one_that_crashes_cost_no_other(tmp_path):
    plan = record(lambda: [kernels_to_bake.crashing(), kernels_to_bake.broken(), kernels_to_bake.good()])
    seen = []
    (result,) = bake(plan, ["sm_90"], tmp_path, workers=1, progress=lambda *progress: seen.append(progress))
    assert {failed.name: failed.error for failed in result.failed}["crashing_kernel"].startswith("the compiler crashed")
    assert "no such block" in {failed.name: failed.error for failed in result.failed}["broken_kernel"]
    assert [compiled.name for compiled in result.compiled] == ["good_kernel"] and not result.compiled[0].hit
    assert [done for done, _, _ in seen] == [1, 2, 3] and seen[0][1] == 3
    said = manifest(tmp_path / "sm_90")
    assert len(said["failed"]) == 2 and len(said["kernels"]) == 1
    # Nothing is left of a compilation that failed.
    assert all(load(tmp_path / "sm_90", key) for key in keys(tmp_path / "sm_90"))
    assert "2 failed" in result.summary()
    with pytest.raises(ValueError, match="is not empty"):
        bake(plan, ["sm_90"], tmp_path)


def key(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, cache: Path, arch: str = "sm_90", **options: object
) -> str:
    """Of `module.good` for a GPU: the hash that Triton looks for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    (item,) = record(lambda: module.good(**options)).specializations
    item.kernel.device_caches.clear()
    compiled, _ = compile_for_target(item, target_of(arch))
    return str(compiled.hash)


def variant(folder: Path, name: str, source: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with mock.patch.dict(sys.modules, {name: module}):
        omit_line_numbers(name)
    return module


def test_what_changes_a_key(tmp_path, library, monkeypatch):
    source = Path(kernels_to_bake.__file__).read_text(encoding="utf-8")

    def of(name: str, text: str, **options: object) -> str:
        return key(variant(tmp_path, name, text), monkeypatch, tmp_path / "cache", **options)

    first = of("same", source)
    # The kernel's own text, that of a function it calls, a constexpr, a class of arguments, the chip, the compiler.
    changed = [
        of("kernel", source.replace("mask=o < n), SCALE)", "mask=o <= n), SCALE)")),
        of("helper", source.replace("b_x * SCALE", "SCALE * b_x")),
        of("constexpr", source, scale=3.0),
        of("argument", source, n=16),
        of("dtype", source, dtype=torch.float16),
        of("arch", source, arch="sm_100"),
    ]
    key_of_triton = triton.runtime.cache.triton_key()
    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.cache, "triton_key", lambda: f"{key_of_triton} of another version")
        changed.append(of("triton", source))
    assert len({first, *changed}) == 1 + len(changed)
    # Not the file's place and name, what is said in it outside of the kernel, or another kernel's text.
    assert of("above", source.replace("@triton.jit", "# A comment.\n@triton.jit")) == first
    assert of("below", source + "\n# A comment.\n") == first
    assert of("other", source.replace("BLOCK == 0", "BLOCK == 1")) == first


def test_no_kernel_of_the_package_is_known_by_its_line_or_tuned_when_it_is_launched():
    modules = [import_module(found.name) for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    values = [value for module in modules for value in vars(module).values()]
    functions = [value for value in values if isinstance(value, JITCallable)]
    assert len(functions) > 20
    assert [function.__name__ for function in functions if function.starting_line_number != 1] == []
    assert [value for value in values if isinstance(value, Autotuner)] == []


def test_other_chips_are_compiled_for_and_told_apart(monkeypatch, tmp_path, library):
    cuda, hip = (key(kernels_to_bake, monkeypatch, tmp_path, arch) for arch in ("sm_80", "gfx942"))
    assert cuda != hip
    _, problem = compile_for_target(record(kernels_to_bake.good).specializations[0], target_of("gfx942"))
    assert problem == "libamdhip64.so is missing; bake in an image that has it"


@pytest.mark.parametrize("arch", ["h100", "sm_9", "sm90", "gfx", ""])
def test_no_arch(arch):
    with pytest.raises(ValueError, match=r"use e\.g\. sm_90"):
        target_of(arch)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--arch", "sm_90"], "--model is missing: pass one or more of llama-3.1-8b, qwen3-4b"),
        (["--arch", "sm_90", "--model", "gpt-5"], "model 'gpt-5' is neither a preset"),
        (["--arch", "sm_90", "--model", "qwen3-4b", "--plan", "x"], "--plan and --model exclude each other"),
        (["--arch", "sm_90", "--batch", "2", "--plan", "x"], "--plan and --batch exclude each other"),
        (["--arch", "h100", "--model", "qwen3-4b"], "arch 'h100' is unknown"),
        (["--arch", ",", "--model", "qwen3-4b"], "pass at least one architecture"),
        (["--arch", "sm_90", "--batch", "0"], "'0' is not a list of positive integers"),
        (["--arch", "sm_90", "--learns", "some"], "'some' is not a list of all and adapter"),
        (["--arch", "sm_90", "--batch", "two"], "invalid _numbers value: 'two'"),
        (["--arch", "sm_90", "--plan", "/no/plan"], "No such file or directory: '/no/plan'"),
    ],
)
def test_wrong_arguments_are_reported(arguments, problem, tmp_path, capsys):
    try:
        code = main(["bake", "--out", str(tmp_path / "out"), *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2 and problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_saved_plan_names_what_to_bake(tiny, tmp_path, capsys):
    out = ["--out", str(tmp_path / "new" / "plan")]
    assert main(["plan", "--model", str(tiny), "--batch", "1,2", "--length", "64", "--learns", "all", *out]) == 0
    plan = Plan.from_json((tmp_path / "new" / "plan").read_text(encoding="utf-8"))
    assert plan == plan_model(load_config(str(tiny.parent)), batch=2, length=64)
    assert capsys.readouterr().out.startswith(f"{len(plan)} kernels, plan {plan.hash[:12]}, in ")


def test_the_stub_library_is_written_where_triton_looks_and_never_over_the_real_one(monkeypatch, tmp_path):
    place = tmp_path / "driver"
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(place))
    library = build_library(tmp_path)
    assert library == place / "libcuda.so.1"
    before = library.read_bytes()
    assert build_library(tmp_path) == tmp_path / "libcuda.so.1" and library.read_bytes() == before


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log(monkeypatch, capsys):
    bar = _progress()
    for done in range(1, 9):
        bar(done, 8, "sm_90 norm_fwd_kernel")
    assert capsys.readouterr().err.split("\n") == ["2/8 kernels", "4/8 kernels", "6/8 kernels", "8/8 kernels", ""]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = _progress()
    bar(4, 8, "sm_90 norm_fwd_kernel")
    assert capsys.readouterr().err.startswith("\r[############            ] 4/8 sm_90 norm_fwd_kernel")


def test_without_a_c_compiler_nothing_is_baked(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="baking needs a C compiler"):
        build_library(tmp_path)


def test_an_empty_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no kernel to bake"):
        bake(Plan(()), ["sm_90"], tmp_path)


def test_where_the_drivers_library_is_in_pods_can_be_said(monkeypatch):
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/opt/driver")
    assert library_folders() == ("/opt/driver",)


@pytest.mark.parametrize("name", presets())
def test_presets_have_plans(name):
    config = load_config(name)
    assert {"norm_bwd_kernel", "cross_entropy_kernel"} <= {
        item.name for item in plan_model(config, batch=1, length=4096).specializations
    }


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="baked for sm_90"
)
def test_a_real_step_compiles_nothing_that_the_plan_did_not_hold(baked, tiny, library):
    step = (
        "import sys, torch; from transformers import AutoModelForCausalLM; from strata_kernels import patch_model\n"
        "from strata_kernels.warmup import count_compiles; from strata_kernels.warmup.plan_model import load_config\n"
        "with torch.device('cuda'):\n"
        "    model = AutoModelForCausalLM.from_config(load_config(sys.argv[1]), dtype=torch.bfloat16)\n"
        "    rows = torch.randint(512, (1, 4096))\n"
        "patch_model(model); model.train()\n"
        "with count_compiles() as compiles:\n"
        "    for _ in range(3):\n"
        "        items = torch.tensor(4095, device='cuda')\n"
        "        model(input_ids=rows, labels=rows, num_items_in_batch=items).loss.backward()\n"
        "    torch.cuda.synchronize()\n"
        "print(compiles.count, len(compiles.cached))"
    )
    environment = {**os.environ, "CC": "/bin/false", "TRITON_CACHE_DIR": str(baked)}
    done = subprocess.run(
        [sys.executable, "-c", step, str(tiny)], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == "0" != done.stdout.split()[1]
