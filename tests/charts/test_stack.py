"""The umbrella's versions and values: each fits the others. Its dependencies are not here, so nothing is rendered."""

import json
import re

import pytest
import yaml

from strata_platform.chart.values import ChartValues
from tests.charts.conftest import CHART, ROOT

STACK = ROOT / "charts" / "strata-stack"
META = yaml.safe_load((STACK / "Chart.yaml").read_text())
VALUES = yaml.safe_load((STACK / "values.yaml").read_text())
DEPENDENCIES = {item["name"]: item for item in META["dependencies"]}
FLYTE, KUEUE = VALUES["flyte-binary"], VALUES["kueue"]


@pytest.fixture(scope="module")
def strata():
    return ChartValues.model_validate_json(json.dumps(VALUES["strata"]))


def test_versions_are_exact_and_images_are_of_them():
    assert all(re.fullmatch(r"v?\d+\.\d+\.\d+", item["version"]) for item in DEPENDENCIES.values())
    assert FLYTE["deployment"]["image"]["tag"] == DEPENDENCIES["flyte-binary"]["version"]
    assert KUEUE["controllerManager"]["manager"]["image"]["tag"] == f"v{DEPENDENCIES['kueue']['version']}"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert DEPENDENCIES["strata"]["version"] == chart["version"]
    assert META["kubeVersion"] == chart["kubeVersion"]


def test_every_dependency_has_a_switch_that_its_own_values_do_not_see():
    # The chart's schema would refuse a key of the umbrella's.
    switches = {item["condition"] for item in DEPENDENCIES.values()}
    assert switches == {f"components.{name}" for name in VALUES["components"]}


def test_flyte_starts_pods_from_the_template_and_may_create_jobs(strata):
    k8s = FLYTE["configuration"]["inline"]["plugins"]["k8s"]
    assert k8s["default-pod-template-name"] == strata.tenant_defaults.pod_template.name
    assert "pytorch" in FLYTE["enabled_plugins"]["tasks"]["task-plugins"]["enabled-plugins"]
    (rule,) = FLYTE["rbac"]["extraRules"]
    assert rule["resources"] == ["pytorchjobs"] and "*" not in rule["verbs"]
    assert strata.tests.flyte.service_account == FLYTE["fullnameOverride"]


def test_flyte_gives_no_run_up_because_a_server_is_away():
    propeller = FLYTE["configuration"]["inline"]["propeller"]
    # As shipped, 10 rounds without a pause, a run was failed by a minute without the object store (tests/e2e).
    assert propeller["max-workflow-retries"] >= 1000
    assert propeller["queue"]["queue"]["base-delay"] == "1s"


def test_kueue_queues_training_jobs_and_pods_of_tenants(strata):
    config = yaml.safe_load(KUEUE["managerConfig"]["controllerManagerConfigYaml"])
    assert config["integrations"]["frameworks"] == ["kubeflow.org/pytorchjob", "pod"]
    (selector,) = config["managedJobsNamespaceSelector"]["matchExpressions"]
    helpers = (CHART / "templates" / "tenants" / "_helpers.tpl").read_text()
    assert f"\n{selector['key']}: " in helpers
    assert strata.queues.kueue.config_map == f"{KUEUE['fullnameOverride']}-manager-config"


def test_the_namespace_is_the_one_of_the_commands(strata):
    places = {strata.queues.kueue.namespace, strata.tests.flyte.namespace}
    places |= {destination.namespace for destination in strata.tenant_defaults.network.flyte}
    readme = (STACK / "README.md").read_text()
    assert places == set(re.findall(r"--namespace (\S+)", readme)) == {"strata-system"}
