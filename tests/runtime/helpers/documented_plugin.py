"""The plug-in of docs/extending.md and docs/callbacks.md, written to a folder outside of the source tree."""

import re
from pathlib import Path

PAGES = [Path(__file__).parents[3] / "docs" / name for name in ("extending.md", "callbacks.md")]


def write_plugin(folder):
    """Write each block of Python that begins with the name of its file. Returns the names."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL)
    for name, code in blocks:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(code, encoding="utf-8")
    (folder / "my_plugin" / "__init__.py").touch()
    return [name for name, _ in blocks]
