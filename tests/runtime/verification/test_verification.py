"""Each check of `strata verify` passes on what is right, and fails on a planted error of its own kind."""

import json
import os
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, RowDataset
from tasks.runtime.data.dataset import IGNORE_INDEX
from tasks.runtime.export import export_model
from tasks.runtime.models import build
from tasks.runtime.models.activations import activation_checkpointing
from tasks.runtime.objectives import teacher_model, token_losses, training_step
from tasks.runtime.objectives.dpo import Dpo
from tasks.runtime.parallel import fsdp
from tasks.runtime.training import train
from tasks.runtime.training.job import Job
from tasks.runtime.verification import __main__ as command
from tasks.runtime.verification import subject as subjects
from tasks.runtime.verification import table, weights, worker
from tasks.runtime.verification.finding import Finding, Measured
from tasks.runtime.verification.report import Report
from tests.runtime.helpers.narrow_preset import narrow
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import run_forked

CHATS = [
    {
        "messages": [
            {"role": "system", "content": "You add numbers."},
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}."},
            {"role": "user", "content": "Are you sure?"},
            {"role": "assistant", "content": f"Yes, {n} twice is {2 * n}." if n % 2 else "Yes."},
        ]
    }
    for n in range(40)
]
# Python 3.12 warns of every fork beside threads, of which pytest and torch have some that nobody waits for.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
SMALL = {"data": {"sequence_length": 64, "max_samples": 60}, "training": {"micro_batch_size": 2}}


START = subjects.Subject.start


class Forked:
    """What `Subject.start` returns, of a fork of this process, which has imported all and has the planted errors."""

    def __init__(self, request, processes):
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                do = partial(worker.do, worker.Request(**json.loads(request.read_text())))
                code = run_forked(processes, do) if processes > 1 else do() or 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)

    def communicate(self):
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return "", None

    def kill(self):
        assert self.returncode is not None, "all are waited for"


@pytest.fixture(scope="module", autouse=True)
def surroundings():
    with ExitStack() as held:
        held.enter_context(narrow())
        patch = held.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(subjects.Subject, "start", lambda self, request, processes: Forked(request, processes))
        yield


def made(folder, layers=0, **spec):
    spec = RunSpec.model_validate({**SMALL, **spec})
    folder.mkdir(exist_ok=True)
    return subjects.make_subject(spec, folder, layers=layers)


def check(subject, name):
    """The finding of one check, on a subject that has nothing kept of others."""
    (found,) = table.examine(replace(subject, kept={}), [name])
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("plain") / "subject")


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    model = {"name": str(save_pretrained(folder / "model"))}
    return made(folder / "subject", model=model, adapter={"type": "lora"})


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return made(folder / "subject", data={"source": str(folder / "chats.jsonl"), "sequence_length": 256})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    data = {"source": write_pairs(folder / "pairs.jsonl"), "sequence_length": 64}
    model = {"name": str(save_pretrained(folder / "model"))}
    return made(folder / "subject", model=model, data=data, objective={"type": "dpo"})


