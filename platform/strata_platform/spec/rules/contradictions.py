"""Rules for fields that contradict each other; each names both fields and the way out.

Rules are grouped by subject. Every field that they read is valid by itself; `check` skips the rules of fields that are
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction
from strata_platform.spec.rules.adapter_rules import adapter_rules
from strata_platform.spec.rules.cuda_graph_rules import cuda_graph_contradictions
from strata_platform.spec.rules.distillation_rules import distillation_rules
from strata_platform.spec.rules.evaluation_rules import evaluation_rules
from strata_platform.spec.rules.expert_rules import expert_rules
from strata_platform.spec.rules.float8_rules import float8_rules
from strata_platform.spec.rules.generation_rules import generation_rules
from strata_platform.spec.rules.grpo_rules import grpo_rules
from strata_platform.spec.rules.optimizer_rules import optimizer_rules
from strata_platform.spec.rules.parallel_rules import parallel_rules
from strata_platform.spec.rules.preference_rules import preference_rules
from strata_platform.spec.rules.source_rules import source_rules
from strata_platform.spec.rules.streaming_rules import streaming_rules
from strata_platform.spec.sections.data import BUILTIN_SOURCES
from strata_platform.spec.sections.model import PRESETS

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Adapter, Checkpoint, Objective, Parallel, RunSpec
    from strata_platform.spec.sections.data import Data, Reading
    from strata_platform.spec.sections.export import Export
    from strata_platform.spec.sections.kernels import Kernels
    from strata_platform.spec.sections.model import Model
    from strata_platform.spec.sections.training import Schedule, Training


def contradictions(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not."""
    yield from _training(spec.training, spec.data)
    yield from _neftune(spec.training, spec.parallel)
    yield from cuda_graph_contradictions(spec)
    yield from float8_rules(spec)
    yield from _tokens(spec)
    yield from parallel_rules(spec)
    yield from expert_rules(spec)
    yield from adapter_rules(spec.adapter, spec.objective)
    yield from optimizer_rules(spec)
    yield from _objective(spec.objective, spec.data)
    yield from preference_rules(spec)
    yield from distillation_rules(spec.objective)
    yield from generation_rules(spec)
    yield from grpo_rules(spec)
    yield from _store(spec.kernels, spec.training)
    yield from _model(spec.model, spec.adapter)
    yield from _formats(spec.export, spec.adapter)
    yield from _checkpoint(spec.checkpoint)
    yield from _places(spec.name, spec.checkpoint, spec.export)
    yield from _schedule(spec.schedule, spec.training)
    yield from _data(spec.data)
    yield from source_rules(spec.data)
    yield from streaming_rules(spec)
    yield from evaluation_rules(spec)


def _training(training: Training, data: Data) -> Iterator[Contradiction]:
    yield Contradiction(
        training.steps is not None and training.epochs is not None,
        ("training.steps", "training.epochs"),
        "contradicts training.epochs; give one of them",
    )
    yield Contradiction(
        training.gradient_checkpointing_every is not None and training.gradient_checkpointing != "selective",
        ("training.gradient_checkpointing_every", "training.gradient_checkpointing"),
        f"set, but training.gradient_checkpointing is '{training.gradient_checkpointing}'; set that to "
        "'selective', or leave training.gradient_checkpointing_every out",
    )
    yield Contradiction(
        training.gradient_checkpointing_except_last > 0 and training.gradient_checkpointing == "none",
        ("training.gradient_checkpointing_except_last", "training.gradient_checkpointing"),
        "is for layers that are recomputed, but training.gradient_checkpointing is 'none'; set that to 'full', or "
        "training.gradient_checkpointing_except_last to 0",
    )
    yield Contradiction(
        training.activation_offloading and training.gradient_checkpointing not in ("full", "attention", "selective"),
        ("training.activation_offloading", "training.gradient_checkpointing"),
        "offloads what recomputed layers keep, but training.gradient_checkpointing is "
        f"'{training.gradient_checkpointing}'; set that to 'full', or training.activation_offloading to false",
    )
    yield Contradiction(
        training.activation_offloading and training.compile,
        ("training.activation_offloading", "training.compile"),
        "copies between the passes, which training.compile compiles to one graph; set one of the two to false",
    )
    yield Contradiction(
        training.compile and not data.packing,
        ("training.compile", "data.packing"),
        "compiles one graph per row length, but rows differ in length when data.packing is false; set data.packing to "
        "true, or training.compile to false",
    )


