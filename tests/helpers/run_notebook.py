"""Runs a notebook's code in order, as its kernel would: `python tests/helpers/run_notebook.py NOTEBOOK DISPLAYED`.

Writes to the file DISPLAYED what the notebook displayed, as JSON: by display, the HTML of each of its states.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

DISPLAYED = defaultdict(list)


class Handle:
    """What Jupyter's `display` returns when it is given an id."""

    def __init__(self, name):
        self.name = name

    def update(self, shown):
        DISPLAYED[self.name].append(shown._repr_html_())


def display(shown, display_id):
    """Jupyter puts its own into every notebook."""
    handle = Handle(display_id)
    handle.update(shown)
    return handle


if __name__ == "__main__":
    # As a kernel has it: modules are looked for where the notebook is run.
    sys.path[0] = ""
    names = {"__name__": "__main__", "display": display}
    for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    Path(sys.argv[2]).write_text(json.dumps(DISPLAYED))
