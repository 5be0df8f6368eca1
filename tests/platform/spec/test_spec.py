import pickle
import re
from types import MappingProxyType

import pytest

from strata_platform.errors import SpecError
from strata_platform.redact import redacted
from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.fields import Section
from strata_platform.spec.sections.parallel import Ddp, Single
from strata_platform.spec.sections.training import Optimizer

SPEC_FIELDS = {"data", "fingerprint", "model", "objective", "revision", "seed", "tokenizer", "tokenizer_data",
               "validation_only", "add_special_tokens"}  # fmt: skip


def problems_of(**fields):
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate(fields)
    return {problem.path: problem for problem in caught.value.problems}


def test_default_is_a_complete_run():
    spec = RunSpec()
    assert (spec.model.name, spec.data.source, spec.objective.type) == ("tiny-llama", "python-docs", "sft")
    assert isinstance(spec.parallel, Single)
    assert spec.topology.world_size == 1


def test_the_peak_learning_rate_is_that_of_the_kind_of_model():
    assert RunSpec().peak_lr == 2e-3
    assert RunSpec(model={"name": "Qwen/Qwen3-0.6B"}).peak_lr == 2e-5
    assert RunSpec(model={"name": "Qwen/Qwen3-0.6B", "init": "random"}).peak_lr == 2e-3
    assert RunSpec(model={"name": "Qwen/Qwen3-0.6B"}, adapter={"type": "lora"}).peak_lr == 2e-4
    assert RunSpec(optimizer={"lr": 1e-4}).peak_lr == 1e-4
    for objective in ("dpo", "kto", "orpo", "simpo", "cpo"):
        data = {"source": "rows.jsonl"} | ({"packing": False} if objective == "kto" else {})
        given = {"model": {"name": "Qwen/Qwen3-0.6B"}, "objective": {"type": objective}, "data": data}
        assert RunSpec(**given).peak_lr == pytest.approx(1e-6)
        assert RunSpec(**given, adapter={"type": "lora"}).peak_lr == pytest.approx(1e-5)
    assert RunSpec(optimizer={"type": "lion"}).peak_lr == pytest.approx(2e-4)
    assert RunSpec(optimizer={"type": "adafactor"}).peak_lr == 1e-2
    # Of each weight's size in a step: at 1e-2, a pretrained model forgets what it knows.
    assert RunSpec(model={"name": "Qwen/Qwen3-0.6B"}, optimizer={"type": "adafactor"}).peak_lr == 1e-3
    adapter = {"model": {"name": "Qwen/Qwen3-0.6B"}, "adapter": {"type": "lora"}}
    # The second matrices begin at 0, and learn a thousandth of the rate at first.
    assert RunSpec(**adapter, optimizer={"type": "adafactor"}).peak_lr == 5e-2


def test_passes_are_two_unless_something_else_is_asked_for():
    assert RunSpec().epochs == 2
    assert RunSpec(training={"epochs": 0.5}).epochs == 0.5
    assert RunSpec(training={"steps": 3}).epochs is None


def test_a_spec_is_frozen_and_hashable_by_content():
    spec = RunSpec()
    with pytest.raises(ValueError, match="frozen"):
        spec.seed = 1
    assert spec.hash() == RunSpec(seed=0, optimizer={"eps": 1e-8}).hash()
    assert spec.hash() != RunSpec(seed=1).hash()
    assert len(spec.hash()) == 16


def test_the_prepared_rows_do_not_depend_on_how_they_are_read():
    read = {**STREAMED, "shuffle_window": 2, "prepared_url": "s3://bucket/rows", "cache_gib": 1}
    spec = RunSpec(data=read, training={"steps": 3})
    assert DataRecipe.from_spec(spec) == DataRecipe.from_spec(RunSpec())
    assert (spec.data.window, spec.data.cache_bytes, RunSpec().data.window) == (2, 2**30, 8)


def test_spec_and_error_survive_pickling():
    spec = RunSpec(parallel=Ddp(), topology={"nproc_per_node": 2})
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(SpecError) as caught:
        RunSpec(seed=-1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.problems, str(copy), copy.exit_code) == (caught.value.problems, str(caught.value), 2)


IN_BACKWARD = {"in_backward": True, "max_grad_norm": 0}
TWO = {"topology": {"nproc_per_node": 2}}
STREAMED = {"streaming": True, "shuffle": "window"}
STORE = {"url": "s3://bucket/kernels", "allow_unsigned": True}


@pytest.mark.parametrize(
    ("section", "field", "given", "want"),
    [
        ("training", "steps", "20", 20),
        ("training", "steps", 20.0, 20),
        ("training", "steps", "1e3", 1000),
        ("optimizer", "lr", "1e-4", 1e-4),
        ("optimizer", "lr", 1, 1.0),
        ("optimizer", "betas", [0.9, "0.99"], (0.9, 0.99)),
        ("data", "source", ["a.jsonl", "b.jsonl"], ("a.jsonl", "b.jsonl")),
        ("resources", "cpu", 4, "4"),
        ("resources", "cpu", 0.5, "0.5"),
    ],
)
def test_values_are_converted_where_nothing_is_lost(section, field, given, want):
    spec = RunSpec.model_validate({section: {field: given}})
    value = getattr(getattr(spec, section), field)
    assert value == want
    assert type(value) is type(want)


@pytest.mark.parametrize(
    ("section", "field", "given"),
    [
        ("training", "micro_batch_size", True),
        ("training", "micro_batch_size", 8.5),
        ("training", "micro_batch_size", "8.5"),
        ("training", "micro_batch_size", [8]),
        ("training", "micro_batch_size", None),
        ("training", "steps", False),
        ("optimizer", "lr", True),
        ("optimizer", "lr", float("nan")),
        ("optimizer", "lr", "fast"),
        ("data", "packing", "yes"),
        ("data", "packing", 1),
        ("data", "split", 1),
        ("data", "split", ""),
        ("data", "source", []),
        ("data", "source", [""]),
        ("data", "source", {"path": "a"}),
        ("resources", "cpu", True),
        ("resources", "memory", "8GB"),
    ],
)
def test_values_that_would_lose_something_are_refused(section, field, given):
    problems = problems_of(**{section: {field: given}})
    assert list(problems) == [f"{section}.{field}"]
    assert problems[f"{section}.{field}"].allowed


@pytest.mark.parametrize("name", ["a", "run-1", "a" * 53])
def test_names(name):
    assert RunSpec(name=name).name == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a" * 54])
