import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from strata_platform.spec import RunSpec, describe, load_spec, recipe, reference_docs
from strata_platform.spec.reading import environment, load
from strata_platform.spec.schema import json_schema

ROOT = Path(__file__).parents[3]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("name", reference_docs.files())
def test_committed_docs_are_not_stale(name):
    committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert committed == reference_docs.files()[name], "run `python -m strata_platform.spec.reference_docs`"


def test_docs_are_written_where_asked(tmp_path):
    subprocess.run([sys.executable, "-m", "strata_platform.spec.reference_docs", tmp_path / "new"], check=True)
    assert {
        path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()
    } == reference_docs.files()


def test_every_field_is_in_the_reference():
    text = reference_docs.reference()
    for name in RunSpec.model_fields:
        assert f"\n## {name}" in text or f"| `{name}` |" in text


def test_descriptions_of_sections_are_no_indented_code():
    assert "\n\nSee [Mixtures](mixtures.md).\n" in reference_docs.reference()
    assert not re.search(r"^    ", reference_docs.reference(), re.MULTILINE)


def test_schema_closes_every_section_and_describes_every_field():
    schema = json_schema()
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        assert section["description"]
        assert all(field["description"] for field in section["properties"].values())
    assert schema["$defs"]["Ddp"]["required"] == ["type"]
    roles = schema["$defs"]["Data"]["properties"]["roles"]
    assert roles["propertyNames"] == {"enum": ["system", "user", "assistant", "tool", "function_call"]}


def test_schema_has_the_limits_that_the_models_have():
    text = json.dumps(json_schema())
    assert not re.search(r'"(ge|gt|le|lt)":', text)
    training = json_schema()["$defs"]["Training"]["properties"]
    assert training["steps"]["anyOf"][0] == {"maximum": 10**9, "minimum": 1, "type": "integer"}
    assert training["epochs"]["anyOf"][0] == {"exclusiveMinimum": 0, "maximum": 1e6, "type": "number"}


@pytest.mark.parametrize("module", [describe, environment, load, recipe], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_examples_in_the_documents():
    for text in blocks("docs/spec.md", "yaml"):
        load_spec(text)
    examples = [example for example in blocks("platform/README.md", "python") if "connect()" not in example]
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "platform/README.md", "exec"), {})
