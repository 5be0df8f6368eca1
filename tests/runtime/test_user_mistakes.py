"""Fifty mistakes, and what a person reads of each: one clear message and exit code 2, before the model is loaded.

Each goes in where a person puts it, a file for `python -m tasks.runtime`. What is tested of a part by itself (lines of
YAML, columns, chat templates, torn files) is in that part's tests; here is what comes out at the end.
"""

import json
import os
import re
import shutil
import sys

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from strata_platform.outcomes import BAD_INPUT
from strata_platform.spec import RunSpec
from tasks.runtime import __main__ as entry
from tasks.runtime import checkpoint
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training import train as running
from tests.runtime.helpers.train_only import train_spec

ROW = {"prompt": "2 + 2 = ", "completion": "4"}
TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
PAIR = {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}

# What the spec's file says, and what is read of it.
SPECS = {
    "empty": ("", r"my\.yaml has 1 problem:\n  empty; {} is the spec with all its defaults"),
    "text": ("finetune", r"not a mapping of fields to values; given: 'finetune'"),
    "tabs": ("model:\n\tname: x", r"line 2: not valid YAML, column 1"),
    "not-closed": ("data: {source: [a.jsonl", r"line 1: not valid YAML"),
    "twice": ("name: a\nname: b", r"name \(line 2\): given twice, first in line 1; keep one"),
    "unknown-section": ("trainig: {steps: 1}", r"trainig \(line 1\): no such field; did you mean 'training'\?"),
    "unknown-field": ("training:\n  step: 1", r"training\.step \(line 2\): no such field; did you mean 'steps'\?"),
    "template": ("data: {chat_template: chatlm}", r"data\.chat_template \(line 1\): neither .*mean 'chatml'\?"),
    "elsewhere": ("lr: 1e-4", r"lr \(line 1\): no such field; did you mean 'optimizer\.lr'\?"),
    "other-type": ("parallel: {type: ddp, cpu_offload: true}", r"parallel\.cpu_offload.*a field of type 'fsdp' alone"),
    "unknown-type": ("objective: {type: dpo2}", r"objective\.type.*given: 'dpo2'; did you mean 'dpo'\?.*'pretrain', "),
    "no-type": ("objective: {beta: 0.1}", r"objective\.type.*required; beta is a field of 'dpo'.*allowed"),
    "empty-section": ("data:", r"data \(line 1\): empty; leave it out for its defaults"),
    "text-for-number": (
        "training: {steps: many}",
        r"training\.steps.*not a number; given: 'many'.*allowed: a whole number from 1 to 1000000000",
    ),
    "true-for-number": ("training: {steps: true}", r"training\.steps.*not a number; given: true"),
    "sexagesimal": ("training: {steps: 1:30}", r"training\.steps \(line 1\): not a number: YAML 1.1 reads it as 90"),
    "too-many-steps": ("training: {steps: 1000000000000000000}", r"training\.steps.*allowed: .* to 1000000000"),
    "too-high-a-rank": (
        "adapter: {type: lora, r: 1000000000000}\nmodel: {name: m}",
        r"adapter\.r.*allowed: a whole number from 1 to 16384",
    ),
    "null-character": ('output: "a\\0b"', r"output.*has a null character"),
    "line-break": ('output: "a\\nb"', r"output.*has a line break in it"),
    "half-a-step": ("training: {steps: 8.5}", r"training\.steps.*given: 8\.5"),
    "none-of-it": (
        "training: {micro_batch_size: 0}",
        r"training\.micro_batch_size.*given: 0; allowed: a whole number from 1 to 65536",
    ),
    "yes": (
        "data: {packing: 'yes'}",
        r"data\.packing.*not true or false: YAML 1.1 reads it as true.*write true; given: 'yes'",
    ),
    "name": ("name: My Run", r"name.*given: 'My Run'; allowed: up to 53 lower-case letters, digits and inner dashes"),
    "several": ("name: My Run\nseed: -1", r"my\.yaml has 2 problems:"),
    "steps-and-epochs": ("training: {steps: 1, epochs: 1}", r"training\.steps.*contradicts training\.epochs; give one"),
    "two-processes": ("topology: {nproc_per_node: 2}", r"parallel\.type: 'single' contradicts.*set parallel\.type to"),
    "gpus": (
        "topology: {nproc_per_node: 4}\nparallel: {type: ddp}\nresources: {gpu: 2}",
        r"resources\.gpu \(line 3\): 2 is less than topology\.nproc_per_node 4",
    ),
    "adapter-from-scratch": ("adapter: {type: lora}", r"adapter\.type.*adapts a pretrained model.*set model\.name"),
    "dpo-without-pairs": (
        "objective: {type: dpo}",
        r"data\.source: 'python-docs' has no pairs of answers",
    ),
    "reference": (
        "objective: {type: dpo, reference: adapter}\ndata: {source: a.jsonl}",
        r"objective\.reference \(line 1\): 'adapter' disables the adapter.*set adapter\.type to 'lora'",
    ),
}