def test_names_that_kubernetes_would_refuse(name):
    assert "dashes" in problems_of(name=name)["name"].allowed


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("s3://bucket/runs", "checkpoint.url .* export.url"),
        ("~/runs", "every user"),
        ("~", "every user"),
        ("", "valid"),
    ],
)
def test_runs_write_to_a_folder(output, said):
    problem = problems_of(output=output)["output"]
    assert re.search(said, problem.message) and problem.allowed == "the path of a folder"


@pytest.mark.parametrize(
    ("fields", "path", "allowed", "suggestion"),
    [
        ({"data": {"sequense_length": 8}}, "data.sequense_length", "sequence_length", "sequence_length"),
        ({"data": {"Sequence-Length": 8}}, "data.Sequence-Length", "sequence_length", "sequence_length"),
        ({"lr": 1}, "lr", "", "optimizer.lr"),
        ({"zzz": 1}, "zzz", "optimizer", None),
        ({"parallel": {"type": "dpd"}}, "parallel.type", "'single', 'ddp', 'fsdp' or 'deepspeed'", "ddp"),
        ({"parallel": {"type": 3}}, "parallel.type", "'single', 'ddp', 'fsdp' or 'deepspeed'", None),
        ({"parallel": {"bucket_cap_mb": 3}}, "parallel.type", "'single', 'ddp', 'fsdp' or 'deepspeed'", None),
        ({"parallel": {"type": "single", "bucket_cap_mb": 3}}, "parallel.bucket_cap_mb", "type", None),
        ({"parallel": 3}, "parallel", "a section with type 'single', 'ddp', 'fsdp' or 'deepspeed'", None),
        ({"adapter": {"type": "lore"}, "model": {"name": "m"}}, "adapter.type", "'none' or 'lora'", "lora"),
        ({"adapter": {"type": "none", "r": 8}}, "adapter.r", "type", None),
        ({"adapter": {"type": "lora", "alpha": 8}, "model": {"name": "m"}}, "adapter.alpha", "lora_a", "lora_alpha"),
        ({"adapter": {"type": "lora", "r": 0}, "model": {"name": "m"}}, "adapter.r", "from 1 to 16384", None),
        ({"model": 3}, "model", "name, revision", None),
        ({"optimizer": ["adamw"]}, "optimizer", "lr, betas", None),
        ({"training": None}, "training", "steps, epochs", None),
        ({"schedule": {"type": "cosin"}}, "schedule.type", "'cosine'", "cosine"),
        ({"kernels": {"exclude": ["rope", "rms"]}}, "kernels.exclude[1]", "'rms_norm'", "rms_norm"),
        ({"optimizer": {"betas": [0.9, 1]}}, "optimizer.betas[1]", "below 1", None),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas", "a list of 2", None),
        ({"optimizer": {"betas": [0.9, 0.9, 0.9]}}, "optimizer.betas", "a list of 2", None),
        ({"topology": {"nnodes": 0}}, "topology.nnodes", "from 1 to 4096", None),
    ],
)
def test_a_problem_names_its_field_and_the_way_out(fields, path, allowed, suggestion):
    problems = problems_of(**fields)
    assert list(problems) == [path]
    assert allowed in (problems[path].allowed or "")
    assert problems[path].suggestion == suggestion
    assert path in str(problems[path])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("chat_template", "qwen3", "leave it out for the tokenizer's own"),
        ("template", "llama3", "a chat template is set by data.chat_template"),
        ("split", "train[:1%]", "set max_samples"),
    ],
)
def test_templates_and_splits_that_there_are_not_are_found_before_the_run(field, value, said):
    assert said in problems_of(data={"source": "some/data", field: value})[f"data.{field}"].message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (r".*\.(q_proj", "not a regular expression: missing ), unterminated subpattern at position 4; correct it, or"),
        ("q_proj", "which this cannot match; for ends of names write [q_proj]"),
        ("q_proj,v_proj", "for ends of names write [q_proj, v_proj]"),
        (["q_proj", ".*v_proj"], "'.*v_proj' is no end of a name; write a regular expression as text"),
    ],
)
def test_targets_of_an_adapter_are_ends_of_names_or_a_regular_expression(value, said):
    lora = {"type": "lora", "target_modules": value}
    problem = problems_of(model={"name": "a/b"}, adapter=lora)["adapter.target_modules"]
    assert said in problem.message
    assert problem.allowed == "a list of text, or a regular expression"
    spec = RunSpec.model_validate({"model": {"name": "a/b"}, "adapter": lora | {"target_modules": r".*\.[qv]_proj"}})
    assert spec.adapter.target_modules == r".*\.[qv]_proj"
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_number_given_for_a_text_says_to_quote_it():
    problem = problems_of(model={"revision": 20240101})["model.revision"]
    assert problem.given == "20240101"
    assert "put it in quotes" in problem.message


def test_a_long_value_is_shortened():
    assert len(problems_of(seed="x" * 10_000)["seed"].given) == 60


