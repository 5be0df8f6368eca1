"""Kueue's kinds are kept by an annotation in the chart that Helm fetched, as an archive or a folder."""

import io
import tarfile

import pytest
import yaml

from strata_platform.chart.keep_kinds import keep

KIND = """{{/* generated */}}
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  labels:
  {{- include "kueue.labels" . | nindent 4 }}
  annotations:
    {{- if .Values.enableCertManager }}
    cert-manager.io/inject-ca-from: x
    {{- end }}
    controller-gen.kubebuilder.io/version: v0.20.1
  name: workloads.kueue.x-k8s.io
spec:
  versions:
    - schema:
        annotations:
          type: object
"""
OTHER = "metadata:\n  annotations:\n    a: b\n"


def annotations(text):
    """Of the kind's own metadata, with Helm's lines left out."""
    plain = "\n".join(line for line in text.splitlines() if "{{" not in line)
    return yaml.safe_load(plain)["metadata"]["annotations"]


@pytest.fixture
def archive(tmp_path):
    (tmp_path / "charts").mkdir()
    found = tmp_path / "charts" / "kueue-0.19.0.tgz"
    with tarfile.open(found, "w:gz") as out:
        for name, text in (
            ("kueue/templates/crd/workloads.yaml", KIND),
            ("kueue/templates/manager/manager.yaml", OTHER),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            out.addfile(member, io.BytesIO(text.encode()))
    return found


def read(archive):
    with tarfile.open(archive) as found:
        return {member.name: found.extractfile(member).read().decode() for member in found}


def test_a_fetched_archive_keeps_its_kinds_and_nothing_else_of_it_changes(archive):
    assert keep(archive.parents[1]) == 1
    files = read(archive)
    kind = files["kueue/templates/crd/workloads.yaml"]
    assert annotations(kind)["helm.sh/resource-policy"] == "keep"
    assert kind.replace("    helm.sh/resource-policy: keep\n", "") == KIND
    assert files["kueue/templates/manager/manager.yaml"] == OTHER
    once = archive.read_bytes()
    keep(archive.parents[1])
    assert archive.read_bytes() == once
    assert [file.name for file in archive.parent.iterdir()] == [archive.name]


def test_a_folder_keeps_its_kinds(tmp_path):
    file = tmp_path / "charts/kueue/templates/crd/workloads.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(KIND)
    assert keep(tmp_path) == keep(tmp_path) == 1
    assert annotations(file.read_text())["helm.sh/resource-policy"] == "keep"


def test_a_stack_without_kueue_or_with_another_chart_is_refused(tmp_path):
    with pytest.raises(ValueError, match="helm dependency update"):
        keep(tmp_path)
    (tmp_path / "charts/kueue/templates/crd").mkdir(parents=True)
    with pytest.raises(ValueError, match="no CRDs in templates/crd"):
        keep(tmp_path)
    (tmp_path / "charts/kueue/templates/crd/workloads.yaml").write_text("metadata:\n  name: workloads\n")
    with pytest.raises(ValueError, match=r"workloads\.yaml has no annotations"):
        keep(tmp_path)
