"""Data with a teacher's log-probabilities: the command that writes it, and runs that learn without the teacher."""

import json
import sys

import pytest
import torch
from pyarrow import parquet
from torch.nn.functional import cross_entropy, log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata_platform.outcomes import BAD_INPUT
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime import teacher
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.models.build import has_fused_loss, patch
from tasks.runtime.objectives import ObjectiveContext, build_objective
from tasks.runtime.parallel.single import Single
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.warmup.plan import plan_kernels
from tests.helpers import fork_server
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

STEPS = 3


@pytest.fixture(scope="module")
def output(output):
    save_pretrained(output / "pretrained")
    tokenizer = AutoTokenizer.from_pretrained(output / "pretrained")
    model = AutoModelForCausalLM.from_pretrained(output / "pretrained")
    # A head without padding: files have no tokens that the tokenizer does not know.
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(output / "pretrained")
    with torch.no_grad():
        model.lm_head.weight *= 4.0
    model.save_pretrained(output / "teacher")
    tokenizer.save_pretrained(output / "teacher")
    write_pairs(output / "rows.jsonl")
    return output


def spec_of(output, name, objective, **data):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"name": f"{output}/pretrained"},
            "data": {
                "source": f"{output}/rows.jsonl",
                "completion_column": "chosen",
                "sequence_length": 96,
                "validation_fraction": 0.2,
                **data,
            },
            "objective": {"type": "distill", "temperature": 2.0, "weight": 0.7, **objective},
            "training": {"steps": STEPS, "micro_batch_size": 4},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 1, "keep_last": STEPS},
            "tracking": {"log_every": 1, "report_to": []},
        }
    )


@pytest.fixture(scope="module")
def asked(output):
    """The spec with the teacher as a model."""
    return spec_of(output, "model", {"teacher": f"{output}/teacher"})


@pytest.fixture(scope="module")
def written(output, asked):
    """Folders of files, by tokens at each position: all, and five of them."""
    folders = {"all": output / "all", 5: output / "five"}
    teacher.write_teacher_data(asked, folders["all"], 10**6)
    teacher.write_teacher_data(asked, folders[5], 5)
    return folders


def from_files(output, folder, name="files", **data):
    return spec_of(
        output,
        name,
        {},
        source=str(folder / "train-*.parquet"),
        completion_column=None,
        validation_source={"source": str(folder / "validation-*.parquet")},
        validation_fraction=0,
        **data,
    )


def data_of(spec):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print)


def test_the_files_have_what_the_teacher_says_by_transformers(output, asked, written):
    """Of five tokens at each position, each document by itself, and all documents of the data."""
    model = AutoModelForCausalLM.from_pretrained(output / "teacher")
    read = 0
    for split in ("train", "validation"):
        [file] = written[5].glob(f"{split}-*.parquet")
        for row in parquet.read_table(file).to_pylist():
            with torch.no_grad():
                known = log_softmax(model(torch.tensor([row["input_ids"]])).logits[0].double(), -1)
            learned = [at for at, label in enumerate(row["labels"]) if label != -100]
            assert [row["labels"][at] for at in learned] == [row["input_ids"][at] for at in learned]
            values, _ = known[[at - 1 for at in learned]].topk(5)
            torch.testing.assert_close(torch.tensor(row["logprobs"]).double(), values, rtol=1e-5, atol=1e-4)
            told = known[[at - 1 for at in learned]].gather(1, torch.tensor(row["target_token_ids"]))
            torch.testing.assert_close(told, values, rtol=1e-5, atol=1e-4)
            read += 1
    manifest = data_of(asked).manifest
    assert read == manifest.train.documents + manifest.validation.documents