# Rows of the file rows.jsonl, or its text, with fields of the spec; and what is read of them.
DATA = {
    "no-file": (None, {}, r"data\.source: there is no such file on this machine; given: '.*rows\.jsonl'"),
    "no-rows": ([], {}, r"data\.source '.*rows\.jsonl' has no rows"),
    "not-json": ('{"prompt": "a", "completion": "b"}\n{"a": \n', {},
                 r"rows\.jsonl line 2: not valid JSON: .*; correct it, or set data\.invalid to 'skip'"),
    "not-utf-8": (b'{"prompt": "\xff"}\n', {},
                  r"cannot read .*rows\.jsonl: line 1 is not UTF-8 \(invalid start byte at byte 12\)"),
    "no-objects": ([1, 2], {}, r"none of the first 2 rows can be read; .*rows\.jsonl line 1: an object with col"),
    "other-columns": ([{"frage": "a", "answer": "b"}], {}, r"recognizes none of the columns .frage., .answer.;"),
    "near-column": ([ROW], {"data": {"format": "text", "text_column": "promt"}, "objective": {"type": "pretrain"}},
                    r"needs the column 'promt'.*did you mean 'prompt'"),
    "texts-for-sft": ([{"text": "a"}], {}, r"objective\.type 'sft' needs prompts and completions.*set objective"),
    "number-for-text": ([ROW, {**ROW, "completion": 4}], {}, r"rows\.jsonl line 2: column 'completion' holds int 4"),
    "missing-value": ([ROW, {"prompt": "a"}], {}, r"rows\.jsonl line 2: there is no column 'completion', only"),
    "role": ([{"messages": [{"content": "a"}]}], {}, r"line 1: message 1 has no role"),
    "no-messages": ([{"messages": []}], {}, r"line 1: column 'messages' holds no message"),
    "empty-answers": ([{**ROW, "completion": " "}], {}, r"nothing is left to train on; 1 samples read = 0 used"),
    "all-too-long": ([{**ROW, "prompt": "very " * 500}], {}, r"nothing is left to train on.*1 skipped \(lo"),
    "one-too-long": ([ROW, {**ROW, "prompt": "a b " * 500}], {"data": {"overlong": "error"}},
                     r"line 2: \d+ tokens, but data\.sequence_length is 64; raise it, or set data\.overlong to 'skip'"),
    "one-batch": ([ROW, ROW], {"training": {"micro_batch_size": 64}}, r"fewer than one batch: training\.micro"),
    "pairs": ([{"prompt": "a", "chosen": "b"}], {"objective": {"type": "dpo"}}, r"no column 'rejected', only"),
    "pairs-apart": (
        [{"chosen": TALK, "rejected": [{**TALK[0], "content": "3?"}, TALK[1]]}], {"objective": {"type": "dpo"}},
        r"line 1: 'chosen' and 'rejected' differ in message 1; they may differ only in the last message",
    ),
    "no-model": ([ROW], {"model": {"name": "no/such-model"}}, r"model\.name 'no/such-model' cannot be read"),
}  # fmt: skip


@pytest.fixture
def read(tmp_path, monkeypatch, capsys):
    """What is read of a spec, its values or its text: on standard error, from a process that ends with code 2."""

    def run(spec):
        file = tmp_path / "my.yaml"
        file.write_text(spec if isinstance(spec, str) else yaml.safe_dump(spec))
        monkeypatch.setattr(sys, "argv", ["strata", str(file)])
        assert entry.main() == BAD_INPUT.exit_code
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


@pytest.fixture
def read_before_loading(read, monkeypatch):
    """The same, before the model is loaded."""

    def refuse(*arguments, **options):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(running, "build_model", refuse)
    monkeypatch.setattr(running, "build_saved_model", refuse)
    return read


@pytest.mark.parametrize(("spec", "message"), SPECS.values(), ids=SPECS)
def test_a_mistake_in_the_spec(read_before_loading, spec, message):
    said = read_before_loading(spec)
    assert re.search(message, said, re.DOTALL), said


