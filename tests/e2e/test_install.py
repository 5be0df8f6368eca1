"""What the charts installed checks itself."""

import os
import shutil
import subprocess

import pytest

HELM = os.environ.get("HELM") or shutil.which("helm")
RELEASE, NAMESPACE = "strata", "strata-system"


@pytest.mark.skipif(HELM is None, reason="no helm on the PATH or in HELM")
def test_helm_test_passes():
    done = subprocess.run(
        [HELM, "test", RELEASE, "--namespace", NAMESPACE], text=True, capture_output=True, timeout=330
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Phase:          Failed" not in done.stdout
