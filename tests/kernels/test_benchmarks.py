"""The benchmarks' table and gate, at sizes for a CPU; times need a GPU."""

import os

import pytest
import torch

from benchmarks import ops
from benchmarks.measure import errors
from benchmarks.operators import OPERATORS

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="compares what PyTorch runs")
SMALL = {"rows": 5, "features": 64, "vocabulary": 40, "batch": 2, "positions": 3, "heads": 4, "kv_heads": 2}


@pytest.fixture(params=OPERATORS, ids=lambda operator: operator.name)
def operator(request):
    return request.param


def inputs(operator, dtype: torch.dtype = torch.bfloat16):
    shape = {name: SMALL[name] for name in operator.shapes[0]}
    return operator.inputs(shape, dtype, torch.device("cpu"))


def test_gate_is_green_for_ours(operator) -> None:
    torch.manual_seed(0)
    found = errors(operator.ours, operator.torch, inputs(operator, torch.float32))
    assert found and all(mine <= allowed for mine, _, allowed in found)


def test_gate_is_red_for_what_is_wrong(operator) -> None:
    def wrong(*args):
        result = operator.torch(*args)
        return tuple(1.02 * y for y in result) if isinstance(result, tuple) else 1.02 * result

    found = errors(wrong, operator.torch, inputs(operator))
    assert any(mine > allowed for mine, _, allowed in found)


def test_rates(operator) -> None:
    rates = ops.rates(operator, operator.shapes[0], "both", 1.0, (1000.0, 500.0))
    assert rates["share"] == rates.get("GB/s", 0) / 1000 + rates.get("TFLOP/s", 0) / 500


def test_floor_of_a_known_shape() -> None:
    rms_norm, linear_cross_entropy = OPERATORS[0], OPERATORS[-1]
    assert ops.rates(rms_norm, {"rows": 1000, "features": 1000}, "forward", 1.0, (1, 1))["GB/s"] == 4.0
    shape = {"rows": 8192, "features": 4096, "vocabulary": 128256}
    assert ops.rates(linear_cross_entropy, shape, "both", 40.0, (1, 1))["TFLOP/s"] == pytest.approx(645.5, abs=0.1)


def test_peer_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    assert "liger_kernel" in ops.peer(OPERATORS[0], "liger")


def test_report(tmp_path) -> None:
    row = {"operator": "rope", "shape": "1x2", "by": "ours", "pass": "both", "ms": 0.12345, "share": 0.5, "gate": "ok"}
    ops.write(tmp_path, "a GPU, versions", [row])
    assert "| rope | 1x2 | ours | both | 0.123 |" in (tmp_path / "ops.md").read_text()
    assert (tmp_path / "ops.csv").read_text().startswith("# a GPU, versions\noperator,shape,by,")


def test_unknown_operator() -> None:
    with pytest.raises(Exception, match="unknown rmsnorm; known are rms_norm"):
        ops.names(("rms_norm", "rope"))("rope,rmsnorm")