@pytest.mark.parametrize(
    ("attention", "package"), [("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")]
)
def test_attention_whose_package_is_missing(read, monkeypatch, attention, package):
    monkeypatch.setattr("tasks.runtime.parallel.find_spec", lambda name: None)
    monkeypatch.setattr("tasks.runtime.parallel.is_kernels_available", lambda: False)
    # It is found before data is prepared.
    monkeypatch.setattr("tasks.runtime.data.preparation.pipeline.begin", None)
    said = read(f"model: {{attention: {attention}}}")
    assert f"model.attention '{attention}' needs the package {package}, which is not installed; " in said
    assert "set model.attention to 'auto'" in said


@pytest.mark.parametrize(("rows", "fields", "message"), DATA.values(), ids=DATA)
def test_a_mistake_in_the_data(read_before_loading, tmp_path, rows, fields, message):
    file = tmp_path / "rows.jsonl"
    if isinstance(rows, list):
        rows = "".join(json.dumps(row) + "\n" for row in rows)
    if rows is not None:
        file.write_bytes(rows.encode() if isinstance(rows, str) else rows)
    data = {"source": str(file), "sequence_length": 64, "validation_fraction": 0.0, **fields.pop("data", {})}
    said = read_before_loading({"output": str(tmp_path / "out"), "data": data, **fields})
    assert re.search(message, said), said
    assert re.search("^error: ", said, re.MULTILINE)


def tear(run):
    file = run.checkpoints / "checkpoint-1" / "index.json"
    file.write_bytes(file.read_bytes()[:-1])


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def newer_format(run):
    checkpoint.update_metadata(run.checkpoints / "checkpoint-1", {"format": 99})