def _neftune(training: Training, parallel: Parallel) -> Iterator[Contradiction]:
    yield from (
        Contradiction(
            training.neftune_noise_alpha is not None and getattr(parallel, field) > 1,
            ("training.neftune_noise_alpha", f"parallel.{field}"),
            f"draws noise for whole rows, but parallel.{field} {getattr(parallel, field)} computes {parts} of them on "
            f"each process; set parallel.{field} to 1, or leave training.neftune_noise_alpha out",
        )
        for field, parts in (("tensor_parallel", "shards"), ("context_parallel", "parts"))
    )


def _tokens(spec: RunSpec) -> Iterator[Contradiction]:
    training, tokens, once = spec.training, spec.training.tokens_per_step, spec.tokens_per_forward
    if tokens is None:
        return
    yield Contradiction(
        not spec.data.packing,
        ("training.tokens_per_step", "data.packing"),
        "set, but rows differ in length when data.packing is false; set data.packing to true, or set "
        "training.gradient_accumulation_steps instead",
    )
    below = tokens // once * once
    yield Contradiction(
        tokens % once != 0,
        ("training.tokens_per_step", "training.micro_batch_size", "data.sequence_length", "topology"),
        f"{tokens} is not a multiple of the {once} tokens of a forward pass on all ranks (training.micro_batch_size x "
        f"data.sequence_length x processes); nearest: {f'{below} or ' if below else ''}{below + once}",
    )
    yield Contradiction(
        tokens % once == 0 and tokens // once != training.gradient_accumulation_steps,
        ("training.tokens_per_step", "training.gradient_accumulation_steps"),
        f"{tokens} takes {tokens // once} forward passes of {once} tokens, and training.gradient_accumulation_steps is "
        f"{training.gradient_accumulation_steps}; leave one of them out",
    )


def _objective(objective: Objective, data: Data) -> Iterator[Contradiction]:
    whole = objective.type == "pretrain" or (objective.type == "custom" and objective.targets == "all")
    yield Contradiction(
        whole and data.train_on not in (None, "all"),
        ("data.train_on", "objective.targets" if objective.type == "custom" else "objective.type"),
        "excludes tokens, but the objective trains on all of them; leave data.train_on out"
        + ("" if objective.type == "custom" else ", or set objective.type to 'sft'"),
    )
    for index, source in enumerate(data.sources):
        yield from _rows(objective, source, f"data.sources[{index}]")
    if not data.sources:
        yield from _rows(objective, data, "data")


def _rows(objective: Objective, source: Reading, path: str) -> Iterator[Contradiction]:
    """Rules for the rows that an objective needs, of one source."""
    format = source.format
    yield Contradiction(
        objective.type == "sft" and format == "text",
        (f"{path}.format", "objective.type"),
        "'text' has no completions, which objective.type 'sft' needs; set objective.type to 'pretrain', "
        f"or {path}.format to 'prompt_completion' or 'chat'",
    )
    yield Contradiction(
        objective.type == "custom" and objective.targets == "completions" and format == "text",
        (f"{path}.format", "objective.targets"),
        "'text' has no completions, which objective.targets 'completions' needs; set objective.targets to 'all', or "
        f"{path}.format to 'prompt_completion' or 'chat'",
    )


def _store(kernels: Kernels, training: Training) -> Iterator[Contradiction]:
    store = kernels.store
    yield Contradiction(
        store.url is not None and (store.signing_key is not None) == store.allow_unsigned,
        ("kernels.store.signing_key", "kernels.store.allow_unsigned", "kernels.store.url"),
        "contradicts kernels.store.allow_unsigned; leave one of them out"
        if store.allow_unsigned
        else "missing, but pods execute the archives of kernels.store.url; give a key, or set "
        "kernels.store.allow_unsigned if nobody else can write there",
    )
    yield Contradiction(
        store.url is None and (store.signing_key is not None or store.allow_unsigned),
        ("kernels.store.url", "kernels.store.signing_key", "kernels.store.allow_unsigned"),
        "missing, but other fields of kernels.store are set; set it, or leave kernels.store.signing_key and "
        "kernels.store.allow_unsigned out",
    )
    yield Contradiction(
        store.url is not None and not kernels.warmup,
        ("kernels.store.url", "kernels.warmup"),
        "set, but only the warm-up uses the store, and kernels.warmup is false; set it to true, or leave "
        "kernels.store.url out",
    )
    yield Contradiction(
        store.url is not None and kernels.warmup and not (kernels.enabled or training.compile),
        ("kernels.store.url", "kernels.enabled", "training.compile"),
        "set, but the store has kernels and graphs, and kernels.enabled and training.compile are false; set one of "
        "them to true, or leave kernels.store.url out",
    )


