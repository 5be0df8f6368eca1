"""A run's folder belongs to one spec."""

import logging
import os
from contextlib import ExitStack, closing

import pytest

from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec, load_spec
from tasks.runtime.metrics.trackers.tracker import identity
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import MetricsFile


def spec(tmp_path, **changes):
    return RunSpec.model_validate({"output": str(tmp_path), **changes})


def test_paths_are_absolute_and_below_output_and_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunFolder.of(RunSpec(name="mine", output="here")).record == tmp_path / "here" / "mine" / "record.json"


def test_same_spec_continues(tmp_path):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"tracking": {"log_every": 3}},
        {"checkpoint": {"every": 7}},
        {"evaluation": {"samples": 1}},
        {"resources": {"cpu": "8"}},
        {"kernels": {"warmup": False}},
        {"runtime": {"framework": "torch"}},
        {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}, "training": {"micro_batch_size": 2}},
        {"training": {"micro_batch_size": 1, "gradient_accumulation_steps": 4}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_change_the_next_step_may_differ(tmp_path, change):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, **change))


def test_another_spec_is_refused_with_what_differs(tmp_path):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    with pytest.raises(ValueError, match=r"seed was 0, is 7.*optimizer\.lr was None, is 0\.001") as error:
        RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, seed=7, optimizer={"lr": 1e-3}))
    assert "Choose another name" in str(error.value)


CONSTANT = {"type": "constant", "warmup_steps": 5}
WSD = {"type": "wsd", "warmup_steps": 5}
HALF = {**WSD, "decay_ratio": 0.5}
RESTARTS = {"type": "cosine_with_restarts"}


@pytest.mark.parametrize(
    ("before", "after", "done", "allowed"),
    [
        (({"steps": 100}, CONSTANT), ({"steps": 200}, CONSTANT), 100, True),
        (({"steps": 100}, CONSTANT), ({"steps": 60}, CONSTANT), 60, True),
        (({"steps": 100}, CONSTANT), ({"steps": 50}, CONSTANT), 60, False),
        # By default the warm-up is 5 % of the steps.
        (({"steps": 100}, {"type": "constant"}), ({"steps": 200}, {"type": "constant"}), 100, False),
        (({"steps": 100}, {"type": "constant"}), ({"steps": 200}, CONSTANT), 100, True),
        # The last fifth decays.
        (({"steps": 100}, WSD), ({"steps": 200}, WSD), 80, True),
        (({"steps": 100}, WSD), ({"steps": 200}, WSD), 90, False),
        # The decay begins with the next step, or would have begun before.
        (({"steps": 100}, CONSTANT), ({"steps": 120}, HALF), 60, True),
        (({"steps": 100}, CONSTANT), ({"steps": 116}, HALF), 60, False),
        (({"steps": 100}, {}), ({"steps": 200}, {}), 100, False),
        (({"steps": 100}, {}), ({"steps": 200}, {}), 0, True),
        # A start with too many cycles claims the folder before it is refused.
        (({"steps": 4}, {**RESTARTS, "num_cycles": 9}), ({"steps": 4}, RESTARTS), 0, True),
        (({"epochs": 1}, CONSTANT), ({"epochs": 2}, CONSTANT), 100, False),
        (({"epochs": 1}, CONSTANT), ({"steps": 200}, CONSTANT), 100, False),
    ],
)
def test_a_run_may_become_longer_if_its_steps_keep_their_learning_rates(tmp_path, before, after, done, allowed):
    old, new = (spec(tmp_path, training=training, schedule=schedule) for training, schedule in (before, after))
    folder = RunFolder.of(old)
    folder.claim(old)
    write_points(folder, *[0] * done)
    if allowed:
        folder.claim(new, done=done)
        assert load_spec(folder.spec) == new
    else:
        with pytest.raises(ValueError, match=rf"training\.(steps|epochs) was .* at least the {done} steps"):
            folder.claim(new, done=done)


