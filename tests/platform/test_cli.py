import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from strata_platform.spec import RunSpec, load_spec

BIN = Path(sys.executable).parent

VALID = """\
optimizer: {lr: 1e-4}
parallel: {type: ddp}
topology: {nproc_per_node: 2}
data: {source: [a/b, c]}
"""
MISTAKES = {
    "naem": "run",
    "name": "My Run",
    "seed": True,
    "output": 3,
    "model": {"dtype": "fp16", "revison": "main"},
    "data": {"source": {"path": "x"}, "sequence_length": 4, "packing": "maybe", "validation_fraction": 5},
    "objective": {"type": "stf"},
    "training": {"micro_batch_size": 0, "gradient_accumulation_steps": 1.5, "steps": 20, "epochs": 2},
    "optimizer": [1],
    "schedule": {"type": "cosine", "warmup_ratio": "ten"},
    "parallel": {"type": "ddp", "bucket_cap": 25},
    "kernels": {"exclude": ["rope", "softmax"]},
    "runtime": None,
    "evaluation": {"samples": [3]},
    "resources": {"memory": "8 GB", "gpu_type": "NVIDIA-H200"},
}
PATHS = {
    "naem", "name", "seed", "output", "model.dtype", "model.revison", "data.source", "data.sequence_length",
    "data.packing", "data.validation_fraction", "objective.type", "training.micro_batch_size",
    "training.gradient_accumulation_steps", "training.steps", "optimizer", "schedule.warmup_ratio",
    "parallel.bucket_cap", "kernels.exclude[1]", "runtime", "evaluation.samples", "resources.memory",
    "resources.gpu_type",
}  # fmt: skip


def run(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, **options)


def strata(*arguments, **options):
    return run(BIN / "strata", *arguments, **options)


def test_every_mistake_of_a_file_is_told_at_once(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(MISTAKES, sort_keys=False))
    result = strata("spec", path)
    assert (result.returncode, result.stdout) == (2, "")
    heading, *lines = result.stderr.splitlines()
    assert heading == f"{path} has {len(PATHS)} problems:"
    assert len(PATHS) >= 20
    assert sorted(line.split()[0].rstrip(":") for line in lines) == sorted(PATHS)
    assert all("(line " in line for line in lines)


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_the_printed_spec_is_whole_and_loads_to_the_same_spec(tmp_path, format):
    path = tmp_path / "my.yaml"
    path.write_text(
        "optimizer: {lr: 1e-4}\nparallel: {type: ddp}\ntopology: {nproc_per_node: 2}\ndata: {source: [a, b]}\n"
    )
    first = strata("spec", path, "--format", format)
    assert (first.returncode, first.stderr) == (0, "")
    values = json.loads(first.stdout) if format == "json" else yaml.safe_load(first.stdout)
    assert set(values) == set(RunSpec.model_fields)
    assert load_spec(first.stdout) == load_spec(path)
    again = strata("spec", "-", "--format", format, input=first.stdout)
    assert again.stdout == first.stdout


def test_without_a_file_the_default_is_printed():
    assert load_spec(strata("spec").stdout) == RunSpec()


def test_schema_is_printed():
    schema = json.loads(strata("spec", "--schema").stdout)
    assert schema["properties"].keys() == {*RunSpec.model_fields, "include"}