@pytest.mark.parametrize("head", ["fused", "plain"])
def test_all_tokens_of_a_file_are_the_teacher_itself(output, asked, written, head):
    """Loss, metrics and gradients of a batch, beside those with the teacher as a model."""
    found = []
    for spec in (asked, from_files(output, written["all"])):
        model, processes, data = AutoModelForCausalLM.from_pretrained(output / "pretrained"), Processes(), data_of(spec)
        spec = spec.model_copy(update={"kernels": spec.kernels.model_copy(update={"enabled": head == "fused"})})
        objective = build_objective(spec, fused=has_fused_loss(patch(model, spec.kernels)))
        objective.prepare(ObjectiveContext(spec, processes, data, Single(processes), model, "-", continues=False))
        batch = collate([data.train[number] for number in range(len(data.train))])
        share = objective.micro_batch_loss(model, batch, objective.count(batch))
        share.loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append(([float(share.loss.detach()), *map(float, share.metrics.values())], gradients))
    (first, gradients), (second, again) = found
    assert second == pytest.approx(first, rel=1e-5) and first[2] > 0.1
    for name, gradient in gradients.items():
        assert (again[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("head", ["fused", "plain"])
def test_five_tokens_are_the_plain_divergence(output, written, head):
    """By PyTorch in fp64: the teacher's distribution over five tokens, at the temperature, against the student's."""
    spec = from_files(output, written[5])
    spec = spec.model_copy(update={"kernels": spec.kernels.model_copy(update={"enabled": head == "fused"})})
    data = data_of(spec)
    batch = collate([data.train[number] for number in range(4)])
    losses, gradients = [], []
    for exact in (False, True):
        model = AutoModelForCausalLM.from_pretrained(output / "pretrained", dtype=torch.float64 if exact else None)
        if exact:
            logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
            tokens, known = (batch[name][:, 1:].flatten(0, 1) for name in ("top_token_ids", "top_log_probs"))
            log_q = (known.double() / 2).log_softmax(-1)
            log_p = log_softmax(logits / 2, -1).gather(1, tokens)
            divergence = (log_q.exp() * (log_q - log_p)).sum(-1)[labels != -100].mean()
            parts = [0.3 * cross_entropy(logits, labels) + 0.7 * 4 * divergence, divergence]
        else:
            objective = build_objective(spec, fused=has_fused_loss(patch(model, spec.kernels)))
            share = objective.micro_batch_loss(model, batch, objective.count(batch))
            parts = [share.loss, share.metrics["forward_kl"]]
        parts[0].backward()
        losses.append([float(part.detach()) for part in parts])
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for ours, true in zip(*gradients, strict=True):
        assert (ours - true).norm() <= 1e-4 * true.norm()


def test_a_run_learns_and_continues_with_the_same_bits(output, written):
    spec = from_files(output, written[5], name="resumed")
    assert train_spec(spec).status == "complete"
    train_spec(spec, 1)
    points = [json.loads(line) for line in RunFolder.of(spec).metrics.read_text().splitlines()]
    first, again = (
        [(point["loss"], point["grad_norm"], point["metrics"]) for point in points if point["attempt"] == attempt]
        for attempt in (0, 1)
    )
    assert len(first) == STEPS and again == first[1:]
    assert first[-1][0] < first[0][0] and first[-1][2]["forward_kl"] < first[0][2]["forward_kl"]


def test_kernels_of_such_a_run_are_planned(output, written):
    assert plan_kernels(from_files(output, written[5])).specializations


def test_a_second_start_writes_what_is_missing(output, asked, written, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "_FILE_BYTES", 96 * 5 * teacher._PLACE_BYTES * 2)
    teacher.write_teacher_data(asked, tmp_path, 5)
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) == 4
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    files[1].unlink()
    teacher.write_teacher_data(asked, tmp_path, 5)
    assert [file.read_bytes() for file in files] == [content for content, _ in before.values()]
    assert [file for file in files if file.stat().st_mtime_ns != before[file][1]] == [files[1]]
    # Processes of a job share the files.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    teacher.write_teacher_data(asked, tmp_path / "second", 5)
    assert {file.name for file in (tmp_path / "second").glob("*.parquet")} == {
        file.name for file in files if int(file.name.split("-")[1]) % 2
    }
    with pytest.raises(ValueError, match=r"second has files of top_k 5, not 4; give another folder"):
        teacher.write_teacher_data(asked, tmp_path / "second", 4)


def test_the_command_says_what_is_wrong(output, asked, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps(asked.model_dump(mode="json") | {"objective": {"type": "sft"}}))
    command = [sys.executable, "-m", "tasks.runtime.teacher", str(tmp_path / "spec.json"), str(tmp_path / "found")]
    done = fork_server.run(command, env=fork_server.clean_environment(), capture_output=True, text=True)
    assert done.returncode == BAD_INPUT.exit_code
    assert "objective.teacher: missing; set objective.type to 'distill' and name the teacher" in done.stderr
    assert not (tmp_path / "found").exists()