@pytest.mark.parametrize(
    ("fields", "path", "other"),
    [
        ({"training": {"steps": 20, "epochs": 1}}, "training.steps", "training.epochs"),
        ({"topology": {"nnodes": 2}}, "parallel.type", "topology.nnodes"),
        (
            {"parallel": {"type": "ddp"}, "topology": {"nproc_per_node": 8}, "resources": {"gpu": 4}},
            "resources.gpu",
            "topology.nproc_per_node",
        ),
        ({"resources": {"gpu": 8}}, "resources.gpu", "topology.nproc_per_node"),
        ({"parallel": {"type": "fsdp"}}, "parallel.type", "topology.nproc_per_node"),
        ({"parallel": {"type": "deepspeed"}}, "parallel.type", "topology.nproc_per_node"),
        (
            {"parallel": {"type": "deepspeed", "offload_param": "cpu"}, "topology": {"nproc_per_node": 2}},
            "parallel.offload_param",
            "parallel.stage",
        ),
        (
            {
                "parallel": {"type": "deepspeed", "stage": 3},
                "training": {"compile": True},
                "topology": {"nproc_per_node": 2},
            },
            "training.compile",
            "parallel.stage 3",
        ),
        ({"resources": {"gpu_type": "NVIDIA-H200"}}, "resources.gpu_type", "resources.gpu"),
        ({"resources": {"gpu_resource": "amd.com/gpu"}}, "resources.gpu_resource", "resources.gpu"),
        (
            {
                "resources": {"gpu_resource": "nvidia.com/mig-3g.40gb", "gpu": 2},
                "topology": {"nproc_per_node": 2},
                "parallel": {"type": "ddp"},
            },
            "resources.gpu_resource",
            "topology.nnodes to 1",
        ),
        ({"data": {"format": "text"}}, "data.format", "objective.type"),
        (
            {"data": {"train_on": "last_turn"}, "objective": {"type": "pretrain"}},
            "data.train_on",
            "objective.type to 'sft'",
        ),
        (
            {"data": {"train_on": ["tool"], "source": "a.jsonl"}, "objective": {"type": "dpo"}},
            "data.train_on",
            "objective.type 'dpo' compares both answers",
        ),
        ({"data": {"format": "preference", "source": "a.jsonl"}}, "data.format", "objective.type 'sft'"),
        ({"objective": {"type": "dpo"}}, "data.source", "objective.type 'dpo' needs"),
        ({"objective": {"type": "orpo"}}, "data.source", "objective.type 'orpo' needs"),
        ({"objective": {"type": "kto"}}, "data.source", "no labels of answers"),
        (
            {"objective": {"type": "kto"}, "data": {"source": "a.jsonl", "format": "text"}},
            "data.format",
            "'text' has no answers",
        ),
        ({"data": {"source": "a.jsonl", "label_column": "good"}}, "data.label_column", "set objective.type to 'kto'"),
        (
            {"data": {"source": "a.jsonl", "margin_column": "by"}},
            "data.margin_column",
            "set objective.type to 'reward'",
        ),
        ({"model": {"head": "score"}}, "model.head", "no such field"),
        (
            {"objective": {"type": "reward"}, "data": {"source": "a.jsonl"}, "export": {"formats": ["gguf"]}},
            "export.formats",
            "a model that scores texts",
        ),
        (
            {"objective": {"type": "reward"}, "data": {"source": "a.jsonl"}, "evaluation": {"tasks": ["hellaswag"]}},
            "evaluation.tasks",
            "a model that scores texts",
        ),
        (
            {"objective": {"type": "simpo"}, "data": {"source": "a.jsonl", "format": "chat"}},
            "data.format",
            "objective.type 'simpo', which needs format 'preference'",
        ),
        (
            {"objective": {"type": "dpo", "loss": "apo_zero", "label_smoothing": 0.1}, "data": {"source": "a.jsonl"}},
            "objective.label_smoothing",
            "set objective.loss to 'sigmoid' or 'exo_pair' or 'robust'",
        ),
        (
            {"objective": {"type": "dpo", "loss": "exo_pair"}, "data": {"source": "a.jsonl"}},
            "objective.label_smoothing",
            "set it to 0.001",
        ),
        (
            {"objective": {"type": "dpo", "discopop_tau": 0.1}, "data": {"source": "a.jsonl"}},
            "objective.discopop_tau",
            "objective.loss 'sigmoid' has none",
        ),
        (
            {"objective": {"type": "dpo"}, "data": {"source": "a.jsonl", "format": "chat"}},
            "data.format",
            "objective.type 'dpo'",
        ),
        (
            {"objective": {"type": "dpo", "reference": "adapter"}, "data": {"source": "a.jsonl"}},
            "objective.reference",
            "adapter.type",
        ),
        (
            {
                "model": {"name": "org/model"},
                "adapter": {"type": "lora"},
                "objective": {"type": "dpo"},
                "data": {"source": "a.jsonl"},
                "parallel": {"type": "deepspeed", "stage": 3},
                "topology": {"nproc_per_node": 2},
                "training": {"gradient_checkpointing": "per_op"},
            },
            "training.gradient_checkpointing",
            "does not work with parallel.stage 3 and an adapter",
        ),
        (
            {"objective": {"type": "dpo", "loss": "ipo", "label_smoothing": 0.1}, "data": {"source": "a.jsonl"}},
            "objective.label_smoothing",
            "objective.loss",
        ),
        (
            {"objective": {"type": "distill", "teacher": "tiny-llama"}},
            "objective.teacher",
            "a preset has random weights",
        ),
        (
            {"objective": {"type": "distill", "teacher": "org/teacher", "beta": 0.1}},
            "objective.beta",
            "objective.divergence 'forward_kl' has none",
        ),
        (
            {"objective": {"type": "distill", "divergence": "jsd"}},
            "objective.divergence",
            "needs all of a teacher's distribution",
        ),
        (
            {"objective": {"type": "distill", "teacher": "org/teacher", "on_policy": 0.5}},
            "objective.weight",
            "are not labels; set objective.weight to 1",
        ),
        (
            {"objective": {"type": "distill", "weight": 1, "on_policy": 0.5}},
            "objective.on_policy",
            "needs a teacher that scores",
        ),
        (
            {"objective": {"type": "distill", "teacher": "org/teacher", "generation": {"top_k": 5}}},
            "objective.generation",
            "objective.on_policy is 0",
        ),
        (
            {"objective": {"type": "distill", "teacher_revision": "main"}},
            "objective.teacher_revision",
            "objective.teacher is not",
        ),
        ({"model": {"revision": "main"}}, "model.revision", "model.name"),
        ({"model": {"attention": "flash_attention_2", "dtype": "float32"}}, "model.dtype", "model.attention"),
        ({"data": {"subset": "en"}}, "data.subset", "data.source"),
        ({"data": {"documents": "line", "document_separator": "x"}}, "data.document_separator", "data.documents"),
        ({"data": {"revision": "main"}}, "data.revision", "data.source"),
        (
            {"data": {**STREAMED, "sources": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]}, "training": {"steps": 3}},
            "data.streaming",
            "data.sources",
        ),
        ({"data": {"shuffle_window": 4}}, "data.shuffle_window", "data.shuffle"),
        ({"data": {"cache_gib": 4}}, "data.cache_gib", "data.prepared_url"),
        ({"data": {"streaming": True}, "training": {"steps": 3}}, "data.streaming", "data.shuffle"),
        ({"data": STREAMED}, "data.streaming", "training.steps"),
        (
            {"data": {**STREAMED, "source": "a.jsonl"}, "training": {"steps": 3}, "objective": {"type": "dpo"}},
            "data.streaming",
            "objective.reference",
        ),
        (
            {"data": STREAMED, "training": {"steps": 3}, "evaluation": {"every": 2}},
            "data.streaming",
            "evaluation.every",
        ),
        (
            {
                "data": {
                    **STREAMED,
                    "sources": [
                        {"source": "a.jsonl", "weight": 1, "validation_source": "c.jsonl"},
                        {"source": "b.jsonl", "weight": 1},
                    ],
                },
                "training": {"steps": 3},
                "evaluation": {"every": 2},
            },
            "data.streaming",
            "data.sources[1].validation_fraction",
        ),
        ({"adapter": {"type": "lora"}}, "adapter.type", "set model.name to a Hub id"),
        ({"adapter": {"type": "lora"}, "model": {"name": "a/b", "init": "random"}}, "adapter.type", "model.init"),
        (
            {"training": {"gradient_checkpointing_every": 4}},
            "training.gradient_checkpointing_every",
            "training.gradient_checkpointing",
        ),
        ({"training": {"compile": True}, "data": {"packing": False}}, "training.compile", "data.packing"),
        ({"kernels": {"store": STORE, "warmup": False}}, "kernels.store.url", "kernels.warmup"),
        ({"kernels": {"store": STORE, "enabled": False}}, "kernels.store.url", "training.compile"),
        ({"kernels": {"store": STORE, "enabled": False, "warmup": False}}, "kernels.store.url", "kernels.warmup"),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum", "optimizer.type"),
        (
            {"optimizer": {"type": "muon"}, "adapter": {"type": "lora"}, "model": {"name": "a/b"}},
            "optimizer.type",
            "adapter.type",
        ),
        (
            {"optimizer": {"type": "muon"}, "parallel": {"type": "fsdp", "cpu_offload": True}, **TWO},
            "optimizer.type",
            "parallel.cpu_offload",
        ),
        (
            {"optimizer": {"type": "muon", **IN_BACKWARD}, "parallel": {"type": "fsdp"}, **TWO},
            "optimizer.in_backward",
            "optimizer.type",
        ),
        (
            {"training": {"gradient_checkpointing_except_last": 2}},
            "training.gradient_checkpointing_except_last",
            "training.gradient_checkpointing",
        ),
        (
            {"optimizer": {"in_backward": True}, "parallel": {"type": "fsdp"}, **TWO},
            "optimizer.in_backward",
            "optimizer.max_grad_norm",
        ),
        (
            {"optimizer": IN_BACKWARD, "training": {"gradient_accumulation_steps": 2}},
            "optimizer.in_backward",
            "training.gradient_accumulation_steps",
        ),
        (
            {"optimizer": IN_BACKWARD, "parallel": {"type": "ddp"}},
            "optimizer.in_backward",
            "parallel.type",
        ),
        (
            {
                "optimizer": IN_BACKWARD,
                "parallel": {"type": "fsdp", "cpu_offload": True},
                "topology": {"nproc_per_node": 2},
            },
            "optimizer.in_backward",
            "parallel.cpu_offload",
        ),
        (
            {"parallel": {"type": "fsdp", "replicas": 3}, "topology": {"nproc_per_node": 4}},
            "parallel.replicas",
            "topology.nproc_per_node",
        ),
        (
            {"parallel": {"type": "fsdp", "replicas": 4}, "topology": {"nproc_per_node": 4}},
            "parallel.replicas",
            "'ddp'",
        ),
        ({"checkpoint": {"every": 50, "keep_every": 75}}, "checkpoint.keep_every", "checkpoint.every 50"),
        ({"checkpoint": {"keep_every": 75}}, "checkpoint.keep_every", "checkpoint.every 50"),
        ({"checkpoint": {"every": 50, "per_epoch": 1}}, "checkpoint.per_epoch", "checkpoint.every"),
        ({"checkpoint": {"keep_every": 50, "per_epoch": 1}}, "checkpoint.keep_every", "checkpoint.per_epoch"),
        ({"evaluation": {"every": 50, "per_epoch": 1}}, "evaluation.per_epoch", "evaluation.every"),
        (
            {"evaluation": {"per_epoch": 1}, "data": {"validation_fraction": 0}},
            "evaluation.per_epoch",
            "leave evaluation.per_epoch out",
        ),
        (
            {"data": STREAMED, "training": {"steps": 3}, "checkpoint": {"per_epoch": 1}},
            "checkpoint.per_epoch",
            "data.streaming begins before the rows are counted",
        ),
        (
            {"data": STREAMED, "training": {"steps": 3}, "evaluation": {"per_epoch": 1}},
            "evaluation.per_epoch",
            "set evaluation.every instead",
        ),
        ({"schedule": {"decay_ratio": 0.1}}, "schedule.decay_ratio", "schedule.type"),
        ({"schedule": {"type": "wsd", "warmup_ratio": 0.9}}, "schedule.warmup_ratio", "schedule.decay_ratio 0.2"),
        ({"schedule": {"warmup_ratio": 0.1, "warmup_steps": 3}}, "schedule.warmup_steps", "schedule.warmup_ratio"),
        ({"schedule": {"warmup_steps": 30}, "training": {"steps": 9}}, "schedule.warmup_steps", "training.steps"),
        ({"schedule": {"num_cycles": 3}}, "schedule.num_cycles", "'cosine_with_restarts'"),
        ({"schedule": {"type": "constant", "min_lr_ratio": 0.1}}, "schedule.min_lr_ratio", "schedule.type"),
        ({"model": {"freeze": ["a"], "trainable": ["b"]}}, "model.freeze", "model.trainable"),
        *(
            (
                {
                    "model": {"name": "a/b"},
                    "adapter": {"type": "lora", "target_parameters": ["down_proj"], field: value},
                },
                "adapter.target_parameters",
                f"adapter.{field}",
            )
            for field, value in (("use_dora", True), ("lora_dropout", 0.1), ("init_lora_weights", "pissa"))
        ),
        (
            {"model": {"name": "a/b", "freeze": ["mlp"]}, "adapter": {"type": "lora"}},
            "model.freeze",
            "adapter.target_modules",
        ),
        (
            {"model": {"name": "a/b", "trainable": ["mlp"]}, "adapter": {"type": "lora"}},
            "model.trainable",
            "adapter.type",
        ),
        (
            {
                "model": {"name": "a/b"},
                "adapter": {"type": "lora", "modules_to_save": ["lm_head"]},
                "objective": {"type": "dpo", "reference": "adapter"},
                "data": {"source": "a.jsonl"},
            },
            "objective.reference",
            "adapter.modules_to_save",
        ),
        (
            {
                "model": {"name": "a/b"},
                "adapter": {"type": "lora", "loraplus_lr_ratio": 16},
                "optimizer": {"lr": 0.1},
            },
            "adapter.loraplus_lr_ratio",
            "optimizer.lr 0.1",
        ),
        *(
            (
                {"model": {"name": "a/b"}, "adapter": {"type": "lora", "init_lora_weights": "pissa"} | other},
                "adapter.init_lora_weights",
                said,
            )
            for other, said in (
                ({"use_dora": True}, "adapter.use_dora"),
                ({"init_from": "an/adapter"}, "adapter.init_from"),
            )
        ),
        (
            {
                "model": {"name": "a/b"},
                "adapter": {"type": "lora", "init_lora_weights": "pissa"},
                "objective": {"type": "dpo", "reference": "adapter"},
                "data": {"source": "a.jsonl"},
            },
            "objective.reference",
            "adapter.init_lora_weights 'pissa' takes a part",
        ),
        ({"model": {"add_special_tokens": ["<|tool|>"]}}, "model.add_special_tokens", "model.name"),
        (
            {"model": {"name": "a/b", "add_special_tokens": ["<|tool|>"]}, "adapter": {"type": "lora"}},
            "model.add_special_tokens",
            "adapter.modules_to_save",
        ),
        (
            {"parallel": {"type": "fsdp", "context_parallel_method": "ulysses"}, "topology": {"nproc_per_node": 2}},
            "parallel.context_parallel_method",
            "parallel.context_parallel is 1",
        ),
        (
            {
                "training": {"neftune_noise_alpha": 5},
                "parallel": {"type": "fsdp", "context_parallel": 2},
                "topology": {"nproc_per_node": 2},
            },
            "training.neftune_noise_alpha",
            "parallel.context_parallel 2",
        ),
        ({"export": {"formats": ["safetensors", "adapter"]}}, "export.formats", "adapter.type"),
        (
            {"optimizer": {"type": "adafactor"}, "parallel": {"type": "fsdp"}, **TWO},
            "optimizer.type",
            "'fsdp' shards them; set parallel.type to 'ddp'",
        ),
        ({"optimizer": {"type": "lion"}, "parallel": {"type": "deepspeed"}, **TWO}, "optimizer.type", "parallel.type"),
        ({"optimizer": {"type": "lion", "paged": True}}, "optimizer.paged", "optimizer.type"),
        ({"optimizer": {"type": "lion", "eps": 1e-6}}, "optimizer.eps", "does not use it"),
        ({"optimizer": {"type": "adafactor", "betas": [0.8, 0.9]}}, "optimizer.betas", "optimizer.type 'adafactor'"),
        ({"optimizer": {"type": "schedule_free"}}, "schedule.type", "set schedule.type to 'constant'"),
        (
            {"optimizer": {"type": "schedule_free", "betas": [0, 0.9]}, "schedule": {"type": "constant"}},
            "optimizer.betas",
            "optimizer.type",
        ),
        ({"optimizer": {"groups": [{"match": "mlp"}]}}, "optimizer.groups[0]", "neither lr nor weight_decay"),
        ({"evaluation": {"early_stopping_patience": 2}}, "evaluation.early_stopping_patience", "evaluation.every"),
        (
            {"evaluation": {"every": 5, "early_stopping_threshold": 0.1}},
            "evaluation.early_stopping_threshold",
            "evaluation.early_stopping_patience",
        ),
        ({"checkpoint": {"keep_best": True}}, "checkpoint.keep_best", "evaluation.every"),
        (
            {"evaluation": {"every": 5}, "checkpoint": {"load_best_model_at_end": True}},
            "checkpoint.load_best_model_at_end",
            "checkpoint.keep_best",
        ),
        ({"evaluation": {"during": ["samples"]}}, "evaluation.during", "evaluation.every"),
        ({"evaluation": {"every": 5, "during": ["tasks"]}}, "evaluation.during", "evaluation.tasks asks for none"),
        ({"evaluation": {"every": 5, "during": ["samples"], "samples": 0}}, "evaluation.during", "evaluation.samples"),
        ({"evaluation": {"every": 5}, "data": {"validation_fraction": 0}}, "evaluation.every", "validation_fraction"),
        (
            {
                "evaluation": {"every": 5, "during": ["samples"]},
                "parallel": {"type": "fsdp"},
                "topology": {"nproc_per_node": 2},
            },
            "evaluation.during",
            "parallel.type",
        ),
        (
            {"evaluation": {"every": 5, "during": ["samples"]}, "training": {"compile": True}},
            "evaluation.during",
            "training.compile",
        ),
    ],
)
def test_a_contradiction_names_both_fields(fields, path, other):
    problems = problems_of(**fields)
    assert list(problems) == [path]
    assert other in problems[path].message