def test_schema_of_a_file_is_refused():
    result = strata("spec", "--schema", "my.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--schema" in result.stderr


def test_a_missing_file():
    result = strata("spec", "missing.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "missing.yaml has 1 problem:\n  cannot be read: No such file or directory\n"


FILES = """\
data:
  source: [rows.jsonl, "more/*.parquet", s3://bucket/rows.jsonl]
  chat_template: mine.jinja
model: {name: ./model}
output: taken/out
evaluation: {tasks: [hellaswag, questions.yaml]}
"""


@pytest.mark.parametrize("backend", ["local", "flyte"])
def test_files_that_a_spec_names_and_this_machine_lacks(tmp_path, backend):
    """On a cluster pods may have them: a warning there."""
    (tmp_path / "my.yaml").write_text(FILES)
    (tmp_path / "taken").write_text("")
    (tmp_path / "rows.json").write_text("[]")
    result = strata("spec", "my.yaml", "--backend", backend, cwd=tmp_path)
    assert (result.returncode, bool(result.stdout)) == ((2, False) if backend == "local" else (0, True))
    heading, *lines = result.stderr.splitlines()
    assert heading.endswith("my.yaml has 6 problems:") and heading.startswith("WARNING: ") == (backend == "flyte")
    if backend == "local":
        assert lines.pop() == "for a run on a cluster whose pods have these files, add --backend flyte or kubernetes"
    assert lines == [
        "  data.source[0] (line 2): there is no such file on this machine; given: 'rows.jsonl'; did you mean "
        "'rows.json'?",
        "  data.source[1] (line 2): matches no file on this machine; given: 'more/*.parquet'",
        "  data.chat_template (line 3): there is no such file on this machine; given: 'mine.jinja'",
        "  model.name (line 4): there is no such folder on this machine; given: './model'",
        "  output (line 5): taken is a file, not a folder; give another path, or move it away",
        "  evaluation.tasks[1] (line 6): there is no such file on this machine; given: 'questions.yaml'",
    ]


def test_a_local_run_is_not_started_without_its_files(tmp_path):
    (tmp_path / "my.yaml").write_text("data: {source: rows.jsonl}")
    result = strata("submit", "my.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("my.yaml has 1 problem:\n  data.source (line 1): there is no such file")
    assert not (tmp_path / "out").exists()


def test_version():
    project = tomllib.loads((Path(__file__).parents[2] / "platform" / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert strata("--version").stdout == f"strata {project['version']}\n"


def test_the_platform_loads_neither_torch_nor_flytekit():
    code = (
        "import sys, strata_platform.cli, strata_platform.spec.reference_docs\n"
        "heavy = {'torch', 'flytekit', 'transformers', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(sys.executable, "-c", code).stdout == "[]\n"


WORKFLOW = """
from flytekit import task, workflow
from strata_platform.spec import DataRecipe, RunSpec


@task
def recipe_of(spec: RunSpec) -> DataRecipe:
    return DataRecipe.from_spec(spec)


@task
def compare(spec: RunSpec, recipe: DataRecipe) -> str:
    assert recipe == DataRecipe.from_spec(spec)
    return spec.hash()


@workflow
def finetune(spec: RunSpec = RunSpec()) -> str:
    return compare(spec=spec, recipe=recipe_of(spec=spec))
"""


def pyflyte_run(folder, text):
    (folder / "flow.py").write_text(WORKFLOW)
    (folder / "my.yaml").write_text(text)
    return run(BIN / "pyflyte", "run", "flow.py", "finetune", "--spec", "my.yaml", cwd=folder)


def test_pyflyte_takes_the_same_file(tmp_path):
    result = pyflyte_run(tmp_path, VALID)
    assert result.returncode == 0, result.stderr
    assert load_spec(VALID).hash() in result.stdout


def test_pyflyte_tells_every_mistake_without_a_traceback(tmp_path):
    result = pyflyte_run(tmp_path, "sede: 1\noptimizer: {lr: -1}\nparallel: {type: dpd}\n")
    assert result.returncode == 2
    assert "RunSpec has 3 problems" in result.stderr
    assert all(path in result.stderr for path in ("sede", "optimizer.lr", "parallel.type"))
    assert "Traceback" not in result.stdout + result.stderr


def test_the_checks_of_a_run_are_listed():
    result = strata("spec", "--checks")
    assert result.returncode == 0, result.stderr
    assert "position embeddings       spec     rank 0 " in result.stdout
    both = strata("spec", "--checks", "--schema")
    assert (both.returncode, "--checks lists" in both.stderr) == (2, True)


def test_without_the_runtime_the_checks_say_what_to_install(tmp_path):
    # Stands for an interpreter that has the platform layer alone.
    code = "import sys; sys.executable = '/bin/false'; from strata_platform.cli import main; main()"
    result = run(sys.executable, "-c", code, "spec", "--checks", cwd=tmp_path)
    assert result.returncode == 1 and "install strata there" in result.stderr


def test_overrides_are_taken_by_every_command_with_a_spec(tmp_path):
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 1.0e-4}")
    (tmp_path / "my.yaml").write_text("include: base.yaml\nname: a")
    printed = strata("spec", "my.yaml", "--set", "name=b", "--set", "optimizer.betas=[0.8, 0.9]", cwd=tmp_path)
    spec = load_spec(printed.stdout)
    assert (spec.name, spec.optimizer.lr, spec.optimizer.betas) == ("b", 1e-4, (0.8, 0.9))
    assert load_spec(strata("spec", "--set", "seed=3").stdout) == RunSpec(seed=3)
    assert strata("spec", "--schema", "--set", "seed=3").returncode == 2
    for command in ("spec", "estimate", "submit", "verify"):
        refused = strata(command, "my.yaml", "--set", "optimizer.lr=-1", cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert (
            "my.yaml has 1 problem:\n  optimizer.lr (--set optimizer.lr=-1): not a valid value; given: -1"
            in refused.stderr
        )
