"""The chart's presets, validated by the API server itself: admission and unknown fields, too. Nothing is created."""

import json
import shutil
import subprocess

import pytest

from tests.charts.conftest import HELM, PRESETS, Helm
from tests.e2e.helpers.cluster import NAMESPACE

KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(not (HELM and KUBECTL), reason="helm and kubectl have to be on the PATH")


def kubectl(*arguments, text=""):
    return subprocess.run([KUBECTL, *arguments], input=text, text=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def kinds():
    """What this cluster knows: Prometheus' kinds are there where its operator is."""
    listed = kubectl("api-resources", "--no-headers").stdout.splitlines()
    return {(line.split()[-3], line.split()[-1]): line.split()[-2] == "true" for line in listed}


def elsewhere(item, kinds):
    """`item` under a name that nothing has, in a namespace that is there: a dry run makes none for what follows."""
    item["metadata"]["name"] = f"dry-run-{item['metadata']['name']}"
    if kinds[item["apiVersion"], item["kind"]]:
        item["metadata"]["namespace"] = NAMESPACE
    if item["kind"] == "Pod":
        # Of service accounts only those that are there are taken.
        item["spec"]["serviceAccountName"] = "default"
    return item


def dry_run(items):
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    return kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", text=text)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem.removesuffix("-values"))
def test_the_api_server_takes_every_object(kinds, path):
    objects = Helm(HELM).render("--values", path)
    known = [item for item in objects if (item["apiVersion"], item["kind"]) in kinds]
    assert {item["apiVersion"] for item in objects if item not in known} <= {"monitoring.coreos.com/v1"}
    done = dry_run([elsewhere(item, kinds) for item in known])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("created (server dry run)") == len(known) > 10


def test_what_is_wrong_would_be_seen(kinds):
    account = next(item for item in Helm(HELM).render("--values", PRESETS[-1]) if item["kind"] == "ServiceAccount")
    done = dry_run([elsewhere(account | {"automountToken": False}, kinds)])
    assert done.returncode and 'unknown field "automountToken"' in done.stderr