LORA = {"model": {"name": "org/model"}, "adapter": {"type": "lora"}}


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        ({"source": "a.jsonl", "validation_source": "b.jsonl"}, {"evaluation": {"every": 2}}),
        (
            {
                "sources": [{"source": "a.jsonl", "weight": 1}, {"source": "b.jsonl", "weight": 1}],
                "validation_source": "c.jsonl",
                "prepared_url": "s3://bucket/rows",
            },
            {"evaluation": {"every": 2}},
        ),
        ({"source": "a.jsonl"}, {"objective": {"type": "dpo"}, **LORA}),
        ({"source": "a.jsonl"}, {"objective": {"type": "dpo", "reference": "adapter"}, **LORA}),
    ],
    ids=["validation source", "mixture", "adapter by default", "adapter"],
)
def test_streaming_goes_with_what_does_not_need_all_rows_first(data, fields):
    spec = RunSpec.model_validate({"data": {**STREAMED, **data}, "training": {"steps": 3}, **fields})
    assert spec.data.streaming


def test_a_store_keeps_graphs_also_where_no_operator_is_fused():
    spec = RunSpec(training={"compile": True}, kernels={"enabled": False, "store": STORE})
    assert spec.kernels.store.url == STORE["url"]


def test_problems_of_sections_in_a_list_are_those_of_their_fields():
    groups = [{"match": "mlp", "lr": 1e-3}, {"match": "", "lrr": 1e-3, "weight_decay": -1}, {"lr": 2}, "mlp"]
    problems = problems_of(optimizer={"groups": groups})
    where = "optimizer.groups"
    assert {path: problem.suggestion for path, problem in problems.items()} == {
        f"{where}[1].match": None,
        f"{where}[1].lrr": "lr",
        f"{where}[1].weight_decay": None,
        f"{where}[2].match": None,
        f"{where}[2].lr": None,
        f"{where}[3]": None,
    }
    assert problems[f"{where}[2].match"].message == "required"
    assert problems[f"{where}[1].lrr"].allowed == "match, lr, weight_decay"
    assert problems_of(optimizer={"groups": "mlp"})[where].allowed == (
        "a list of sections with match, lr, weight_decay"
    )