def write_points(folder, *skipped):
    """Of steps that were skipped, 1, or taken, 0."""
    names = ("attempt", "time", "loss", "learning_rate", "grad_norm", "tokens", "target_tokens", "tokens_per_second")
    rest = dict.fromkeys((*names, "step_seconds", "memory_bytes"), 0)
    with closing(MetricsFile(folder.metrics)) as file:
        file.write([MetricPoint(step=step, skipped=skip, **rest) for step, skip in enumerate(skipped, start=1)])


def test_what_took_no_step_leaves_its_folder_to_another_spec(tmp_path):
    folder = RunFolder.of(spec(tmp_path))
    folder.claim(spec(tmp_path))
    folder.begin_attempt()
    identity(folder, "mlflow").write_text("of the first spec")
    write_points(folder, 1, 1)
    folder.claim(spec(tmp_path), exclusive=True)
    assert {path.name for path in folder.root.iterdir()} == {"spec.yaml", "attempts.txt", "mlflow.id", "metrics.jsonl"}
    with pytest.raises(ValueError, match="another spec"):
        folder.claim(spec(tmp_path, seed=7))
    folder.claim(spec(tmp_path, seed=7), exclusive=True)
    assert [path.name for path in folder.root.iterdir()] == ["spec.yaml"]
    assert load_spec(folder.spec).seed == 7


@pytest.mark.parametrize("first", [True, False])
def test_a_run_may_go_on_with_or_without_streaming(tmp_path, first):
    data = {"source": "rows.jsonl", "shuffle": "window", "prepared_url": "s3://bucket/rows", "validation_fraction": 0}
    given = [
        spec(tmp_path, data={**data, "streaming": streaming, "cache_gib": 8 * (1 + streaming)}, training={"steps": 4})
        for streaming in (first, not first)
    ]
    folder = RunFolder.of(given[0])
    folder.claim(given[0])
    (folder.root / "checkpoints/checkpoint-2").mkdir(parents=True)
    folder.claim(given[1])
    assert load_spec(folder.spec) == given[1]


@pytest.mark.parametrize("left", ["checkpoints/checkpoint-4", "metrics.jsonl", "record.json", "weights", "model"])
def test_what_a_run_has_made_is_nobody_elses(tmp_path, left):
    folder = RunFolder.of(spec(tmp_path))
    folder.claim(spec(tmp_path))
    if left == "metrics.jsonl":
        write_points(folder, 1, 0, 1)
    else:
        (folder.root / left).mkdir(parents=True)
    with pytest.raises(ValueError, match="another spec; different: seed was 0, is 7"):
        folder.claim(spec(tmp_path, seed=7), exclusive=True)
    assert (folder.root / left).exists() and load_spec(folder.spec).seed == 0


@pytest.mark.parametrize(
    "left",
    ["checkpoints/checkpoint-500", "metrics.jsonl", "data_commit.txt", "initial_weights.txt", "tensorboard",
     "attempts.txt", "hangs", "record.json", "report.html", "weights", "model"],
)  # fmt: skip
def test_what_is_no_runs_is_not_taken_over(tmp_path, left):
    folder = RunFolder.of(spec(tmp_path, name="mine"))
    (folder.root / left).mkdir(parents=True)
    (folder.root / "notes.txt").touch()
    with pytest.raises(ValueError, match=rf"output: {folder.root} has no spec\.yaml, .*overwrite its "
                       rf"{left.split('/')[0]}; choose another name or output, or move"):  # fmt: skip
        folder.claim(spec(tmp_path, name="mine"), exclusive=True)
    assert (folder.root / left).exists() and not folder.spec.exists()


A, B = "a" * 40, "b" * 40


def hub_spec(tmp_path, revision=None, **changes):
    return spec(tmp_path, data={"source": "org/texts", "revision": revision}, **changes)


