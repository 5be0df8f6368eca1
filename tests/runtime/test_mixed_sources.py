"""A run of several sources reads the same rows under every framework, however they are spread, and after a kill."""

import json
import logging
import shutil

import pytest

from strata_platform.spec import RunSpec, dump_spec
from tasks.runtime.data import prepare, recipe_of
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.comparable_runs import approx, curve, file_of
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("narrowed")
STEPS, WEIGHTS = 6, (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Pairs, chats, and the pairs of another name, so that each has losses of its own."""
    folder = tmp_path_factory.mktemp("sources")
    rows = {
        "pairs": [{"prompt": f"{i} and {i + 1} are", "completion": f" {2 * i + 1}"} for i in range(40)],
        "chats": [
            {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i}!"}]}
            for i in range(40)
        ],
        "words": [{"prompt": "word", "completion": "one two three four " * (1 + i % 3)} for i in range(40)],
    }
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    named = [
        {"source": str(folder / f"{name}.jsonl"), "weight": weight} for name, weight in zip(rows, WEIGHTS, strict=True)
    ]
    # Rows of a third kind, which nobody trains on.
    held_out = folder / "held-out.jsonl"
    held_out.write_text("".join(json.dumps(rows["pairs"][i] | {"prompt": f"{i}?"}) + "\n" for i in range(40)))
    named[1]["validation_source"] = str(held_out)
    return named


def make_spec(output, sources, name, framework="torch", processes=1, size=2, **fields):
    training = {"steps": STEPS, "micro_batch_size": size, "gradient_accumulation_steps": 4 // size // processes}
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "data": {"sequence_length": 64, "validation_fraction": 0.1, "sources": sources},
            "training": training,
            "checkpoint": {"every": 2, "keep_last": STEPS},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": framework},
            "parallel": {"type": "ddp" if processes > 1 else "single"},
            "topology": {"nproc_per_node": processes},
            "evaluation": {"samples": 0},
            **fields,
        }
    )


@pytest.fixture(scope="module")
def undisturbed(output, sources):
    """A run under the plain loop, and its record."""
    spec = make_spec(output, sources, "undisturbed")
    return spec, train_spec(spec)


@pytest.mark.parametrize("framework", ["hf", "lightning", "torch"])
def test_a_run_that_is_killed_reads_the_rows_that_it_would_have_read(framework, output, sources, undisturbed):
    spec = make_spec(output, sources, f"killed-{framework}", framework, size=2)
    # What the undisturbed run had when step 2 was done.
    shutil.copytree(RunFolder.of(undisturbed[0]).root, RunFolder.of(spec).root)
    RunFolder.of(spec).spec.write_text(dump_spec(spec))
    record = train_spec(spec, step=2)
    assert curve(spec) == curve(undisturbed[0])
    assert record.sources == undisturbed[1].sources


def test_two_processes_and_another_micro_batch_read_the_same_rows(output, sources, undisturbed):
    spec = make_spec(output, sources, "two", processes=2, size=1)
    launch(2, "--narrow", file_of(output, spec))
    assert curve(spec) == approx(curve(undisturbed[0]))
    assert CompletionRecord.load(RunFolder.of(spec).record).sources == undisturbed[1].sources


def test_the_record_has_the_shares_and_the_losses_of_each_source(undisturbed, caplog):
    spec, record = undisturbed
    assert [(share.weight, share.rows) for share in record.sources] == [(0.5, 12), (0.3, 7), (None, 0), (0.2, 5)]
    recipe = recipe_of(spec)
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    with caplog.at_level(logging.INFO, "tasks"):
        measured = evaluate(spec, record, data, collect_weights(RunFolder.of(spec), spec.adapter, record))
    losses = [share.eval_loss_after for share in measured.sources]
    # The chats hold nothing out, as they are validated on the pairs.
    assert [loss is None for loss in losses] == [False, True, False, False]
    tokens = [source.validation.target_tokens for source in data.manifest.sources]
    mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True) if count) / sum(tokens)
    assert measured.eval_loss_after == pytest.approx(mean, rel=1e-9)
    assert f"after: {data.manifest.sources[3].source}" in caplog.text
    # However few batches are read, some are of each source.
    few = RunSpec.model_validate({**spec.model_dump(), "evaluation": {"samples": 0, "max_batches": 1}})
    measured = evaluate(few, record, data, collect_weights(RunFolder.of(spec), spec.adapter, record))
    assert [share.eval_loss_after is None for share in measured.sources] == [False, True, False, False]
