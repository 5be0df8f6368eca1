"""The Dockerfile, its rules, and that each of them finds what it is for. `tests/kernels/test_bake.py` runs its bake."""

import re
import subprocess
import sys

import pytest

from images import check

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
        ("COPY requirements.lock ./", "COPY pyproject.toml ./", "COPY pyproject.toml: .dockerignore keeps it out"),
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


def test_the_small_image_has_the_versions_of_the_large_one():
    pins = [
        set(re.findall(r"^(\S+==\S+)", (check.ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))
        for name in ("images/platform.lock", "requirements.lock")
    ]
    assert pins[0] and pins[0] <= pins[1]