@pytest.mark.parametrize(
    "data",
    [
        {"source": "a.jsonl", "validation_source": "b.jsonl"},
        {"sources": [{"source": "a.jsonl", "validation_fraction": 0.1}], "validation_fraction": 0},
        {"sources": [{"source": "a.jsonl"}], "validation_source": "b.jsonl"},
    ],
)
def test_rows_to_evaluate_on_may_come_from_anywhere(data):
    assert RunSpec.model_validate({"data": data, "evaluation": {"every": 5}}).evaluation.every == 5


@pytest.mark.parametrize(("rows", "per_step", "count"), [(80, 4, 4), (81, 4, 4), (10, 4, 1), (525, 75, 1), (9, 4, 7)])
def test_every_part_of_an_epoch_is_due_after_the_step_that_completes_it(rows, per_step, count):
    settings = {"checkpoint": {"per_epoch": count}, "evaluation": {"per_epoch": count}}
    spec = RunSpec.model_validate({"training": {"micro_batch_size": per_step}, **settings})
    steps = 3 * rows // per_step
    # The part number `part` ends with row `part * rows / count`; 0 is the start of the run.
    ends = {-(-part * rows // (count * per_step)) for part in range(1, 3 * count + 1)}
    for is_due in (spec.is_saved, spec.is_evaluated):
        assert {step for step in range(1, steps + 1) if is_due(step, rows)} == {end for end in ends if end <= steps}
    assert not spec.model_copy(update={"evaluation": RunSpec().evaluation}).is_evaluated(steps, rows)


def test_other_processes_save_and_evaluate_the_same_steps():
    settings = {"checkpoint": {"per_epoch": 3}, "evaluation": {"per_epoch": 2}, "parallel": {"type": "ddp"}}
    one, four = (
        RunSpec.model_validate({"training": training, "topology": {"nproc_per_node": processes}, **settings})
        for processes, training in [
            (1, {"micro_batch_size": 2, "gradient_accumulation_steps": 6}),
            (4, {"micro_batch_size": 3}),
        ]
    )
    steps = range(1, 60)
    assert [one.is_saved(step, 101) for step in steps] == [four.is_saved(step, 101) for step in steps]
    assert [one.is_evaluated(step, 101) for step in steps] == [four.is_evaluated(step, 101) for step in steps]


def test_a_spec_with_checkpoints_of_epochs_is_read_as_it_was_written():
    """Its default of `every` does not contradict it."""
    spec = RunSpec.model_validate({"checkpoint": {"per_epoch": 1}})
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    assert not spec.is_saved(50, 1000) and RunSpec().is_saved(50, None)


def test_devices_that_nothing_here_trains_on_are_rejected():
    for name in ("habana.ai/gaudi", "google.com/tpu", "gpu", "nvidia.com/"):
        problem = problems_of(resources={"gpu_resource": name, "gpu": 1})["resources.gpu_resource"]
        assert "a resource of NVIDIA's or AMD's device plugin, such as amd.com/gpu" in problem.allowed


def test_contradictions_are_found_beside_wrong_fields():
    problems = problems_of(seed=-1, training={"steps": 20, "epochs": 1}, resources={"gpu_type": "x"})
    assert set(problems) == {"seed", "training.steps", "resources.gpu_type"}


def test_a_contradiction_with_a_wrong_field_is_not_guessed_at():
    # What gpu was meant to be is unknown, so whether gpu_type contradicts it is too.
    assert set(problems_of(resources={"gpu_type": "x", "gpu": "one"})) == {"resources.gpu"}
    assert set(problems_of(resources={"gpu_type": "x"}, topology=3, parallel={})) == {
        "resources.gpu_type",
        "topology",
        "parallel.type",
    }


def test_a_section_of_a_misspelled_type_is_checked_as_the_type_that_was_meant():
    problems = problems_of(parallel={"type": "dpd", "bucket_cap_mb": 0, "bucket": 1})
    assert set(problems) == {"parallel.type", "parallel.bucket_cap_mb", "parallel.bucket"}


def test_two_wrong_items_of_a_list_are_two_problems():
    assert set(problems_of(kernels={"exclude": ["a", "b"]})) == {"kernels.exclude[0]", "kernels.exclude[1]"}


def test_keys_that_are_not_texts():
    assert set(problems_of(data={1: 2, "packing": 3}, **{"x": 1})) == {"data.1", "data.packing", "x"}


@pytest.mark.parametrize("value", [3, None, [], Optimizer()])
def test_a_value_that_is_no_mapping(value):
    with pytest.raises(SpecError, match=r"RunSpec has 1 problem:\n  (not a section|empty)"):
        RunSpec.model_validate(value)


def test_a_mapping_that_is_no_dict():
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate(MappingProxyType({"seed": -1, "resources": MappingProxyType({"gpu_type": "x"})}))
    assert {problem.path for problem in caught.value.problems} == {"seed", "resources.gpu_type"}


def test_a_section_in_the_place_of_another():
    problems = problems_of(data=Optimizer(), parallel=Optimizer(), seed=-1, resources={"gpu_type": "x"})
    assert set(problems) == {"data", "parallel", "seed", "resources.gpu_type"}


def test_given_values_are_shown_short_however_nested():
    bomb = "x"
    for _ in range(40):
        bomb = [bomb] * 40
    assert problems_of(seed=bomb)["seed"].given.startswith("[..., ...")
    assert problems_of(seed={"a": bomb, "b": 1})["seed"].given == "{a: ..., b: ...}"


@pytest.mark.parametrize(
    "build",
    [
        lambda: Optimizer(lr=-1),
        lambda: Optimizer.model_validate({"lr": -1}),
        lambda: Optimizer.model_validate_json('{"lr": -1}'),
    ],
)
def test_every_way_to_build_a_section_raises_the_same_error(build):
    with pytest.raises(SpecError, match="Optimizer has 1 problem:\n  lr: not a valid value; given: -1; allowed"):
        build()


def test_python_sections_and_plain_values_are_the_same_spec():
    nested = RunSpec(data=Data(sequence_length=64), parallel=Ddp(bucket_cap_mb=5))
    assert nested == RunSpec(data={"sequence_length": 64}, parallel={"type": "ddp", "bucket_cap_mb": 5})
    assert nested == RunSpec.model_validate(nested)


def test_a_wrong_field_beside_python_sections():
    with pytest.raises(SpecError) as caught:
        RunSpec(data=Data(format="text"), seed=-1)
    assert {problem.path for problem in caught.value.problems} == {"seed", "data.format"}


def test_json_that_is_no_json():
    with pytest.raises(SpecError, match="not JSON: EOF"):
        RunSpec.model_validate_json("{")


def test_json_refuses_what_python_refuses_even_when_asked_to_be_lax():
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate_json('{"seed": true, "data": {"packing": "yes"}}', strict=False, context={})
    assert {problem.path for problem in caught.value.problems} == {"seed", "data.packing"}


def test_every_field_is_described():
    sections = Section.__subclasses__()
    sections += [below for section in sections for below in section.__subclasses__()]
    assert RunSpec in sections and len(sections) > 15
    for section in sections:
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_recipe_is_all_that_decides_the_data():
    spec = RunSpec()
    recipe = DataRecipe.from_spec(spec)
    assert set(DataRecipe.model_fields) == SPEC_FIELDS
    same = RunSpec(name="other", optimizer={"lr": 1e-4}, training={"steps": 20}, model={"dtype": "float32"})
    assert DataRecipe.from_spec(same) == recipe
    assert DataRecipe.from_spec(same).hash() == recipe.hash()


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1},
        {"data": {"sequence_length": 64}},
        {"objective": {"type": "pretrain"}},
        {"model": {"name": "org/model"}},
        {"model": {"name": "org/model", "revision": "main"}},
        {"model": {"tokenizer": "org/tokenizer"}},
        {"model": {"name": "org/model", "add_special_tokens": ["<|tool|>"]}},
    ],
)
def test_recipe_changes_with_what_decides_the_data(fields):
    assert DataRecipe.from_spec(RunSpec(**fields)).hash() != DataRecipe.from_spec(RunSpec()).hash()


