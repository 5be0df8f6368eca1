"""Hooks of `mkdocs build`: files of the repository that pages link to become pages of the site.

On a code host `[spec](../examples/tiny-llama.yaml)` opens the file. The site has the folder `docs` alone, so each such
file is added to it below `source/`, and links are rewritten to lead there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", "": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that a page links to and `docs` does not have."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by]
    seen: set[str] = set()
    while waiting:
        document = waiting.pop()
        for target, _ in LINK.findall((ROOT / document).read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
            if path.startswith("docs/") or path in seen or not (ROOT / path).is_file():
                continue
            seen.add(path)
            files.append(File.generated(config, page_of(path), content=_content(path)))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages that `on_files` made."""
    here = page.file.src_uri
    document = here.removeprefix("source/").removesuffix("/index.md") if here.startswith("source/") else f"docs/{here}"
    if here.startswith("source/") and not document.endswith(".md"):
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), match[1]))
        target = path.removeprefix("docs/") if path.startswith("docs/") else page_of(path)
        if (ROOT / path).is_dir():
            # A folder has no page; the nearest thing is the list of what is in it, which code hosts alone show.
            return f"{posixpath.relpath('index.md', posixpath.dirname(here) or '.')}"
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + (match[2] or "")

    return LINK.sub(rewritten, markdown)


def page_of(path: str) -> str:
    """Where the site has a file of the repository."""
    return f"source/{path}/index.md"


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n`````{language}\n{text}\n`````\n"
