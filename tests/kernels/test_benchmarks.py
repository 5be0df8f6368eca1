"""The benchmarks' rows, gate and report, at sizes for a CPU; times need a GPU."""

import importlib.util
import os
from dataclasses import replace
from unittest.mock import Mock, call

import pytest
import torch

from benchmarks import ops, optimizer_step, report
from benchmarks.case import Operator, in_case
from benchmarks.measure import Gate, Limits
from benchmarks.operators import OPERATORS
from benchmarks.peers import NAMES, PEERS, Candidate, candidate
from strata_kernels.warmup import record

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="compares what PyTorch runs")
SMALL = {"rows": 6, "features": 64, "vocabulary": 40, "batch": 2, "positions": 3, "heads": 4, "kv_heads": 2}
SMALL |= {"tokens": 6, "experts": 4, "top_k": 2, "inner": 8, "rank": 2, "answers": 2}
SMALL |= {"images": 2, "channels": 64, "size": 6}
BY_NAME = {operator.name: operator for operator in OPERATORS}
CPU = torch.device("cpu")


@pytest.fixture(params=OPERATORS, ids=lambda operator: operator.name)
def operator(request: pytest.FixtureRequest) -> Operator:
    return request.param


def gate(operator: Operator, dtype: torch.dtype) -> Gate:
    """Of the operator's last case, which is the most special one."""
    shape = {axis: SMALL.get(axis, size) for axis, size in operator.cases[-1].shape.items()}

    def make() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        return operator.inputs(shape, dtype, CPU)

    return Gate(operator.torch, operator.exact or operator.torch, make)


def test_gate_is_green_for_ours(operator: Operator) -> None:
    errors, untouched = gate(operator, torch.float32).check(operator.ours)
    assert untouched and errors and all(error.ok for error in errors), errors


def test_ignored_rows_are_told_and_left_out() -> None:
    operator = BY_NAME["linear_cross_entropy"]
    for case in (one for one in operator.cases if "ignored" in one.shape):
        _, _, target = operator.inputs({**case.shape, "features": 1, "vocabulary": 8}, torch.float32, CPU)
        assert case.told == {"max_targets": int((target >= 0).sum())}
    inputs = operator.inputs({"rows": 6, "features": 64, "vocabulary": 40, "ignored": 50}, torch.float32, CPU)
    # A number too small turns the loss to NaN, if it is passed on.
    for number, finite in ((3, True), (1, False)):
        told = in_case(operator, replace(operator.cases[-1], told={"max_targets": number}))
        assert bool(told.ours(*inputs).isfinite()) == finite