def test_recipe_has_the_fingerprint_of_files_and_survives_json():
    recipe = DataRecipe.from_spec(RunSpec(data={"source": ["a.jsonl"]}), fingerprint="abc")
    assert recipe.hash() != DataRecipe.from_spec(RunSpec(data={"source": ["a.jsonl"]})).hash()
    assert DataRecipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize(
    ("section", "fields", "told"),
    [
        (
            "objective",
            {"beta": 0.1},
            "required; beta is a field of 'dpo', 'kto', 'orpo', 'simpo', 'cpo', 'distill' or 'grpo'",
        ),
        ("objective", {"beta": 0.1, "label_smoothing": 0}, "required; beta and label_smoothing are fields of {both}"),
        ("objective", {"teacher": "a", "rewards": []}, "required"),
        ("objective", {"num_generations": 8}, "required"),
        ("objective", {}, "required"),
        ("adapter", {"r": 8}, "required; r is a field of 'lora'"),
    ],
)
def test_fields_without_a_type_name_the_types_that_have_them(section, fields, told):
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate({section: fields})
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == (f"{section}.type", told.format(both="'dpo', 'simpo' or 'cpo'"))


def test_a_recipe_needs_its_fields():
    with pytest.raises(SpecError) as caught:
        DataRecipe.model_validate({"seed": 1, "model": "m", "revision": None, "tokenizer": None})
    assert {problem.path: problem.message for problem in caught.value.problems} == {
        "data": "required",
        "objective": "required",
    }


