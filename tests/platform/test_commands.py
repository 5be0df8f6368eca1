"""What a command imports decides how long it takes: every command of `strata` on a cluster, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from flyteidl.core import execution_pb2 as core_pb2

from tests.platform.helpers.servers import pod

# Each takes longer to import than a command may take, or brings half a hundred modules for one function.
HEAVY = ("flytekit", "kubernetes", "torch", "numpy", "pandas", "pyarrow", "s3fs", "botocore", "requests", "aiohttp")
# 2,300 with flytekit and kubernetes whole.
MOST = 750
PROGRAM = """
import json, sys
from strata_platform.cli import app
try:
    app(json.loads(sys.argv[1]))
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
COMMANDS = {
    "submit": ["submit", "spec.yaml", "--force"],
    "get": ["get", "run"],
    "get after the end": ["get", "done"],
    "list": ["list", "--mine"],
    "wait": ["wait", "done"],
    "logs": ["logs", "run"],
    "metrics": ["metrics", "run"],
    "events": ["events", "run"],
    "costs": ["costs", "--days", "100000"],
    "outputs": ["outputs", "done"],
    "cancel": ["cancel", "run"],
    "estimate": ["estimate", "spec.yaml"],
    "spec": ["spec", "spec.yaml"],
    "version": ["--version"],
}
RECORD = {"steps": 1, "steps_asked": 1, "train_loss": 1.0, "eval_loss_after": 1.0, "tokens_per_second": 1.0,
          "restarts": 0, "device": "NVIDIA H200", "seconds": 1.0, "world_size": 1}  # fmt: skip
# Prices are read as specs are.
WITH_SPEC = {"submit", "estimate", "spec", "costs"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_what_it_uses(client, admin, kubernetes, tmp_path, command):
    (tmp_path / "spec.yaml").write_text("name: new\n")
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    admin.active = "v1"
    admin.add("done", core_pb2.WorkflowExecution.SUCCEEDED)
    admin.outputs["done"] = {kind: f"file://{tmp_path}/record.json" for kind in ("model", "report", "record")}
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    kubernetes.content |= {"pods": [pod("w0", replica=0)], "logs": {"w0": ["2026-11-22T00:00:00Z hello\n"]}}
    variables = {"FLYTECTL_CONFIG": str(tmp_path / "flyte.yaml"), "STRATA_BACKEND": "flyte"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS[command])],
        cwd=tmp_path,
        env=os.environ | variables,
        text=True,
        capture_output=True,
    )
    *said, modules = ended.stderr.splitlines()
    assert ended.returncode == 0, said
    loaded = json.loads(modules)
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
    assert ("strata_platform.spec.run_spec" in loaded) == (command in WITH_SPEC)
    assert "strata_platform.doctor.machine_checks" not in loaded
    assert len(loaded) < MOST