def test_all_checks_that_apply_pass(plain):
    found = {finding.name: finding for finding in table.examine(replace(plain, kept={}))}
    assert {name: finding.detail for name, finding in found.items() if finding.status == "fail"} == {}
    applying = [name for name, finding in found.items() if finding.status == "pass"]
    assert applying == ["mask", "packing", "kernels", "recompute", "batching", "updates", "buffers", "export", "resume"]
    assert "2 processes under ddp" in found["batching"].detail
    assert found["kernels"].figure < 2 and found["resume"].figure == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_models_from_a_folder_pass_on_chats_and_are_cut(kind, chat, tmp_path):
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    tokenizer = chat.data.tokenizer()
    size |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[kind](
        {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**size)
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    subject = made(
        tmp_path / "subject", layers=3, model={"name": str(tmp_path / "model")}, data=chat.asked.data.model_dump()
    )
    assert subject.layers == (3, 5)
    kept = build.build_model(subject.spec.model, subject.spec.seed).get_parameter("model.layers.2.mlp.up_proj.weight")
    assert torch.equal(kept, model.get_parameter("model.layers.2.mlp.up_proj.weight"))
    names = ["mask", "packing", "kernels", "recompute", "updates", "buffers"]
    found = list(table.examine(subject, names))
    assert {finding.name: finding.status for finding in found} == dict.fromkeys(names, "pass"), found


def test_a_model_from_scratch_is_cut_without_weights(chat, tmp_path):
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
    tokenizer = chat.data.tokenizer()
    LlamaConfig(**size, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = {"name": str(tmp_path / "model"), "init": "random"}
    subject = made(tmp_path / "subject", layers=3, model=model, data=chat.asked.data.model_dump())
    assert subject.layers == (3, 5) and not list(tmp_path.rglob("model*.safetensors"))
    (found,) = table.examine(subject, ["updates"])
    assert found.status == "pass"


def test_chats_are_shown_with_what_is_learned(chat):
    found = check(chat, "mask")
    assert found.status == "pass", found.detail
    learned = [text for text, is_learned in found.shown if is_learned]
    assert all(text.endswith("<|im_end|>") for text in learned) and learned[0].startswith("It is ")
    assert "⟦" in found.line(color=False) and "\x1b[30;42m" in found.line(color=True)


def with_rows(subject, change):
    """The subject whose rows went through `change`."""

    class Changed(RowDataset):
        def __getitem__(self, index):
            return change(super().__getitem__(index))

    kind = type("Changed", (PreparedData,), {"rows_type": Changed})
    return replace(subject, data=kind.load(subject.data.folder))


def users_learned(row):
    """What comes before a turn is learned, too, up to where the document begins."""
    before = row["labels"].roll(-20) != IGNORE_INDEX
    learned = (row["labels"] != IGNORE_INDEX) | before & (row["position_ids"] > 0)
    return {**row, "labels": torch.where(learned, row["input_ids"], IGNORE_INDEX)}


def without_ends(row):
    ends = row["labels"].roll(-1) == IGNORE_INDEX
    return {**row, "labels": row["labels"].masked_fill(ends, IGNORE_INDEX)}


def shifted(row):
    learned = (row["labels"] != IGNORE_INDEX).roll(-1)
    return {**row, "labels": torch.where(learned, row["input_ids"], IGNORE_INDEX)}


def some_turns(row):
    """Without the first turn of every document."""
    learned = row["labels"] != IGNORE_INDEX
    begins = learned & ~learned.roll(1)
    first = begins.cumsum(0) == 1
    return {**row, "labels": row["labels"].masked_fill(first, IGNORE_INDEX)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (users_learned, "targets without an end token: …"),
        (without_ends, "targets without an end token"),
        (shifted, ""),
        (some_turns, "the source has 80 turns"),
    ],
)
def test_a_wrong_mask_is_found(chat, change, said):
    found = check(with_rows(chat, change), "mask")
    assert found.status == "fail" and said in found.detail


def test_a_doubled_beginning_is_found(plain):
    begin = plain.data.tokenizer().bos_token_id
    twice = with_rows(
        plain, lambda row: {**row, "input_ids": row["input_ids"].masked_fill(row["position_ids"] == 1, begin)}
    )
    found = check(twice, "mask")
    assert found.status == "fail" and "'<|bos|>' twice" in found.detail


def test_a_leak_between_documents_is_found(plain, monkeypatch):
    inputs = token_losses.model_inputs
    without = ("position_ids",)
    monkeypatch.setattr(
        token_losses, "model_inputs", lambda batch: {k: v for k, v in inputs(batch).items() if k not in without}
    )
    found = check(plain, "packing")
    assert found.status == "fail" and found.figure > 0


def test_a_wrong_gradient_of_a_kernel_is_found(plain, monkeypatch):
    original = build.patch_model

    def patch_model(model, **options):
        report = original(model, **options)
        model.model.layers[1].mlp.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 1.001,))
        return report

    monkeypatch.setattr(build, "patch_model", patch_model)
    found = check(plain, "kernels")
    assert found.status == "fail" and found.figure > 10
    assert check(plain, "recompute").status == "fail", "the kernels are in it, too"


def test_a_layer_that_is_recomputed_otherwise_is_found(plain, monkeypatch):
    original = activation_checkpointing.checkpoint

    def checkpoint(forward, *args, **options):
        calls = []

        def other(hidden, *inner, **more):
            calls.append(1)
            return forward(hidden * (1.0 if len(calls) == 1 else 1.01), *inner, **more)

        return original(other, *args, **options)

    monkeypatch.setattr(activation_checkpointing, "checkpoint", checkpoint)
    assert check(plain, "kernels").status == "pass"
    found = check(plain, "recompute")
    assert found.status == "fail" and "gradient_checkpointing full" in found.detail


@pytest.mark.parametrize(("scale", "status"), [(1.0, "pass"), (1.001, "fail")])
def test_compiled_layers_are_compared(plain, monkeypatch, scale, status):
    # The compiler itself takes half a minute; what it makes of a layer is what the check looks at.
    monkeypatch.setattr(torch, "compile", lambda forward, **options: lambda *a, **k: forward(*a, **k) * scale)
    asked = replace(plain, spec=subjects.changed(plain.spec, {"training": {"compile": True}}))
    assert check(plain, "compile").status == "n/a"
    assert check(asked, "compile").status == status


def test_a_mean_over_micro_batches_is_found(plain, monkeypatch):
    original = Job.loss

    def loss(self, model, batch, items):
        mean = original(self, model, batch, items) * items / max(1, int((batch["labels"] != IGNORE_INDEX).sum()))
        return mean / self.spec.training.gradient_accumulation_steps

    monkeypatch.setattr(Job, "loss", loss)
    found = check(plain, "batching")
    assert found.status == "fail" and found.figure > 0.01


