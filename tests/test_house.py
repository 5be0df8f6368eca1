"""The shape of the project itself."""

import ast
import gc
import inspect
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import strata_platform
from strata_platform.spec import RunSpec
from tests.conftest import SLOW, TESTS

ROOT = Path(__file__).parent.parent


def test_files_that_are_run_first_are_there():
    assert [name for name in SLOW if not (TESTS / f"{name}.py").is_file()] == []


@pytest.mark.parametrize("folder", [".", "kernels", "platform"])
def test_folders_that_must_not_be_packages(folder):
    # As a package, `platform` would shadow the standard library's module, and `kernels` Hugging Face's.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("distribution", ["kernels", "platform", "tasks"])
def test_no_two_files_of_a_distribution_have_one_name(distribution):
    """Whoever looks for a module by its name finds one."""
    names = Counter(
        path.name for path in (ROOT / distribution).rglob("*.py") if path.name not in ("__init__.py", "__main__.py")
    )
    assert [name for name, number in names.items() if number > 1] == []


LAYERS = {"runtime": ROOT / "tasks" / "runtime", "platform": ROOT / "platform" / "strata_platform"}
# Pages that several modules write.
WITHOUT_A_MODULE = {"generated_pages"}


def names_in(room: Path) -> set[str]:
    """Names of a folder of modules, and of the modules and folders in it, however deep."""
    return {path.stem for path in (room, *room.rglob("*.py"), *room.rglob("*/"))}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_test_in_a_room_is_named_after_a_module_of_it(layer):
    """Whoever changes a module finds its tests by its name."""
    files = [file.relative_to(TESTS / layer) for file in (TESTS / layer).glob("*/**/test_*.py")]
    unknown = [file for file in files if file.stem[len("test_") :] not in names_in(LAYERS[layer] / file.parts[0])]
    assert files and unknown == []


@pytest.mark.parametrize("layer", LAYERS)
def test_a_test_beside_the_rooms_is_of_no_module_in_them(layer):
    """What crosses the runtime's rooms is named after the behaviour; tests of the platform all have a module."""
    outside = {file.stem[len("test_") :] for file in (TESTS / layer).glob("test_*.py")} - WITHOUT_A_MODULE
    beside = {path.stem for path in LAYERS[layer].glob("*.py")}
    assert outside & names_in(LAYERS[layer]) <= beside
    assert layer == "runtime" or outside <= beside


# Flyte tasks, whose interface is the spec, and the run's folder, which is named by two fields outside of sections.
TAKE_THE_WHOLE_SPEC = {
    "tasks/runtime/data/loader.py: __init__",
    "tasks/runtime/run_folder/folder.py: of",
    "tasks/scheduled.py: announce",
    "tasks/scheduled.py: announce_failure",
    "tasks/sweep.py: compare",
}


def attributes_read(function: ast.AST, parameter: str) -> set[str] | None:
    """Attributes of `parameter` that `function` reads; None if it also uses the parameter as a whole."""
    nodes = list(ast.walk(function))
    read = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == parameter]
    uses = sum(isinstance(node, ast.Name) and node.id == parameter for node in nodes)
    return {node.attr for node in read} if uses == len(read) else None


def sections_behind(attributes: Iterable[str]) -> set[str] | None:
    """Fields of RunSpec behind `attributes`, which may be its properties; None for a method, which uses all fields."""
    found: set[str] = set()
    for name in attributes:
        if name not in RunSpec.model_fields:
            if not isinstance(getter := inspect.getattr_static(RunSpec, name), property):
                return None
            source = ast.parse(textwrap.dedent(inspect.getsource(getter.fget)))
            found |= sections_behind(attributes_read(source, "self"))
        else:
            found.add(name)
    return found


def functions_of_the_spec() -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Path and name, node, and parameter of each function that takes a RunSpec."""
    for path in (*LAYERS["platform"].rglob("*.py"), *(ROOT / "tasks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for parameter in node.args.args:
                    if parameter.annotation and ast.unparse(parameter.annotation) == "RunSpec":
                        yield f"{path.relative_to(ROOT)}: {node.name}", node, parameter.arg


def test_functions_take_the_sections_of_the_spec_that_they_read():
    """A function that reads one or two sections takes these: its signature then says what it depends on."""
    found = set()
    for name, function, parameter in functions_of_the_spec():
        attributes = attributes_read(function, parameter)
        sections = sections_behind(attributes) if attributes else None
        if sections is not None and len(sections) < 3:
            found.add(name)
    assert found == TAKE_THE_WHOLE_SPEC


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter in the project's root has loaded after `statement`."""
    code = f"{statement}; import sys; print(*sys.modules, sep='\\n')"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True
        ).stdout.split()
    )


def test_the_collector_of_the_tests_leaves_out_what_they_import():
    assert gc.get_freeze_count() > 10_000


def test_the_standard_librarys_platform_is_found_in_the_root():
    code = "import platform; print(platform.python_version())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True).returncode == 0


def test_the_platform_layer_loads_no_torch():
    loaded = modules_after("import strata_platform.cli, strata_platform.spec")
    assert not loaded & {"torch", "triton", "transformers", "tasks"}


def test_the_platforms_public_names_are_there_and_imported_when_used():
    assert not modules_after("import strata_platform") & {"pydantic", "yaml", "typer", "flytekit"}
    loaded = modules_after("from strata_platform import *; assert Client and RunSpec and SpecError and Phase")
    assert not loaded & {"torch", "flytekit", "kubernetes"}
    assert all(hasattr(strata_platform, name) for name in strata_platform.__all__)


def test_the_kernel_layer_loads_no_transformers_and_starts_no_cuda():
    loaded = modules_after("import strata_kernels, torch; assert not torch.cuda.is_initialized()")
    assert not loaded & {"transformers", "strata_platform", "tasks", "flytekit"}


def test_workflows_load_no_torch():
    # Pods that only wire, and whoever submits, would wait for it.
    assert not modules_after("import workflows.scheduled, workflows.sweep") & {
        "torch",
        "transformers",
        "strata_kernels",
    }


def test_the_runtime_is_free_of_flyte():
    assert "flytekit" not in modules_after(
        "import tasks.runtime.training.train, tasks.runtime.evaluation.evaluate_model, "
        "tasks.runtime.export.export_model"
    )
