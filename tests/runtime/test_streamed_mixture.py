"""A mixture that is streamed, killed and started again reads, measures and learns what a mixture at rest does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime.data.preparation.part_records import prepared_parts
from tasks.runtime.data.prepared_manifest import PLAN
from tasks.runtime.data.shard_store import ShardStore
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points
from tasks.runtime.run_folder.record import CompletionRecord
from tests.helpers import fork_server
from tests.runtime.helpers.run_in_parts import FIRST

ROOT = Path(__file__).parents[2]
WEIGHTS = (0.5, 0.3, 0.2)
STEPS, PROCESSES, ROWS = 20, 2, 4
ONE_BY_ONE = {"sequence_length": 64, "packing": False, "shuffle": "window", "shuffle_window": 1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / name)

    pairs = [{"prompt": f"{i} and {i + 1} are", "completion": f" {2 * i + 1}"} for i in range(160)]
    chats = [
        [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i}!" * (1 + i % 4)}]
        for i in range(70)
    ]
    words = [{"prompt": "word", "completion": "one two three four " * (1 + i % 3)} for i in range(80)]
    return {
        "sources": [
            {"source": write("pairs.jsonl", pairs), "weight": WEIGHTS[0]},
            {"source": write("chats.jsonl", [{"messages": chat} for chat in chats]), "weight": WEIGHTS[1]},
            {"source": write("words.jsonl", words), "weight": WEIGHTS[2]},
        ],
        "validation_source": write("held.jsonl", pairs[:9]),
    }


def make_spec(output, data, **changes):
    output.mkdir()
    spec = RunSpec.model_validate(
        {
            "name": "mixed",
            "output": str(output),
            "data": {
                **data,
                "sequence_length": 64,
                "packing": False,
                "shuffle": "window",
                "shuffle_window": 1,
                **changes,
            },
            "training": {"steps": STEPS, "micro_batch_size": ROWS // PROCESSES},
            "checkpoint": {"every": 2},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": "torch"},
            "parallel": {"type": "ddp"},
            "topology": {"nproc_per_node": PROCESSES},
            "evaluation": {"every": 5, "samples": 1, "max_new_tokens": 2},
        }
    )
    (output / "spec.json").write_text(spec.model_dump_json())
    return spec


def start(spec):
    return fork_server.Popen(
        [sys.executable, "-m", "tests.runtime.helpers.run_in_parts", str(PROCESSES), f"{spec.output}/spec.json"],
        cwd=ROOT,
        env=fork_server.clean_environment(OMP_NUM_THREADS="1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process):
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def numbers(spec):
    metrics = RunFolder.of(spec).metrics
    points = [(point.step, point.loss, point.grad_norm, point.target_tokens) for point in read_points(metrics)]
    return points, [(point.step, point.loss) for point in read_evaluations(metrics)]


def parts_done(output):
    """Prepared parts and all parts, of the sources that have some."""
    plans = list((output / "data").glob(f"*/{PLAN}"))
    done = sum(len(prepared_parts(ShardStore(plan.parent))) for plan in plans)
    return done, sum(len(json.loads(plan.read_text())["parts"]) for plan in plans)


def test_a_streamed_mixture_of_two_ranks_continues_after_a_kill_with_the_rows_of_one_at_rest(sources, tmp_path):
    at_rest = make_spec(tmp_path / "at-rest", sources)
    first = start(at_rest)
    spec = make_spec(tmp_path / "streamed", sources, streaming=True)
    killed = start(spec)
    for line in killed.stdout:
        if f"step  4/{STEPS}" in line:
            break
    else:
        pytest.fail("the run ended before step 4")
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    for process in (*map(int, children), killed.pid):
        os.kill(process, signal.SIGKILL)
    killed.communicate(timeout=600)
    done, parts = parts_done(tmp_path / "streamed")
    # Training may be at step 4 before the last of the first parts is prepared.
    assert 0 < done <= FIRST < parts - 20
    (tmp_path / "streamed" / "go").touch()
    said = ended(start(spec))
    assert "continuing after step" in said and "parts are prepared already" in said
    ended(first)
    assert numbers(spec) == numbers(at_rest)
    found = [CompletionRecord.load(RunFolder.of(one).record) for one in (spec, at_rest)]
    assert found[0].sources == found[1].sources and found[0].eval_loss_after == found[1].eval_loss_after
    assert found[0].samples == found[1].samples and found[0].restarts == 1
    shares = [share.row_share for share in found[0].sources if share.weight is not None]
    assert shares == pytest.approx(WEIGHTS, abs=0.01)
    assert sum(share.rows for share in found[0].sources) == STEPS * ROWS
    # One started with streaming goes on without it: it is the same run.
    assert "already" in ended(
        start(spec.model_copy(update={"data": spec.data.model_copy(update={"streaming": False})}))
    )