def test_processes_that_count_for_themselves_are_found(plain, monkeypatch):
    original = torch.distributed.all_reduce

    def all_reduce(tensor, *args, **options):
        # The counts of a step are the one message of two whole numbers.
        if (tensor.dtype, tensor.numel()) != (torch.int64, 2):
            original(tensor, *args, **options)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    found = check(plain, "batching")
    assert found.status == "fail" and "2 processes under ddp" in found.detail.rpartition("worst")[2]


def test_processes_are_started_by_torch_elastic(lora, monkeypatch):
    monkeypatch.setattr(subjects.Subject, "start", START)
    found = check(lora, "batching")
    assert found.status == "pass", found.detail


@pytest.mark.parametrize("place", ["build_model", "materialize"])
def test_buffers_in_bfloat16_are_found(plain, monkeypatch, place):
    original = getattr(weights, place)

    def rounded(*args, **options):
        model = original(*args, **options)
        rotary = (model or args[0]).model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16)
        return model

    monkeypatch.setattr(weights, place, rounded)
    found = check(plain, "buffers")
    assert found.status == "fail" and "bfloat16, not float32" in found.detail


def test_buffers_that_were_rounded_once_are_found(plain, monkeypatch):
    original = training_step.patch_for_training

    def rounded(model, *sections):
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16).float()
        return original(model, *sections)

    monkeypatch.setattr(training_step, "patch_for_training", rounded)
    found = check(plain, "buffers")
    assert found.status == "fail" and "in the job: values differ" in found.detail


def test_the_specs_strategy_is_what_two_processes_run(plain, monkeypatch):
    split = {"parallel": {"type": "fsdp"}, "topology": {"nproc_per_node": 2}}
    subject = replace(plain, asked=subjects.changed(plain.asked, split))
    found = check(subject, "batching")
    assert found.status == "pass" and "2 processes under fsdp" in found.detail, found.detail
    assert "in 8 ways" in check(subject, "buffers").detail
    original = fsdp.materialize

    def rounded(model, *args, **options):
        original(model, *args, **options)
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to(torch.bfloat16)

    monkeypatch.setattr(fsdp, "materialize", rounded)
    found = check(subject, "buffers")
    assert found.status == "fail" and "rank 0 under fsdp: bfloat16, not float32" in found.detail


@pytest.mark.parametrize("adapter", [{"type": "none"}, {"type": "lora"}])
def test_dpos_reference_is_the_base_model(pairs, monkeypatch, adapter):
    subject = replace(pairs, spec=subjects.changed(pairs.spec, {"adapter": adapter}))
    found = check(subject, "reference")
    assert found.status == "pass", found.detail
    original = Dpo.log_probs
    monkeypatch.setattr(Dpo, "log_probs", lambda self, *args: original(self, *args) * 1.01)
    assert check(subject, "reference").status == "fail"


def test_a_stale_reference_is_found(pairs, monkeypatch):
    original = Dpo.prepare

    def prepare(self, context):
        data = original(self, context)
        stale = data.reference_log_probs["train"]
        return data.with_reference_log_probs(train=stale._replace(log_probs=stale.log_probs.roll(1)))

    monkeypatch.setattr(Dpo, "prepare", prepare)
    found = check(pairs, "reference")
    assert found.status == "fail" and "worst: the reference's" in found.detail


def test_a_wrong_teacher_is_found(tmp_path, monkeypatch):
    folder = save_pretrained(tmp_path / "teacher")
    subject = made(
        tmp_path / "subject",
        model={"name": str(folder)},
        objective={"type": "distill", "teacher": str(folder)},
    )
    found = check(subject, "reference")
    assert found.status == "pass", found.detail
    assert check(subject, "kernels").status == "pass"
    original = teacher_model.build_model

    def other(settings, seed):
        model = original(settings, seed)
        model.model.norm.weight.data *= 1.01
        return model

    monkeypatch.setattr(teacher_model, "build_model", other)
    assert check(subject, "reference").status == "fail"


@pytest.mark.parametrize(
    ("precision", "status"), [("fp32_master", "pass"), ("stochastic_rounding", "pass"), ("nearest", "fail")]
)
def test_lost_updates_are_found(plain, precision, status):
    optimizer = {"lr": 1e-5, "precision": precision}
    asked = subjects.changed(plain.asked, {"model": {"dtype": "bfloat16"}, "optimizer": optimizer})
    spec = subjects.changed(plain.spec, {"optimizer": optimizer})
    found = check(replace(plain, asked=asked, spec=spec), "updates")
    assert found.status == status, found.detail
    assert found.figure > 0.5 if status == "fail" else found.figure < 0.05