def test_a_run_goes_on_at_the_commit_that_it_has_read(tmp_path):
    folder = RunFolder.of(hub_spec(tmp_path))
    assert folder.data_commits_for(hub_spec(tmp_path)) == ()
    folder.claim(hub_spec(tmp_path))
    folder.write_data_commits([A])
    write_points(folder, 0)
    assert folder.data_commits_for(hub_spec(tmp_path)) == folder.data_commits_for(hub_spec(tmp_path, A)) == (A,)
    # It may be named from now on, and no other.
    folder.claim(hub_spec(tmp_path, A), exclusive=True)
    assert load_spec(folder.spec).data.revision == A
    assert folder.data_commits_for(hub_spec(tmp_path, B)) == ()
    with pytest.raises(ValueError, match=rf"data\.revision was '{A}', is '{B}'"):
        folder.claim(hub_spec(tmp_path, B), exclusive=True)


def test_a_run_that_is_begun_anew_reads_the_newest_commit(tmp_path):
    folder = RunFolder.of(hub_spec(tmp_path))
    folder.claim(hub_spec(tmp_path))
    folder.write_data_commits([A])
    folder.write_initial_weights_ids({"model.name": A})
    assert folder.data_commits_for(hub_spec(tmp_path, seed=7)) == ()
    folder.claim(hub_spec(tmp_path, seed=7), exclusive=True)
    assert folder.initial_weights_ids == {}
    assert folder.data_commits_for(hub_spec(tmp_path, seed=7)) == ()


def test_a_folder_with_nothing_of_a_runs_names_is_taken(tmp_path):
    """What comes before the spec, too: the lock, the report of the warm-up, and the journal of who started it."""
    folder = RunFolder.of(spec(tmp_path))
    for name in ("notes.txt", ".lock", "warmup-here.json", ".theirs", "spec.tmp"):
        folder.create()
        (folder.root / name).touch()
    (folder.root / "supervisor").mkdir()
    folder.claim(spec(tmp_path))
    assert folder.spec.exists()


def test_the_rows_of_a_step_may_be_spread_but_not_changed(tmp_path):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    with pytest.raises(ValueError, match=r"rows per step \(training\.micro_batch_size x .*\) was 4, is 8"):
        RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, training={"gradient_accumulation_steps": 2}))


def test_a_run_may_change_how_its_gradients_are_added(tmp_path):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, training={"gradient_accumulation_dtype": "bfloat16"}))


def test_another_precision_is_another_run(tmp_path):
    two = {"topology": {"nproc_per_node": 2}, "training": {"micro_batch_size": 2}}
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, **two, parallel={"type": "fsdp"}))
    with pytest.raises(ValueError, match=r"parallel\.compute_dtype was 'model', is 'bfloat16'"):
        RunFolder.of(spec(tmp_path)).claim(
            spec(tmp_path, **two, parallel={"type": "fsdp", "compute_dtype": "bfloat16"})
        )


def test_attempts_are_counted(tmp_path):
    folder = RunFolder.of(spec(tmp_path))
    folder.claim(spec(tmp_path))
    assert [folder.begin_attempt() for _ in range(3)] == [0, 1, 2]


def test_a_run_is_trained_by_one_start_at_a_time(tmp_path, caplog):
    folder = RunFolder.of(spec(tmp_path, name="mine"))
    with folder.lock():
        with pytest.raises(ValueError, match=rf"mine is being trained by process {os.getpid()} on .*; wait for it"):
            folder.lock(timeout=0.0).__enter__()
        assert "waiting for its end" not in caplog.text
    with folder.lock(timeout=0.0) as exclusive:
        assert exclusive


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch, caplog):
    def refuse(*arguments):
        raise OSError("no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with RunFolder.of(spec(tmp_path)).lock() as exclusive:
        assert not exclusive
    assert "do not start this run twice" in caplog.text


def test_a_start_waits_for_the_one_before_to_end(tmp_path, caplog):
    folder = RunFolder.of(spec(tmp_path))
    with ExitStack() as first:
        first.enter_context(folder.lock())
        # The second one warns when it has found the lock taken; then the first one ends.
        handler = logging.Handler()
        handler.emit = lambda record: first.close()
        logging.getLogger("tasks.runtime.run_folder.folder").addHandler(handler)
        try:
            with caplog.at_level(logging.WARNING, "tasks"), folder.lock(timeout=30.0):
                assert "waiting for its end" in caplog.text
        finally:
            logging.getLogger("tasks.runtime.run_folder.folder").removeHandler(handler)
