"""The values are described once; what is written from that, and what it refuses. No Helm is needed here."""

import json
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from strata_platform.chart import values_docs
from strata_platform.chart.values import ChartValues
from strata_platform.pod_settings import GRACE_SECONDS
from tests.charts.conftest import CHART, PRESETS, ROOT
from tests.charts.helpers.wrong_values import REFUSED_BY_THE_SCHEMA, REFUSED_BY_THE_TEMPLATES

VALIDATOR = jsonschema.Draft202012Validator(values_docs.schema())


def validated(values):
    """`values` as the models read them."""
    return ChartValues.model_validate_json(json.dumps(values))


def complaints(values):
    """What the schema says, as Helm does: the path of the value, and what is wrong with it."""
    errors = []
    for error in VALIDATOR.iter_errors(values):
        errors += error.context or [error]
    return [f"at '/{'/'.join(map(str, error.absolute_path))}': {error.message}" for error in errors]


@pytest.mark.parametrize("name", values_docs.files())
def test_committed_files_are_not_stale(name):
    committed = (CHART / name).read_text(encoding="utf-8")
    assert committed == values_docs.files()[name], "run `python -m strata_platform.chart.values_docs`"


def test_files_are_written_where_asked(tmp_path):
    subprocess.run([sys.executable, "-m", "strata_platform.chart.values_docs", tmp_path / "new"], check=True)
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()} == values_docs.files()


def test_values_yaml_has_the_defaults_of_the_models_and_a_comment_on_every_key():
    text = values_docs.values_yaml()
    assert validated(yaml.safe_load(text)) == ChartValues()
    lines = text.splitlines()[1:]
    described = ChartValues.model_json_schema()["$defs"]

    def keys(schema, depth):
        for key, value in schema["properties"].items():
            yield f"{'  ' * depth}{key}:"
            if "$ref" in value:
                yield from keys(described[value["$ref"].rpartition("/")[2]], depth + 1)

    for key in keys(ChartValues.model_json_schema(), 0):
        above = [lines[i - 1].lstrip() for i, line in enumerate(lines) if line.startswith(key)]
        assert above and all(line.startswith("# ") for line in above), key


def test_the_reference_has_every_key_and_every_entry_of_a_list():
    text = values_docs.readme()
    for section in values_docs.schema()["$defs"].values():
        leaves = [key for key, value in section["properties"].items() if "$ref" not in value]
        assert all(re.search(rf"`([A-Za-z.]+\.)?{key}`", text) for key in leaves)
    for target in re.findall(r"\(#([a-z]+)\)", text):
        assert re.search(rf"^### {target}$", text, re.MULTILINE | re.IGNORECASE), target


def test_the_schema_closes_every_section_and_every_mapping():
    schema = values_docs.schema()
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        assert section["description"]
        # pydantic leaves out what the section says of itself in the same words.
        assert all("description" in key or "$ref" in key for key in section["properties"].values())
    open_ones = [
        key
        for section in [schema, *schema["$defs"].values()]
        for key, value in section["properties"].items()
        if value.get("type") == "object" and value.get("additionalProperties") is not False
    ]
    # What Helm itself puts there for subcharts.
    assert open_ones == ["global"]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_are_valid(path):
    values = yaml.safe_load(path.read_text())
    assert complaints(values) == []
    validated(values)


@pytest.mark.parametrize("case", REFUSED_BY_THE_SCHEMA)
def test_wrong_values_are_refused_with_the_key(case):
    text, *said = REFUSED_BY_THE_SCHEMA[case]
    values = yaml.safe_load(text)
    found = complaints(values)
    assert any(all(part in line for part in said) for line in found), found
    with pytest.raises(ValidationError):
        validated(values)


@pytest.mark.parametrize("case", REFUSED_BY_THE_TEMPLATES)
def test_what_the_templates_refuse_is_right_key_by_key(case):
    assert complaints(yaml.safe_load(REFUSED_BY_THE_TEMPLATES[case][0])) == []


def test_pods_have_the_grace_period_and_the_caches_of_the_runtime():
    template = ChartValues().tenant_defaults.pod_template
    assert template.termination_grace_period_seconds == GRACE_SECONDS
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"TRITON_CACHE_DIR={template.caches.triton.path} " in dockerfile
    assert f"HF_HOME={template.caches.hugging_face.path}\n" in dockerfile
    assert f"useradd --uid {template.run_as_user} " in dockerfile