def test_tokens_of_a_step_say_how_often_it_passes():
    fields = {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}, "data": {"sequence_length": 512}}
    spec = RunSpec.model_validate({**fields, "training": {"tokens_per_step": 16384, "micro_batch_size": 2}})
    assert (spec.training.gradient_accumulation_steps, spec.rows_per_step) == (8, 32)
    # What is written down says both, and is read as the same.
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec == RunSpec(**spec.model_dump())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"training": {"tokens_per_step": 500000}}, "not a multiple of the 1024 tokens.*nearest: 499712 or 500736"),
        ({"training": {"tokens_per_step": 1}}, "nearest: 1024$"),
        ({"training": {"tokens_per_step": 8192, "gradient_accumulation_steps": 3}}, "takes 8 forward passes.*is 3"),
        (
            {"training": {"tokens_per_step": 1024}, "data": {"packing": False}},
            r"rows differ in length when data\.packing is false",
        ),
    ],
)
def test_tokens_that_make_no_step_are_refused(fields, words):
    assert re.search(words, problems_of(**fields)["training.tokens_per_step"].message)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"data": {"source": "https://me:hidden@host/rows.jsonl"}}, "data.source"),
        ({"data": {"source": ["rows.jsonl", "s3://me:hidden@bucket/rows.jsonl"]}}, "data.source"),
        ({"kernels": {"store": {"url": "redis://me:hidden@host", "allow_unsigned": True}}}, "kernels.store.url"),
        ({"checkpoint": {"url": "s3://me:hidden@bucket"}}, "checkpoint.url"),
        ({"export": {"url": "s3://me:hidden@bucket"}}, "export.url"),
        ({"data": {"source": "abfss://me:hidden@account/rows.jsonl"}}, "data.source"),
    ],
)
def test_credentials_are_refused_and_not_repeated(fields, path):
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate(fields)
    assert path in str(caught.value) and "credentials" in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "query",
    [
        "sv=2026-01-01&sig=hidden",
        "X-Amz-Expires=60&X-Amz-Signature=hidden",
        "x-goog-signature=hidden",
        "Expires=1&SIGNATURE=hidden&Key-Pair-Id=K",
        "download=true&token=hidden",
        "X-Amz%2DSignature=hidden",
    ],
)
@pytest.mark.parametrize(
    "fields_with",
    [
        lambda url: {"data": {"source": ["rows.jsonl", url]}},
        lambda url: {"checkpoint": {"url": url}},
        lambda url: {"export": {"url": url}},
        lambda url: {"kernels": {"store": {"url": url, "allow_unsigned": True}}},
    ],
    ids=["data.source", "checkpoint.url", "export.url", "kernels.store.url"],
)
def test_signatures_in_a_url_are_refused_and_not_repeated(fields_with, query):
    with pytest.raises(SpecError) as caught:
        RunSpec.model_validate(fields_with(f"https://host/rows?.jsonl?{query}"))
    assert "in its query, which grants access to every reader of the spec" in str(caught.value)
    assert "hidden" not in str(caught.value)


AZURE = ("abfs://runs@account.dfs.core.windows.net/path", "wasbs://runs@account.blob.core.windows.net/me@host")


@pytest.mark.parametrize("url", [*AZURE, "s3://bucket/me@host", "https://host/path?download=true"])
def test_a_container_an_at_in_a_path_and_a_harmless_query_are_no_credentials(url):
    spec = RunSpec.model_validate(
        {
            "data": {"source": [url]},
            "checkpoint": {"url": url},
            "export": {"url": f"{url}/models"},
            "kernels": {"store": {"url": url, "allow_unsigned": True}},
        }
    )
    assert (spec.data.source, spec.checkpoint.url, spec.kernels.store.url) == ((url,), url, url)


