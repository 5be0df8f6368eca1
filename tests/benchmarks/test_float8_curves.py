"""The program that compares loss curves: every layer multiplies in FP8, and the table has what was trained."""

import subprocess
import sys

import pytest

from benchmarks import float8_curves, training
from tasks.runtime.models import float8
from tasks.runtime.run_folder.metrics_file import read_points

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


def test_a_curve_is_trained_in_fp8_and_read(tmp_path, monkeypatch):
    shape = {**training.SHAPES["1b"], **SMALL, "num_hidden_layers": 1, "vocab_size": 4096}
    monkeypatch.setitem(training.SHAPES, "small", shape)
    monkeypatch.setattr(float8_curves, "LENGTH", 32)
    # `train` replaces it for its process.
    monkeypatch.setattr(float8, "_slow_layers", lambda layers, *_: list(layers))
    documents = tmp_path / "documents.jsonl"
    documents.write_text('{"text": "one two three four five"}\n' * 200)
    jobs, build = [], training.build_job
    monkeypatch.setattr(training, "build_job", lambda *a, **options: jobs.append(build(*a, **options)) or jobs[-1])
    points = {}
    for name in ("bf16 0", "float8 0", "bf16 1"):
        run = float8_curves.curve(name, "tensorwise", 10, documents, "small")
        float8_curves.train(run, tmp_path)
        points[name] = read_points(float8_curves.metrics_of(run, tmp_path))
    assert [len(float8.float8_layers(job.unwrapped_model)) for job in jobs] == [0, 7, 0]
    curves = {name: float8_curves.parts(found, 10) for name, found in points.items()}
    assert {len(losses) for losses in curves.values()} == {10}
    # Of one seed the first losses differ by rounding alone; other seeds have other weights and rows.
    assert curves["bf16 0"][0] != curves["bf16 1"][0]
    assert 0 < abs(curves["bf16 0"][0] - curves["float8 0"][0]) < 0.01


def test_a_table_tells_differences_and_leaves_missing_steps_empty():
    curves = {"bf16 0": [5.0, 4.0], "float8 0": [5.01, 3.98], "bf16 1": [5.1]}
    lines = float8_curves.table(curves, 100)
    assert lines[0].startswith("| mean loss of 10 steps, up to step | 10 | 20 |")
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in (line.split("|") for line in lines)}
    assert rows["float8 0 - bf16 0"][:3] == ["+0.0100", "-0.0200", ""]
    assert rows["bf16 1 - bf16 0"][:2] == ["+0.1000", ""]
    assert {len(cells) for cells in rows.values()} == {float8_curves.PARTS}


def test_a_run_that_failed_is_not_compared():
    """One that is merely ended after a time is."""
    codes = {"bf16 0": "0", "float8 0": "3", "bf16 1": "__import__('time').sleep(60)"}
    programs = {name: [sys.executable, "-c", f"raise SystemExit({code})"] for name, code in codes.items()}
    children = {name: subprocess.Popen(programs[name]) for name in ("bf16 0", "bf16 1")}
    children["bf16 0"].wait()
    float8_curves.wait_for(children, 0.0)
    assert children["bf16 1"].returncode < 0
    children = {name: subprocess.Popen(programs[name]) for name in ("bf16 0", "float8 0")}
    with pytest.raises(SystemExit, match="float8 0 failed"):
        float8_curves.wait_for(children, None)


@pytest.mark.parametrize("name", float8_curves.RUNS)
def test_every_run_is_one_that_can_be_trained(name, tmp_path):
    run = float8_curves.curve(name, "rowwise", 500, tmp_path / "documents.jsonl", "1b")
    spec = run.spec(tmp_path, tmp_path)
    assert (spec.training.steps, spec.seed) == (500, int(name[-1]))
    assert spec.training.float8 == ("rowwise" if name.startswith("float8") else "none")
