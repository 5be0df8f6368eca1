"""The images that an installation needs, from its manifests."""

import json
import subprocess
import sys
from base64 import b64encode

import pytest

from strata_platform.chart.images import images_of

FLYTE = "plugins:\n  k8s:\n    co-pilot: {image: cr.flyte.org/flyteorg/flytecopilot:v1.16.8}\n"
MANIFESTS = f"""
kind: Deployment
spec:
  template:
    spec:
      initContainers: [{{name: wait, image: postgres:15-alpine}}]
      containers:
        - {{name: one, image: registry.k8s.io/kueue/kueue:v0.19.0, args: [--init-container-image=alpine:3.10, --image]}}
---
kind: CronJob
spec: {{jobTemplate: {{spec: {{template: {{spec: {{containers: [{{image: "localhost:5000/a@sha256:ab"}}]}}}}}}}}}}
---
kind: ConfigMap
data: {{k8s.yaml: {json.dumps(FLYTE)}, text: "image: {{", other: "no yaml: image: x: y"}}
---
kind: Secret
data: {{a.yaml: {b64encode(b"image: team/private").decode()}, key: /////w==}}
---
kind: PodTemplate
template: {{spec: {{containers: [{{name: default, image: set-by-flyte}}]}}}}
---
kind: CustomResourceDefinition
spec: {{properties: {{image: {{type: string}}}}}}
---
"""


def test_images_are_found_wherever_a_pod_may_get_them_from():
    assert images_of(MANIFESTS) == [
        "cr.flyte.org/flyteorg/flytecopilot:v1.16.8",
        "docker.io/library/alpine:3.10",
        "docker.io/library/postgres:15-alpine",
        "docker.io/team/private",
        "localhost:5000/a@sha256:ab",
        "registry.k8s.io/kueue/kueue:v0.19.0",
    ]


@pytest.mark.parametrize(("text", "why"), [("a: {", "not valid YAML"), ("kind: Service", "helm template")])
def test_what_is_no_manifest_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        images_of(text)


def test_the_command_prints_where_the_copies_are():
    command = [sys.executable, "-m", "strata_platform.chart.images", "--to", "registry.internal:5000/"]
    ended = subprocess.run(command, input=MANIFESTS, capture_output=True, text=True, check=True)
    lines = dict(line.split() for line in ended.stdout.splitlines())
    assert lines["docker.io/team/private"] == "registry.internal:5000/docker.io/team/private" and len(lines) == 6
    refused = subprocess.run(command, input="", capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("error: the manifests name no image")
