"""The examples of the kernel layer's README run as they stand."""

import os
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "kernels" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the shapes are too large for the interpreter")
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, str(README), "exec"), {})
    assert "warmup" not in example or capsys.readouterr().out
