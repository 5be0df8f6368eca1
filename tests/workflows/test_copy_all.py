"""What `--copy all` sends to a cluster: the folder with code and data of the user's, without outputs and secrets."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from flytekit.constants import CopyFileDetection
from flytekit.tools.fast_registration import FastPackageOptions, fast_package

ROOT = Path(__file__).parents[2]
RULES = {path.name for path in ROOT.glob("*ignore")}
TRAVELS = {
    "my.yaml",
    "conversations.jsonl",
    "evaluation/opposites.yaml",
    "mycode/flow.py",
    "tasks/topology.py",
    "tasks/runtime/report/templates/report.html",
    "tasks/runtime/report/templates/report.css",
}
STAYS = {
    ".env",
    ".env.local",
    "mycode/.env",
    "mycode/tls.key",
    "mycode/tls.pem",
    "mycode/.netrc",
    "kubeconfig",
    ".venv/lib/torch.so",
    "out/finetune/model/model.safetensors",
    "kernels/strata_kernels.egg-info/PKG-INFO",
    ".ruff_cache/0/x",
}


@pytest.fixture
def folder(tmp_path):
    """With this project's rules, and a few files of its own and of a user's."""
    for name in RULES:
        shutil.copy(ROOT / name, tmp_path)
    for name in TRAVELS | STAYS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    return tmp_path


def sent(folder, into):
    into.mkdir()
    package = fast_package(folder, into, options=FastPackageOptions([], copy_style=CopyFileDetection.ALL))
    with tarfile.open(package) as tar:
        return {str(Path(member.name)) for member in tar if member.isfile()}


@pytest.mark.parametrize("checkout", [True, False], ids=["a checkout", "no checkout"])
def test_what_users_add_travels_and_secrets_and_outputs_stay(folder, tmp_path_factory, checkout):
    if checkout:
        subprocess.run(["git", "init", "--quiet", folder], check=True)
    assert sent(folder, tmp_path_factory.getbasetemp() / f"sent-{checkout}") - RULES == TRAVELS


def test_git_is_not_given_secrets_to_keep(folder):
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()
    assert set(listed) - RULES == TRAVELS


def test_no_file_of_the_project_is_left_behind():
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    kept = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if kept.returncode:
        pytest.skip("this is no checkout")
    assert kept.stdout == ""