def pickled(run):
    """Somebody puts a pickle where weights are: nothing reads it."""
    shutil.rmtree(run.checkpoints / "checkpoint-1")
    (run.checkpoints / "checkpoint-1").mkdir()
    (run.checkpoints / "checkpoint-1" / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def other_spec(run):
    run.spec.write_text(run.spec.read_text().replace("seed: 0", "seed: 7"))


def broken_spec(run):
    run.spec.write_text(run.spec.read_text().replace("seed: 0", "seed: none of yours"))


def broken_record(run):
    run.record.write_text('{"status": "comp')


def file_for_folder(run):
    shutil.rmtree(run.root)
    run.root.write_text("")


# What happened to the run's folder since, what changes in the spec, and what is read.
RUNS = {
    "other-spec": (other_spec, {}, r"holds a run of another spec; different: seed was 7, is 0\. Choose another name"),
    "more-rows": (None, {"training": {"steps": 1, "micro_batch_size": 4}}, r"different: rows per step .* was 2, is 4"),
    "broken-spec": (broken_spec, {}, r"spec\.yaml has 1 problem:\n  seed \(line \d+\)"),
    "never": (
        None,
        {"checkpoint": {"resume": "never"}},
        r"checkpoint\.resume is 'never' but .* has checkpoints",
    ),
    "newer-format": (
        newer_format,
        {},
        r"has checkpoint format 99, but this version of Strata reads format \d+; finish that run",
    ),
    "broken-record": (broken_record, {}, r"record\.json cannot be read: .*; delete it"),
    "file-for-folder": (file_for_folder, {}, r"output: the run folder .*finetune cannot be created: File exists"),
}


def without_weights(model):
    (model / "model.safetensors").unlink()


def torn_weights(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled_weights(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def other_architecture(model):
    edit(model / "config.json", lambda config: {**config, "model_type": "unheard-of"})


def config_with(**changes):
    return lambda model: edit(model / "config.json", lambda config: {**config, **changes})


def config_of(text):
    return lambda model: (model / "config.json").write_text(text)


def pipe_for(name):
    def happened(model):
        (model / name).unlink()
        os.mkfifo(model / name)

    return happened


def without_head(model):
    """As of a base model that was saved without the head of a language model."""
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def few_embeddings(model):
    small(LlamaConfig, vocab_size=64).save_pretrained(model)


def padding_beyond(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    small(LlamaConfig, vocab_size=len(tokenizer)).save_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<more>"})
    tokenizer.save_pretrained(model)


# What is wrong with the model's folder, and what is read.
MODELS = {
    "no-weights": (
        without_weights,
        r"model\.name '.*model' cannot be read: .*no file named model\.safetensors.*set model\.init to 'random'$",
    ),
    "torn-weights": (
        torn_weights,
        r"model\.name '.*model' cannot be read: .*; give the name of a model on the Hub, or a",
    ),
    "pickled-weights": (
        pickled_weights,
        r"model\.name '.*model' cannot be read: .*no file named model\.safetensors.* and weights as safetensors$",
    ),
    "architecture": (other_architecture, r"model\.name '.*model'.* cannot .*unheard-of"),
    "few-embeddings": (
        few_embeddings,
        r"model\.tokenizer has \d+ tokens but model\.name .* embeds 64; use the model's own",
    ),
    "padding-beyond": (
        padding_beyond,
        r"data\.source: its rows have the token '<more>', number \d+, but model\.name .* embeds \d+; remove it from",
    ),
    "more-layers": (
        config_with(num_hidden_layers=3),
        r"model\.name '.*model': its weights are not those of the model that its config\.json describes: 18 tensors "
        r"are missing \(model\.layers\.1\.input_layernorm\.weight, .*, \.\.\.\)\. Correct config\.json",
    ),
    "no-layers": (config_with(num_hidden_layers=0), r"num_hidden_layers is 0, not a whole number from 1 to 10000"),
    "no-head": (without_head, r": 1 tensors are missing \(lm_head\.weight\)\. Correct"),
    "other-shapes": (
        config_with(vocab_size=4100),
        r"2 tensors have other shapes \(lm_head.weight \[4096, 8\], not \[4100",
    ),
    "negative-size": (config_with(hidden_size=-1), r"config\.json: hidden_size is -1, not a whole number from 1 to"),
    "size-as-text": (config_with(hidden_size="8"), r"config\.json: hidden_size is \"8\", not a whole number"),
    "absurd-size": (config_with(vocab_size=10**18), r"vocab_size is 10{18}, not a whole number from 1 to 100000000"),
    "heads": (config_with(num_attention_heads=3), r"hidden size \(8\) is not a multiple of .* attention heads \(3\)"),
    "groups": (
        config_with(num_attention_heads=4, num_key_value_heads=3),
        r"num_key_value_heads 3 does not divide num_attention_heads 4",
    ),
    "activation": (config_with(hidden_act="sillu"), r"model\.name '.*model' cannot be read: KeyError: 'sillu'"),
    "config-list": (config_of("[1]"), r"config\.json holds a list, not an object with the model's settings"),
    "config-empty": (config_of(""), r"config\.json is not valid JSON: .*; fetch it again"),
    "config-nothing": (config_of("{}"), r"model\.name '.*model'.* cannot .*"),
    "config-deep": (config_of("[" * 10**5), r"config\.json is not valid JSON: .*recursion"),
    "config-pipe": (pipe_for("config.json"), r"model\.name.*a named pipe, not a regular file"),
    "weights-pipe": (pipe_for("model.safetensors"), r"model\.name.*a named pipe, not a regular file"),
}


def small(config, **changes):
    return LlamaForCausalLM(
        config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, **changes)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model as others leave it."""
    folder = tmp_path_factory.mktemp("pretrained")
    small(LlamaConfig, vocab_size=4096).save_pretrained(folder)
    save_tokenizer(train_tokenizer(["2 + 2 = 4"]), folder)
    return folder


@pytest.mark.parametrize(("happened", "message"), MODELS.values(), ids=MODELS)
def test_a_mistake_in_the_model(read, model, tmp_path, happened, message):
    shutil.copytree(model, tmp_path / "model")
    happened(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 8)
    said = read(values(tmp_path, model={"name": str(tmp_path / "model")}))
    assert re.search(message, said), said
    assert said.rstrip().splitlines()[-1].startswith("error: ")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one step, complete."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 8)
    assert train_spec(RunSpec.model_validate(values(folder))).status == "complete"
    return folder


def values(folder, **changes):
    return {
        "output": str(folder / "out"),
        "data": {"source": str(folder / "rows.jsonl"), "sequence_length": 32, "packing": False},
        "training": {"steps": 1, "micro_batch_size": 2},
        "tracking": {"report_to": []},
        **changes,
    }


@pytest.mark.parametrize(("happened", "changes", "message"), RUNS.values(), ids=RUNS)
def test_a_mistake_in_the_run_folder(read_before_loading, finished, tmp_path, happened, changes, message):
    shutil.copytree(finished / "out", tmp_path / "out")
    if happened:
        happened(RunFolder(tmp_path / "out" / "finetune"))
    said = read_before_loading({**values(finished, **changes), "output": str(tmp_path / "out")})
    assert re.search(message, said), said


@pytest.mark.parametrize(
    ("happened", "message"),
    [(tear, "is not used: index.json has"), (pickled, "is not used: its save did not finish")],
)
def test_a_checkpoint_that_is_passed_over_is_warned_of(finished, tmp_path, caplog, happened, message):
    shutil.copytree(finished / "out", tmp_path / "out")
    happened(RunFolder(tmp_path / "out" / "finetune"))
    assert checkpoint.latest(tmp_path / "out" / "finetune" / "checkpoints") is None
    assert message in caplog.text