def _model(model: Model, adapter: Adapter) -> Iterator[Contradiction]:
    yield Contradiction(
        model.name in PRESETS and model.revision is not None,
        ("model.revision", "model.name"),
        f"set, but model.name '{model.name}' is a preset and has none; leave model.revision out",
    )
    yield Contradiction(
        bool(model.trust_remote_code) and model.name in PRESETS,
        ("model.trust_remote_code", "model.name"),
        f"set, but model.name '{model.name}' is a preset and brings no code; leave model.trust_remote_code out",
    )
    commit = model.trust_remote_code if isinstance(model.trust_remote_code, str) else ""
    yield Contradiction(
        bool(commit) and not commit.startswith("sha256:") and model.revision != commit,
        ("model.trust_remote_code", "model.revision"),
        f"names the commit {commit}, but model.revision is {model.revision or 'not set'}; set both to the commit whose "
        "code you have read",
    )
    yield Contradiction(
        adapter.type != "none" and model.init == "random" and model.name not in PRESETS,
        ("adapter.type", "model.init"),
        f"'{adapter.type}' adapts a pretrained model, and freezes the weights that model.init 'random' asks to train "
        "from scratch; set adapter.type to 'none', or model.init to 'pretrained'",
    )
    yield Contradiction(
        adapter.type != "none" and model.name in PRESETS,
        ("adapter.type", "model.name"),
        f"'{adapter.type}' adapts a pretrained model, and model.name '{model.name}' is a preset, "
        "trained from scratch; set model.name to a Hub id or a folder, or adapter.type to 'none'",
    )
    yield Contradiction(
        bool(model.freeze and model.trainable),
        ("model.freeze", "model.trainable"),
        "contradicts model.trainable, which freezes all other weights; give one of them",
    )
    yield Contradiction(
        bool(model.add_special_tokens) and model.name in PRESETS,
        ("model.add_special_tokens", "model.name"),
        f"set, but model.name '{model.name}' is a preset, whose tokenizer and embeddings are trained from scratch; "
        "leave model.add_special_tokens out, or set model.name to a Hub id or a folder",
    )
    yield Contradiction(
        bool(model.add_special_tokens) and adapter.type == "lora" and not adapter.modules_to_save,
        ("model.add_special_tokens", "adapter.modules_to_save"),
        "adds tokens whose embeddings have to be learned, but the adapter freezes them; set adapter.modules_to_save to "
        "the embeddings and the head, such as [embed_tokens, lm_head]",
    )
    for field in ("freeze", "trainable"):
        yield Contradiction(
            adapter.type != "none" and bool(getattr(model, field)),
            (f"model.{field}", "adapter.type"),
            f"set, but adapter.type '{adapter.type}' freezes all weights of the model; choose its layers by "
            f"adapter.target_modules, or leave model.{field} out",
        )
    yield Contradiction(
        model.attention.startswith("flash") and model.dtype == "float32",
        ("model.dtype", "model.attention"),
        f"'float32' contradicts model.attention '{model.attention}', which has no float32; "
        "set model.dtype to 'bfloat16', or model.attention to 'auto'",
    )


def _formats(export: Export, adapter: Adapter) -> Iterator[Contradiction]:
    yield Contradiction(
        "adapter" in export.formats and adapter.type == "none",
        ("export.formats", "adapter.type"),
        "has 'adapter', but adapter.type 'none' trains the model itself; leave 'adapter' out, or set adapter.type to "
        "'lora'",
    )


