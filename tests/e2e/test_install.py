"""What the charts installed checks itself."""

import os
import shutil
import subprocess

import pytest

from strata_platform.chart.images import images_of, qualified

HELM = os.environ.get("HELM") or shutil.which("helm")
RELEASE, NAMESPACE = "strata", "strata-system"


@pytest.mark.skipif(HELM is None, reason="no helm on the PATH or in HELM")
def test_helm_test_passes():
    done = subprocess.run(
        [HELM, "test", RELEASE, "--namespace", NAMESPACE], text=True, capture_output=True, timeout=330
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Phase:          Failed" not in done.stdout


@pytest.mark.skipif(HELM is None, reason="no helm on the PATH or in HELM")
def test_the_list_of_images_has_that_of_every_pod_of_the_release(cluster):
    release = [HELM, "get", "manifest", RELEASE, "--namespace", NAMESPACE]
    listed = images_of(subprocess.run(release, text=True, capture_output=True, check=True, timeout=60).stdout)
    pods = cluster.core.list_namespaced_pod(NAMESPACE).items
    used = {c.image for pod in pods for c in [*pod.spec.containers, *(pod.spec.init_containers or [])]}
    assert used and {qualified(image) for image in used} <= set(listed)
