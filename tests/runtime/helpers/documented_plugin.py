"""The plug-in of docs/extending.md, written to a folder outside of the source tree."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/extending.md"


def write_plugin(folder):
    """Write each block of Python that begins with the name of its file. Returns the names."""
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, code in blocks:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(code, encoding="utf-8")
    (folder / "my_plugin" / "__init__.py").touch()
    return [name for name, _ in blocks]