def test_a_frozen_tensor_that_moves_is_found(lora, monkeypatch):
    assert check(lora, "updates").status == "pass"
    original = Job.end_step

    def end_step(self, *args):
        self.unwrapped_model.get_input_embeddings().weight.data[0, 0] += 1e-3
        original(self, *args)

    monkeypatch.setattr(Job, "end_step", end_step)
    found = check(lora, "updates")
    assert found.status == "fail" and "model.embed_tokens.weight is frozen but changed" in found.detail


def test_a_tensor_without_a_gradient_is_found(plain, monkeypatch):
    original = training_step.patch_for_training

    def prepare(model, *sections):
        model.model.norm.weight.register_hook(torch.zeros_like)
        return original(model, *sections)

    monkeypatch.setattr(training_step, "patch_for_training", prepare)
    found = check(plain, "updates")
    assert found.status == "fail" and "model.norm.weight is trainable but has no gradient" in found.detail


def test_a_bad_merge_is_found(lora, monkeypatch):
    from peft.tuners.lora import Linear

    found = check(lora, "adapter")
    assert found.status == "pass", found.detail
    monkeypatch.setattr(Linear, "merge", lambda self, **options: None)
    assert check(lora, "adapter").status == "fail"


def test_an_export_that_changes_a_weight_is_found(plain, monkeypatch):
    original = weights.write_model

    def write(spec, data, collected, folder):
        original(spec, data, collected, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] += 1e-6
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(weights, "write_model", write)
    # What a run itself makes sure of, in a process of its own, and before the error.
    monkeypatch.setattr(export_model, "verify", lambda *arguments, **options: None)
    found = check(plain, "export")
    assert found.status == "fail" and "model.norm.weight differs from the checkpoint" in found.detail


def test_a_resume_that_forgets_the_optimizer_is_found(plain, monkeypatch):
    monkeypatch.setattr(train, "load_optimizer", lambda index, model, optimizer: None)
    found = check(plain, "resume")
    assert found.status == "fail" and "different: step 4" in found.detail


def test_a_run_that_begins_anew_does_not_pass_for_one_that_resumed(plain, monkeypatch):
    monkeypatch.setattr(train.checkpoint, "latest", lambda root: None)
    found = check(plain, "resume")
    assert found.status == "fail" and "not from a killed attempt and its successor" in found.detail


def test_a_check_that_raises_has_failed_and_the_others_are_done():
    def broken(subject):
        raise RuntimeError("no such thing")

    checks = [
        table.Check("broken", broken),
        table.Check("good", lambda subject: Measured(1.0, 2.0, "fine")),
        table.Check("nan", lambda subject: Measured(float("nan"), 2.0, "of nothing")),
    ]
    found = list(table.examine(None, checks=checks))
    assert [finding.status for finding in found] == ["fail", "pass", "fail"]
    assert "RuntimeError: no such thing" in found[0].detail
    assert found[2].to_dict()["figure"] is None


def test_a_report_passes_when_something_applies_and_nothing_fails():
    line = partial(Finding, seconds=0.0, detail="")
    rows = [["pass", "n/a"], ["n/a"], ["pass", "fail"]]
    reports = [Report("run", "", [line(f"{n}", status) for n, status in enumerate(row)]) for row in rows]
    assert [report.passed for report in reports] == [True, False, False]
    assert reports[2].summary.startswith("NOT verified: 1 pass, 1 fail, 0 n/a")


def test_the_command_prints_json_and_exits_by_the_result(tmp_path, monkeypatch, capsys):
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(SMALL))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["verification", *arguments])
        return command.main(), capsys.readouterr()

    code, printed = run(str(file), "--json", "--only", "mask", "compile")
    report = json.loads(printed.out)
    assert code == 0 and report["passed"] and [c["status"] for c in report["checks"]] == ["pass", "n/a"]
    assert printed.err.startswith("verify finetune: tiny-llama")
    code, printed = run(str(file), "--only", "masks")
    assert code == 2 and "there is no such check" in printed.err
    file.write_text("model: {name: /nowhere}")
    code, printed = run(str(file), "--json")
    assert code == 2 and "/nowhere" in json.loads(printed.out)["error"]
    monkeypatch.setattr(table, "CHECKS", [table.Check("no", lambda subject: Measured(1.0, 0.0, "wrong"))])
    monkeypatch.setattr(table.examine, "__defaults__", ((), table.CHECKS))
    file.write_text(json.dumps(SMALL))
    code, printed = run(str(file))
    assert code == 1 and printed.out.splitlines()[-1].startswith("NOT verified")


def test_names_are_those_of_the_documentation():
    text = (Path(__file__).parents[3] / "docs" / "verify.md").read_text(encoding="utf-8")
    assert [name for name in table.names() if f"| `{name}` |" not in text] == []
