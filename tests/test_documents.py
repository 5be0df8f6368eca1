"""What the documents say of commands, files, specs and symbols is so."""

import ast
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.main import get_command

from strata_platform import cli_docs
from strata_platform.chart.values import ChartValues
from strata_platform.cli import app
from strata_platform.spec import RunSpec, support_matrix
from strata_platform.spec.grid import Grid
from strata_platform.spec.reading.compose import INCLUDE
from tools import mkdocs_hooks, prose

ROOT = Path(__file__).parent.parent
STRATA = Path(sys.executable).with_name("strata")
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "*/README.md", "charts/*/README.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
PAGES = [name for name in DOCUMENTS if name.startswith("docs/")]
# Names of Flyte's and other charts' values, which blocks of YAML have at their top.
ELSEWHERE = {
    "managerConfig", "deployment", "configuration", "enabled_plugins", "rbac", "flyte-core-components", "flyte-binary",
    "admin", "auth", "kueue", "apiVersion",
}  # fmt: skip


def blocks(document: str, language: str) -> list[str]:
    """Its blocks of code, also those that are indented below a tab or an item of a list."""
    text = (ROOT / document).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def test_the_mistakes_of_the_readme_are_told_as_it_shows_them(tmp_path):
    shown = re.search(r"\$ strata spec wrong\.yaml\n(.*?)```", README, re.DOTALL)[1]
    (tmp_path / "wrong.yaml").write_text(
        "model: {name: Qwen/Qwen3-0.6B, dtpye: bf16}\n"
        "data: {source: conversations.jsonl, sequence_length: 0}\n"
        "parallel: {type: dpp}\n"
        "training: {epochs: 2, steps: 100}\n"
    )
    ended = subprocess.run([STRATA, "spec", "wrong.yaml"], cwd=tmp_path, text=True, capture_output=True)
    assert (ended.returncode, ended.stderr) == (2, shown)


def test_the_spec_of_the_readme_is_valid(tmp_path):
    spec = re.search(r"```yaml\n(# my\.yaml.*?)```", README, re.DOTALL)[1]
    (tmp_path / "my.yaml").write_text(spec)
    (tmp_path / "conversations.jsonl").touch()
    assert subprocess.run([STRATA, "spec", "my.yaml"], cwd=tmp_path, capture_output=True).returncode == 0


def test_the_readme_is_short():
    assert len(README.splitlines()) < 120


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / document).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short_and_use_the_fields_words(page):
    assert list(prose.findings(ROOT / page)) == []


def test_retired_words_and_long_pages_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The client is told.\n\n```\nis told\n```\n" + "word " * 1500)
    assert len(list(prose.findings(page))) == 2


@pytest.mark.parametrize("generator", [support_matrix, cli_docs], ids=lambda module: module.__name__)
def test_generated_pages_are_not_stale(generator):
    for name, text in generator.files().items():
        assert (ROOT / "docs" / name).read_text() == text, "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_of_yaml_are_valid(document):
    for block in blocks(document, "yaml"):
        for value in yaml.safe_load_all(block):
            top = set(value)
            if "currency" in top or "prices" in top or top & ELSEWHERE:
                continue
            if top == {"fields"}:
                Grid.model_validate(value)
            elif top == {"stages"}:
                assert value["stages"] and all(file.endswith(".yaml") for file in value["stages"])
            elif top <= {*RunSpec.model_fields, INCLUDE}:
                RunSpec.model_validate({name: section for name, section in value.items() if name != INCLUDE})
            else:
                ChartValues.model_validate_json(json.dumps(value))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_of_python_are_python(document):
    for block in blocks(document, "python"):
        if not block.startswith("# kernels/strata_kernels/patch/table.py"):
            ast.parse(block)


def commands() -> list[tuple[str, list[str]]]:
    lines = []
    for document in DOCUMENTS:
        for language in ("console", ""):
            for block in blocks(document, language):
                joined = block.replace("\\\n", " ")
                lines += [(document, line[2:]) for line in joined.splitlines() if line.startswith("$ ")]
    return [(document, shlex.split(line, comments=True)) for document, line in lines]