def _checkpoint(checkpoint: Checkpoint) -> Iterator[Contradiction]:
    keep_every, every = checkpoint.keep_every, checkpoint.interval
    yield Contradiction(
        checkpoint.every is not None and checkpoint.per_epoch is not None,
        ("checkpoint.per_epoch", "checkpoint.every"),
        "contradicts checkpoint.every; give one of them",
    )
    yield Contradiction(
        keep_every is not None and every is not None and keep_every % every != 0,
        ("checkpoint.keep_every", "checkpoint.every"),
        f"{keep_every} is not a multiple of checkpoint.every {every}, and no other step is saved; "
        f"set it to one, for example {(every or 1) * 10}",
    )
    yield Contradiction(
        keep_every is not None and checkpoint.per_epoch is not None,
        ("checkpoint.keep_every", "checkpoint.per_epoch"),
        "keeps steps that are multiples of it, but checkpoint.per_epoch saves others; raise checkpoint.keep_last "
        "instead, or set checkpoint.every in place of checkpoint.per_epoch",
    )


def _places(name: str, checkpoint: Checkpoint, export: Export) -> Iterator[Contradiction]:
    checkpoints, model = (f"{(url or '').rstrip('/')}/{name}/" for url in (checkpoint.url, export.url))
    yield Contradiction(
        checkpoint.url is not None and export.url is not None and checkpoints.startswith(model),
        ("export.url", "checkpoint.url"),
        f"replaces everything in {model.rstrip('/')} by the model, but checkpoint.url puts checkpoints there; set "
        "export.url to another folder",
    )


def _schedule(schedule: Schedule, training: Training) -> Iterator[Contradiction]:
    yield Contradiction(
        schedule.decay_ratio is not None and schedule.type != "wsd",
        ("schedule.decay_ratio", "schedule.type"),
        f"set, but schedule.type '{schedule.type}' has its own decay; set schedule.type to 'wsd', or "
        "leave schedule.decay_ratio out",
    )
    yield Contradiction(
        schedule.warmup_share + schedule.falling > 1,
        ("schedule.warmup_ratio", "schedule.decay_ratio", "schedule.type"),
        f"{schedule.warmup_share} and schedule.decay_ratio {schedule.falling} add up to more than 1; lower one of them",
    )
    yield Contradiction(
        schedule.warmup_steps is not None and schedule.warmup_ratio is not None,
        ("schedule.warmup_steps", "schedule.warmup_ratio"),
        "contradicts schedule.warmup_ratio; give one of them",
    )
    yield Contradiction(
        (schedule.warmup_steps or 0) > (training.steps or 10**9),
        ("schedule.warmup_steps", "training.steps"),
        f"{schedule.warmup_steps} is more than the {training.steps} steps of training.steps, so the learning rate "
        "would not reach its peak; lower it, or set schedule.warmup_ratio instead",
    )
    yield Contradiction(
        schedule.num_cycles is not None and schedule.type != "cosine_with_restarts",
        ("schedule.num_cycles", "schedule.type"),
        f"set, but schedule.type '{schedule.type}' has no restarts; set schedule.type to 'cosine_with_restarts', or "
        "leave schedule.num_cycles out",
    )
    yield Contradiction(
        schedule.min_lr_ratio > 0 and schedule.type == "constant",
        ("schedule.min_lr_ratio", "schedule.type"),
        "set, but schedule.type 'constant' stays at the peak; set schedule.type to 'cosine' or 'linear', or leave "
        "schedule.min_lr_ratio out",
    )


def _data(data: Data) -> Iterator[Contradiction]:
    yield from (
        Contradiction(
            data.source in BUILTIN_SOURCES and value is not None,
            (f"data.{field}", "data.source"),
            f"set, but data.source '{data.source}' is built in and has none; leave data.{field} out",
        )
        for field, value in (("subset", data.subset), ("revision", data.revision))
    )
    yield Contradiction(
        bool(data.format_arguments) and ":" not in data.format and not data.sources,
        ("data.format_arguments", "data.format"),
        f"set, but data.format '{data.format}' is built in and takes none; leave data.format_arguments out, or name a "
        "class of your own",
    )
    yield Contradiction(
        data.document_separator is not None and data.documents != "file",
        ("data.document_separator", "data.documents"),
        f"set, but data.documents '{data.documents}' divides text files, too; leave one of them out",
    )
