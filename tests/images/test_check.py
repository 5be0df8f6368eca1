"""The Dockerfile, its rules, and that each of them finds what it is for. `tests/kernels/test_bake.py` runs its bake."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from images import check
from images.extras import pins

PROJECT = tomllib.loads((check.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (check.ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_dockerfile_keeps_the_rules():
    assert check.problems(DOCKERFILE) == []
    subprocess.run([sys.executable, check.__file__], check=True)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("python:3.12.12-slim-bookworm", "python:latest", "starts from python:latest: pin a whole version"),
        ("python:3.12.12-slim-bookworm", "python:3.12", "pin a whole version"),
        ("python:3.12.12-slim-bookworm", "python", "pin a whole version"),
        ("uv==${UV_VERSION}", "uv", "pip install --no-cache-dir uv: give --require-hashes"),
        ("--require-hashes -r requirements.lock", "-r requirements.lock torch", "give --require-hashes"),
        ("apt-get update \\\n    && ", "", "apt-get install without apt-get update"),
        ("--no-install-recommends ", "", "apt-get install without --no-install-recommends"),
        ("    && rm -rf /var/lib/apt/lists/* \\\n", "", "apt-get install without rm -rf"),
        ("COPY requirements.lock", "ADD requirements.lock", "ADD fetches and unpacks; use COPY"),
        ("--from=packages", "--from=package", "COPY --from=package: no such stage above"),
        ("COPY requirements.lock ./", "COPY requirements.txt ./", "COPY requirements.txt: it is not there"),
        ("COPY requirements.lock ./", "COPY README.md ./", "COPY README.md: Dockerfile.dockerignore keeps it out"),
        ("ARG ARCHS=sm_90,sm_100\n", "", "$ARCHS is declared nowhere in stage kernels"),
        ("USER strata\nCMD", "CMD", "image training runs as root"),
        ("USER strata\nCMD", "USER root\nCMD", "image training runs as root"),
        ('["strata", "--help"]', "strata --help", "image platform: CMD strata --help: a shell would keep SIGTERM"),
        ('["/usr/bin/tini", "--"]', '["/bin/sh", "-c"]', "process 1 must pass signals on"),
        ("ENV UV_COMPILE_BYTECODE=1", "ENV HF_TOKEN=hf_1", "HF_TOKEN would be in the image's history"),
        ("STRATA_BAKED_KERNELS=/opt/kernels", "STRATA_BAKED_KERNELS=/opt/kernel", "which is not copied there"),
        ("FROM runtime AS kernels", "FROM packages AS kernels", "its keys would be of another compiler"),
        ("AS training", "AS train", "there is no stage training"),
    ],
)
def test_each_rule_finds_what_it_is_for(before, after, problem):
    assert before in DOCKERFILE
    # The last place, which is nearest to the image that runs.
    start, _, end = DOCKERFILE.rpartition(before)
    assert any(problem in found for found in check.problems(start + after + end)), check.problems(start + after + end)


def test_a_stage_without_a_name_is_refused():
    with pytest.raises(ValueError, match="a stage has to have a name"):
        check.read("FROM python:3.12.1\n")


def test_steps_run_below_another_root(tmp_path):
    stages = check.read(
        "FROM python:3.12.1 AS above\nARG INTO=/opt/out\nENV NAME=said\nWORKDIR /src\n"
        "FROM above AS one\nARG WHAT=default\nCOPY images/platform.lock ./\nRUN apt-get install x\n"
        "RUN mkdir -p /opt/out && echo $NAME $WHAT $INTO \\\n    > /opt/out/text && ls > /opt/out/names\n"
    )
    steps = list(check.execute(stages, "one", tmp_path, {"WHAT": "given"}))
    assert [step.split()[0] for step in steps] == ["COPY", "left", "RUN"]
    assert (tmp_path / "opt/out/text").read_text() == f"said given {tmp_path}/opt/out\n"
    assert (tmp_path / "opt/out/names").read_text() == "platform.lock\n"
    with pytest.raises(subprocess.CalledProcessError):
        list(check.execute(check.read("FROM a:1.1.1 AS b\nRUN false\n"), "b", tmp_path, {}))


def test_one_version_of_uv_everywhere():
    (here,) = re.findall(r"UV_VERSION=(\S+)", DOCKERFILE)
    assert f"UV_VERSION := {here}\n" in (check.ROOT / "Makefile").read_text(encoding="utf-8")


def locked(name):
    """Lines of a lock that name a package and its version."""
    return set(re.findall(r"^(\S+==\S+)", (check.ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_small_image_has_the_versions_of_the_large_one():
    small = locked("images/platform.lock")
    assert small and small <= locked("requirements.lock")


def test_extras_leave_the_image_what_the_project_itself_asks_for():
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in PROJECT["dependencies"]}
    own = {pin for pin in locked("requirements.lock") if pin.partition("==")[0] in names}
    assert own and own <= locked("images/extras.lock")


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_an_extra_is_installed_as_it_is_locked(tmp_path, extra):
    uv = tmp_path / "opt/strata/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked\n")
    uv.chmod(0o755)
    list(check.execute(check.read(DOCKERFILE), "packages", tmp_path, {"EXTRAS": extra}))
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if "-r extras.txt" in line]
    assert len(asked) == (1 if extra else 0) and all("--require-hashes -c extras.lock" in line for line in asked)
    if extra:
        pinned = (tmp_path / "src/extras.txt").read_text().splitlines()
        assert pinned and {pin.split()[0] for pin in pinned} <= locked("images/extras.lock")


def test_an_extra_that_is_none_ends_the_build():
    project = (check.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"EXTRAS has deepspead; there are benchmarks, .*, divided by commas"):
        pins("wandb,deepspead", project, "wandb==1.0\n")
    with pytest.raises(ValueError, match=r"wandb>=.* is not in extras\.lock"):
        pins("wandb", project, "wandb-core==1.0\n")


def test_an_extra_may_have_a_version_for_each_python():
    old, new = "wandb==1.0 ; python_full_version < '3.12'", "wandb==1.1 ; python_full_version >= '3.12'"
    lock = "".join(f"{pin} \\\n    --hash=sha256:1\n" for pin in (old, new))
    assert pins("wandb", (check.ROOT / "pyproject.toml").read_text(encoding="utf-8"), lock) == [old, new]


def test_code_that_a_pod_fetches_is_not_compiled_again_where_it_is_that_of_the_image(tmp_path, monkeypatch):
    compiles = next(text for _, text in check.read(DOCKERFILE)["training"].all("RUN") if "compileall" in text)
    for package in ("tasks", "workflows"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("b = 1\n")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    subprocess.run([sys.executable, *compiles.split()[1:]], cwd=tmp_path, check=True)
    # As flytekit packs it and tar unpacks it.
    for package in ("tasks", "workflows"):
        os.utime(tmp_path / package / "a.py", (0, 0))
    (tmp_path / "workflows" / "a.py").write_text("b = 2\n")

    looks = [sys.executable, "-S", "-v", "-c", "import tasks.a, workflows.a; print(tasks.a.b, workflows.a.b)"]
    looked = subprocess.run(looks, cwd=tmp_path, check=True, capture_output=True, text=True)

    assert looked.stdout == "1 2\n"
    files = ("tasks/a.py", "workflows/a.py")
    assert [f"matches {tmp_path / file}\n" in looked.stderr for file in files] == [True, False], looked.stderr
