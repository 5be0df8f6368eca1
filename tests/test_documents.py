"""What the documents say of commands and files is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STRATA = Path(sys.executable).with_name("strata")
README = (ROOT / "README.md").read_text()


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
    assert subprocess.run([STRATA, "spec", "my.yaml"], cwd=tmp_path, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "document",
    sorted(
        str(path.relative_to(ROOT))
        for pattern in ("*.md", "docs/*.md", "*/README.md", "charts/*/README.md")
        for path in ROOT.glob(pattern)
    ),
)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / document).parent.joinpath(target).exists(), target


def test_make_help_explains_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    helped = subprocess.run(["make", "help"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert all(f"make {target} " in helped for target in phony)


def test_code_is_registered_into_the_folder_that_the_image_starts_in():
    # The default of `pyflyte register` is root's folder, where the image's user may not write.
    files = (path for name in ("docs", "examples", "platform") for path in ROOT.glob(f"{name}/**/*"))
    texts = (path.read_text() for path in files if path.suffix in (".md", ".py", ".ipynb"))
    commands = re.findall(r"pyflyte register .*", "\n".join(texts))
    assert len(commands) > 3 and all("--destination-dir . " in command for command in commands), commands