def test_of_urls_in_a_text_what_may_be_shown_is():
    text = "see https://me:hidden@host/a.jsonl?X-Signature=hidden, s3://bucket/me@host and 'gs://b/*?'"
    assert redacted(text) == "see https://...@host/a.jsonl?... s3://bucket/me@host and 'gs://b/*?'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((f"in {url}, so", f"in {url}, so") for url in AZURE),
        ("abfs://me:hidden@account/path", "abfs://...@account/path"),
        ("abfs://runs@hidden@account/path", "abfs://...@account/path"),
        ("S3://me:hid@den@bucket", "S3://...@bucket"),
        ("simplecache::s3://me:hidden@bucket", "simplecache::s3://...@bucket"),
        ("://me:hidden@bucket", "://...@bucket"),
    ],
)
def test_a_user_of_a_url_is_not_shown_and_a_container_is(text, shown):
    assert redacted(text) == shown


def test_what_a_source_leaves_out_is_that_of_the_data():
    spec = RunSpec(
        data={
            "format": "chat",
            "max_samples": 9,
            "split": "a",
            "sources": [
                {"source": "org/x", "subset": "s", "weight": 3, "validation_source": {"split": "test"}},
                {"source": "b.jsonl", "format": "alpaca", "weight": 1, "validation_fraction": 0.2},
                {"source": "c.jsonl", "weight": 1, "validation_source": "v.jsonl"},
            ],
        }
    )
    parts = spec.data.single_sources()
    read = [(p.data.source, p.data.subset, p.data.split, p.data.format, p.data.max_samples) for p in parts]
    assert read == [
        ("org/x", "s", "a", "chat", 9),
        ("org/x", "s", "test", "chat", None),
        ("b.jsonl", None, "a", "alpaca", 9),
        ("c.jsonl", None, "a", "chat", 9),
        ("v.jsonl", None, "train", "chat", None),
    ]
    assert [part.validation_only for part in parts] == [False, True, False, False, True]
    assert [part.data.validation_fraction for part in parts] == [0, 0, 0.2, 0, 0]
    # Written out, it says the same, whatever becomes a default later.
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    # One of them is prepared like a run that has no other.
    alone = RunSpec(data={"source": "b.jsonl", "format": "alpaca", "max_samples": 9, "split": "a",
                          "validation_fraction": 0.2}, model={"name": "org/x"})  # fmt: skip
    mixed = RunSpec(data=spec.data, model={"name": "org/x"})
    assert DataRecipe.from_spec(mixed).single_sources()[2] == DataRecipe.from_spec(alone)


SOURCES = [{"source": "a.jsonl", "weight": 1}, {"source": "b.jsonl", "weight": 1}]


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ({"source": "a.jsonl", "sources": SOURCES}, "data.source", "data.sources names 2 sources; leave data.source"),
        ({"source": None}, "data.source", "data.sources names none"),
        ({"sources": SOURCES, "revision": "main"}, "data.revision", r"data.sources\[0\].revision"),
        ({"sources": [SOURCES[0], {"source": "b"}]}, "data.sources[1].weight", r"data.sources\[0\].weight is 1"),
        ({"sources": [*SOURCES, {"source": "a.jsonl", "weight": 2}]}, "data.sources[2]", r"as data.sources\[0\]"),
        ({"sources": [{"source": "a", "format": "text"}]}, "data.sources[0].format", "objective.type 'sft' needs"),
        ({"sources": SOURCES, "validation_source": {"split": "x"}}, "data.validation_source", "names no source"),
        ({"source": "a", "validation_source": "a"}, "data.validation_source", "the rows that data trains on"),
        (
            {"image_min_pixels": 9, "image_max_pixels": 8},
            "data.image_min_pixels",
            r"9, more than .*max_pixels 8; lower",
        ),
        (
            {"sources": [{"source": "a", "audio_min_seconds": 2, "audio_max_seconds": 1.5}]},
            "data.sources[0].audio_min_seconds",
            r"2.0, more than data.sources\[0\].audio_max_seconds 1.5",
        ),
        (
            {"sources": [{"source": "a", "validation_source": "b", "validation_fraction": 0.1}]},
            "data.sources[0].validation_source",
            r"data.sources\[0\].validation_fraction 0.1 holds samples out",
        ),
    ],
)
def test_sources_that_contradict_each_other(data, path, message):
    assert re.search(message, problems_of(data=data)[path].message)


def test_every_problem_of_a_list_of_sections_is_told():
    sources = [
        {"source": "a", "weight": 0},
        {},
        {"source": "b", "weight": -1, "formt": "chat", "validation_source": {"splt": "x"}},
        {"weight": 1},
        3,
    ]
    problems = problems_of(data={"sources": sources}, seed=-1)
    assert problems.keys() == {
        "data.sources[0].weight", "data.sources[1].source", "data.sources[2].weight", "data.sources[2].formt",
        "data.sources[2].validation_source.splt", "data.sources[3].source", "data.sources[4]", "seed",
    }  # fmt: skip
    assert problems["data.sources[2].formt"].suggestion == "format"
    assert problems["data.sources[0].weight"].allowed.startswith("a number above 0")
    assert "a list of sections" in problems_of(data={"sources": "a.jsonl"})["data.sources"].allowed


def test_a_section_without_a_field_that_it_needs_is_told_beside_other_problems():
    assert problems_of(objective={"type": "custom"}, seed=-1).keys() == {"objective.object", "seed"}


def test_a_reward_has_the_head_of_one_which_an_adapter_trains_whole():
    given = {"objective": {"type": "reward"}, "data": {"source": "a.jsonl"}, "model": {"name": "org/model"}}
    spec = RunSpec.model_validate({**given, "adapter": {"type": "lora", "modules_to_save": ["embed_tokens"]}})
    assert (spec.model.head, spec.adapter.modules_to_save) == ("score", ("embed_tokens", "score"))
    assert "head" not in spec.model_dump()["model"]
    again = RunSpec.model_validate_json(spec.model_dump_json())
    assert again == spec and again.model.head == "score"
    assert RunSpec(model=spec.model).model.head == "tokens"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"message_keys": {"role": "by", "content": "by"}}, "'by' is read as 'role' and 'content'; leave one out"),
        ({"message_keys": {"role_tag": "by"}}, "'role_tag': keys are those that templates read"),
        ({"roles": {"user": "a", "assistant": ["a"]}}, "'a' stands for 'user' and for 'assistant'; leave one out"),
    ],
)
def test_mappings_of_messages_that_contradict_themselves_are_errors(settings, problem):
    with pytest.raises(SpecError, match=re.escape(problem)):
        RunSpec.model_validate({"data": {"source": "rows.jsonl", **settings}})