def test_commands_and_their_options_exist():
    known = {name: command.params for name, command in get_command(app).commands.items()}
    seen = 0
    for document, (program, *arguments) in commands():
        if program == "strata" and not arguments[0].startswith("-"):
            options = {flag for parameter in known[arguments[0]] for flag in parameter.opts} | {"--help"}
            used = {argument for argument in arguments[1:] if argument.startswith("-")}
            assert used <= options, (document, arguments)
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_named_in_a_sentence_exist(document):
    named = set(re.findall(r"`strata ([a-z]+)\b", (ROOT / document).read_text()))
    assert named <= get_command(app).commands.keys()


def test_modules_and_targets_that_are_run_exist():
    makefile = (ROOT / "Makefile").read_text()
    for document, words in commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), (document, words)
        if "-m" in words and words[words.index("-m") + 1] not in ("pip", "pytest"):
            assert find_spec(words[words.index("-m") + 1]), (document, words)


def symbols() -> list[tuple[str, str]]:
    tour = (ROOT / "docs/tour.md").read_text()
    return re.findall(r"\[`(\w+)`\]\(\.\./([^)]+\.py)\)", tour)


@pytest.mark.parametrize(("symbol", "path"), symbols())
def test_the_tour_names_what_is_there(symbol, path):
    body = ast.parse((ROOT / path).read_text()).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node.targets[0] if isinstance(node, ast.Assign) else node.target
                for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]  # fmt: skip
    assert symbol in names | {target.id for target in assigned if isinstance(target, ast.Name)}


def test_the_tour_answers_sixteen_questions():
    table = (ROOT / "docs/tour.md").read_text().split("## Sixteen questions")[1]
    assert len(re.findall(r"^\| .*\?.* \| .*\]\(", table, re.MULTILINE)) == 16


@pytest.mark.parametrize(
    ("page", "written", "rewritten"),
    [
        ("data.md", "[a](../examples/nightly.py)", "[a](source/examples/nightly.py/index.md)"),
        ("benchmarks/index.md", "[a](../../CHANGELOG.md#x)", "[a](../source/CHANGELOG.md/index.md#x)"),
        ("data.md", "[a](faults.md#hangs) [b](#packing)", "[a](faults.md#hangs) [b](#packing)"),
        ("data.md", "[a](https://example.org/../x)", "[a](https://example.org/../x)"),
        ("source/charts/strata/README.md/index.md", "[a](../../docs/cluster.md)", "[a](../../../../cluster.md)"),
    ],
)
def test_the_site_has_the_files_that_pages_link_to(page, written, rewritten):
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert mkdocs_hooks.on_page_markdown(written, shown, None, None) == rewritten


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_pin_their_actions_and_may_read_alone(workflow):
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"]) for step in steps if "uses" in step)


def test_the_quick_tests_are_there():
    said = subprocess.run(["make", "-n", "-o", ".venv/.ready", "test-fast"], cwd=ROOT, text=True, capture_output=True)
    files = re.findall(r"tests/\S+", said.stdout)
    assert len(files) > 10 and [file for file in files if not (ROOT / file).exists()] == []


def test_make_help_explains_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    helped = subprocess.run(["make", "help"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert all(f"make {target} " in helped for target in phony)


def test_code_that_is_sent_is_unpacked_in_the_folder_that_the_image_starts_in():
    # The default of `pyflyte register` is root's folder, where the image's user may not write.
    files = (path for name in ("docs", "examples", "platform") for path in ROOT.glob(f"{name}/**/*"))
    texts = (path.read_text() for path in files if path.suffix in (".md", ".py", ".ipynb"))
    lines = re.findall(r"pyflyte register .*", "\n".join(texts))
    # A release sends none.
    registered = [line for line in lines if "--" in line and "--copy none" not in line]
    assert len(registered) > 2 and all("--destination-dir . " in line for line in registered), registered