def test_gate_is_red_for_what_is_wrong(operator: Operator) -> None:
    def wrong(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = operator.torch(*inputs)
        return tuple(1.02 * y for y in (result if isinstance(result, tuple) else (result,)))

    errors, _ = gate(operator, torch.bfloat16).check(wrong)
    assert not all(error.ok for error in errors)


def test_gate_is_red_for_nan_and_sees_what_is_overwritten() -> None:
    def spoil(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = BY_NAME["rms_norm"].torch(x, weight) * float("nan")
        x.detach().zero_()
        return result

    errors, untouched = gate(BY_NAME["rms_norm"], torch.bfloat16).check(spoil)
    assert not untouched and not any(error.ok for error in errors)


def test_every_shape_can_be_recorded_and_has_a_limit(operator: Operator) -> None:
    sizes = (*operator.cases, *operator.sweep_cases())
    step = [operator.inputs(case.shape, torch.bfloat16, torch.device("meta")) for case in sizes]
    assert len(record(lambda: [operator.ours(*inputs) for inputs in step]))
    for one_kind in (operator.cases, operator.sweep_cases()):
        assert len({operator.label(case.shape) for case in one_kind}) == len(one_kind)
    for case in sizes:
        rates = ops.rates(operator, case.shape, 1.0, Limits(1000.0, 500.0))
        assert rates["share"] == rates.get("GB/s", 0) / 1000 + rates.get("TFLOP/s", 0) / 500 > 0


def test_floor_of_a_known_shape() -> None:
    limit = Limits(1.0, 1.0)
    assert ops.rates(BY_NAME["rms_norm"], {"rows": 1000, "features": 1000}, 1.0, limit)["GB/s"] == 10.0
    head, shape = BY_NAME["linear_cross_entropy"], {"rows": 8192, "features": 4096, "vocabulary": 128256}
    assert ops.rates(head, shape, 40.0, limit)["TFLOP/s"] == pytest.approx(645.5, abs=0.1)
    assert ops.rates(head, {**shape, "ignored": 50}, 20.0, limit)["TFLOP/s"] == pytest.approx(645.5, abs=0.1)


def test_peers_are_rows_of_known_operators() -> None:
    assert all(set(peers) <= set(NAMES) for peers in PEERS.values())
    found = {name: candidate(BY_NAME["rms_norm"], name) for name in ("ours", "torch", "nn")}
    assert all(isinstance(one, Candidate) for one in found.values())
    errors, untouched = gate(BY_NAME["rms_norm"], torch.float32).check(found["nn"].function)
    assert untouched and all(error.ok for error in errors)


def test_exact_modes_of_peers_are_asked_for() -> None:
    asked = Mock()
    for name in ("liger_fp32", "cce_exact"):
        PEERS["linear_cross_entropy"][name].call(asked, "x", "weight", "target")
    assert asked.mock_calls == [
        call.liger_fused_linear_cross_entropy("x", "weight", "target", accum_dtype=torch.float32),
        call.linear_cross_entropy("x", "weight", "target", impl="cce_exact"),
    ]


def test_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    assert "liger_kernel" in candidate(BY_NAME["rms_norm"], "liger")
    assert candidate(BY_NAME["rms_norm"], "cce") == "has no such operator"


def test_shards_are_all_jobs_once() -> None:
    names = list(BY_NAME)
    shards = [ops.jobs(names, False, (i, 3)) for i in range(3)]
    assert sorted(map(id, [case for part in shards for _, _, case in part])) == sorted(
        id(case) for operator in OPERATORS for case in operator.cases
    )
    assert {kind for kind, _, _ in ops.jobs(["rms_norm"], True, (0, 1))} == {"sweep"}


def row(operator: str, case: int, by: str, ms: float, **more: object) -> dict[str, object]:
    shape = BY_NAME[operator].label(BY_NAME[operator].cases[case].shape)
    numbers = {"ms": ms, "wall ms": 2 * ms, "share": 0.09 / ms, "extra MiB": 100.0}
    return {"kind": "case", "operator": operator, "shape": shape, "by": by, "gate": "ok: 1 of 2", **numbers, **more}


def test_bars() -> None:
    [ours, slow] = report.finish([row("rms_norm", 0, "ours", 0.1), row("rms_norm", 1, "ours", 0.2)])
    assert (ours["bar"], ours["met"]) == ("≥ 88 %", "met") and slow["met"] == "missed"
    [wall, _] = report.finish([row("rms_norm", 5, "ours", 1.0), row("rms_norm", 5, "nn", 2.0)])
    assert (wall["of nn wall"], wall["met"]) == (0.5, "met")
    cases = BY_NAME["linear_cross_entropy"].cases
    full, half = 0, next(i for i, case in enumerate(cases) if case.shape == {**cases[0].shape, "ignored": 50})
    rows = [row("linear_cross_entropy", i, "ours", ms) for i, ms in ((full, 40.0), (half, 24.0))]
    [full_row, half_row] = report.finish(rows)
    assert (half_row["of full"], half_row["met"]) == (0.6, "missed")
    assert full_row["met"] == "not measured; met"


def test_red_row_has_no_times_and_a_lost_one_is_named(tmp_path) -> None:
    red = {**row("rms_norm", 1, "liger", 0.01), "gate": "RED: 2 of 1"}
    rows = [
        row("rms_norm", 0, "ours", 0.2),
        row("rms_norm", 0, "compile", 0.1),
        row("rms_norm", 1, "ours", 0.2),
        red,
        {**row("rms_norm", 1, "quack", 0.3), "gate": "ok, overwrites its inputs: 1 of 2"},
    ]
    report.write(tmp_path / "a", ["a GPU"], rows[:2])
    report.write(tmp_path / "b", ["another GPU"], rows[2:])
    heads, merged = report.merge([tmp_path / "b", tmp_path / "a"])
    assert heads == ["another GPU", "a GPU"] and len(merged) == 5
    table = report.operators_table(merged)
    assert "| rms_norm | 16384x4096 | ≥ 88 %: missed | 0.200 ms, 45.0 % | **0.100 ms, 90.0 %** | - | - |" in table
    assert "| **0.200 ms, 45.0 %** | - | gate not passed | 0.300 ms, 30.0 % † |" in table
    assert report.lost(merged) == "- `rms_norm` 16384x4096: 0.200 ms against 0.100 ms of torch.compile"


def test_tensors_that_did_not_pass_are_named() -> None:
    red = {"gate": "RED: 1.0e-07 of 2.0e-07; 3.0e-03 of 2.0e-03; nan of 4.0e-03"}
    rows = [
        row("linear_cross_entropy", 0, "ours", 1.0),
        {**row("linear_cross_entropy", 0, "cce", 1.0), **red},
        {**row("cross_entropy", 0, "liger", 1.0), "gate": "RED: 2 of 1; 1 of 2"},
    ]
    assert report.refused_table(rows).splitlines() == [
        "| shape | cut-cross-entropy |",
        "| --- | --- |",
        "| 8192x4096x128256 | dx 3.0e-03 of 2.0e-03; dw nan of 4.0e-03 |",
    ]


def test_pages_are_what_their_data_says() -> None:
    heads, rows = report.read_csv(report.DATA)
    pages = {path: path.read_text() for path in report.DOCS.glob("*.md")}
    assert {path: report.fill(text, heads, rows) for path, text in pages.items()} == pages
    assert sorted(mark for text in pages.values() for mark in report.marks(text)) == sorted(["runs", *report.PARTS])
    assert report.fill(pages[report.DOCS / "operators.md"], [], []) != pages[report.DOCS / "operators.md"]
    with pytest.raises(KeyError):
        report.fill("<!-- begin: unknown -->\n\n<!-- end: unknown -->", heads, rows)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws the plots")
def test_plot(tmp_path) -> None:
    [path] = report.plot(tmp_path, [row("rms_norm", 0, "ours", 0.1), row("rms_norm", 0, "liger", 0.2)])
    assert path.name == "rms_norm.png" and path.stat().st_size > 0


@pytest.mark.parametrize("text", ["3/3", "-1/2", "1", "a/b"])
def test_shard_that_is_none(text: str) -> None:
    with pytest.raises(Exception, match="i/n"):
        ops.shard(text)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ops.parse(["--only", "rms_norm", "--against", "torch,compile,liger,quack,cce", "--shard", "1/4"])
    assert asked.only == ["rms_norm"] and asked.against[-1] == "cce" and asked.shard == (1, 4)
    assert ops.parse(["--sweep"]).against == [] and ops.parse([]).against == list(NAMES)
    assert ops.parse(["--against", ""]).against == []
    with pytest.raises(SystemExit):
        ops.parse(["--only", "rope,rmsnorm"])
    assert "unknown rmsnorm; known are rms_norm" in capsys.readouterr().err


def test_the_gate_of_the_optimizer_step_tells_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "GATE_SIZES", (3, 40))
    assert not optimizer_step.gate(CPU)
    step = optimizer_step.State.step

    def wrong(state: optimizer_step.State, rounding: str, plan: object) -> None:
        step(state, rounding, plan)
        if rounding == "master":
            state.weights[1][5] += torch.rand(())

    monkeypatch.setattr(optimizer_step.State, "step", wrong)
    assert len(optimizer_step.gate(CPU)) == 16


def test_the_optimizer_steps_model_fits_into_memory() -> None:
    assert sum(optimizer_step.sizes(2**40)) == 8_030_261_248
    assert sum(optimizer_step.sizes(40 * 10**9)) * optimizer_step.KEPT <= 40 * 10**9
