"""Rules of the objectives that learn which answers are better, and of the rows that they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from strata_platform.spec.problems import Contradiction
from strata_platform.spec.sections.data import BUILTIN_SOURCES
from strata_platform.spec.sections.model import Lora
from strata_platform.spec.sections.objectives import LABELLED, PAIRED, WITH_REFERENCE, Dpo, DpoLoss

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Objective, RunSpec
    from strata_platform.spec.sections.data import Data, Reading

# Formats of models that write texts.
_WRITTEN = {"gguf", "fp8", "int4"}
_PAIR_FORMATS = ("preference", "preference_chat")
# Losses of `dpo` that read `label_smoothing`.
_SMOOTHED = ("sigmoid", "robust", "exo_pair")


def preference_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not."""
    yield from _data(spec.objective, spec.data)
    for index, source in enumerate(spec.data.sources):
        yield from _rows(spec.objective, source, f"data.sources[{index}]")
    if not spec.data.sources:
        yield from _rows(spec.objective, spec.data, "data")
    yield from _reference(spec)
    yield from _score(spec)
    if isinstance(spec.objective, Dpo):
        yield from _losses(spec.objective)


def _data(objective: Objective, data: Data) -> Iterator[Contradiction]:
    kind = objective.type
    compared = "both answers" if kind in PAIRED else "whole answers"
    yield Contradiction(
        kind in (*PAIRED, *LABELLED) and data.train_on is not None,
        ("data.train_on", "objective.type"),
        f"set, but objective.type '{kind}' compares {compared} and nothing else; leave data.train_on out",
    )


def _rows(objective: Objective, source: Reading, path: str) -> Iterator[Contradiction]:
    """Rules for the rows that an objective needs, of one source."""
    name, format, kind = source.source, source.format, objective.type
    paired = kind in PAIRED
    yield Contradiction(
        (format in _PAIR_FORMATS) != paired and format != "auto",
        (f"{path}.format", "objective.type"),
        f"'{format}' does not fit objective.type '{kind}', which needs format 'preference', pairs of answers; set "
        f"{path}.format to 'auto', or another objective.type"
        if paired
        else f"'{format}' does not fit objective.type '{kind}': only {', '.join(map(repr, PAIRED))} read pairs of "
        f"answers; set {path}.format to 'auto', or another objective.type",
    )
    yield Contradiction(
        kind in LABELLED and format == "text",
        (f"{path}.format", "objective.type"),
        f"'text' has no answers, which objective.type '{kind}' needs; set {path}.format to 'prompt_completion' or "
        "'chat'",
    )
    yield Contradiction(
        kind in LABELLED and name in BUILTIN_SOURCES,
        (f"{path}.source", "objective.type"),
        f"'{name}' has no labels of answers, which objective.type '{kind}' needs; set {path}.source to a Hub data set "
        "or to files with the columns prompt, completion and label",
    )
    yield Contradiction(
        kind not in LABELLED and source.label_column is not None,
        (f"{path}.label_column", "objective.type"),
        f"set, but objective.type '{kind}' reads no labels; set objective.type to 'kto', or leave it out",
    )
    yield Contradiction(
        kind != "reward" and source.margin_column is not None,
        (f"{path}.margin_column", "objective.type"),
        f"set, but objective.type '{kind}' reads no margins; set objective.type to 'reward', or leave it out",
    )
    yield Contradiction(
        paired and source.template is not None,
        (f"{path}.template", "objective.type"),
        f"renders the prompt of one answer, but objective.type '{kind}' compares two; leave it out",
    )
    yield Contradiction(
        paired and name in BUILTIN_SOURCES,
        (f"{path}.source", "objective.type"),
        f"'{name}' has no pairs of answers, which objective.type '{kind}' needs; set {path}.source to a Hub data set "
        "or to files with the columns prompt, chosen and rejected",
    )


def _reference(spec: RunSpec) -> Iterator[Contradiction]:
    reference, kind = getattr(spec.objective, "reference", None), spec.objective.type
    in_each_step = isinstance(spec.adapter, Lora) and spec.adapter.starts_from_base and reference != "precomputed"
    yield Contradiction(
        spec.data.streaming and kind in WITH_REFERENCE and not in_each_step,
        ("data.streaming", "objective.reference", "adapter.type"),
        f"begins before all rows are prepared, but objective.reference '{reference}' reads all "
        f"{'pairs' if kind in PAIRED else 'rows'} with the initial model first; set objective.reference to 'adapter' "
        "with adapter.type 'lora', or data.streaming to false",
    )
    yield Contradiction(
        reference == "adapter" and spec.adapter.type == "none",
        ("objective.reference", "adapter.type"),
        "'adapter' disables the adapter for the reference, but adapter.type is 'none'; set adapter.type to 'lora', or "
        "objective.reference to 'precomputed'",
    )
    yield from (
        Contradiction(
            reference == "adapter" and spec.adapter.type == "lora" and bool(getattr(spec.adapter, field)),
            ("objective.reference", f"adapter.{field}"),
            f"'adapter' takes the model without its adapter for the reference, but adapter.{field} makes that another "
            "model than the initial one; set objective.reference to 'precomputed'",
        )
        for field in ("modules_to_save", "init_from")
    )
    yield Contradiction(
        reference is not None
        and spec.parallel.type == "deepspeed"
        and spec.parallel.stage == 3
        and spec.adapter.type != "none"
        and spec.training.gradient_checkpointing in ("attention", "per_op"),
        ("training.gradient_checkpointing", "parallel.stage", "adapter.type", "objective.type"),
        f"'{spec.training.gradient_checkpointing}' does not work with parallel.stage 3 and an adapter: "
        f"objective.type '{spec.objective.type}' leaves "
        "frozen weights gathered after the reference's forward pass, so that the recomputed pass differs; set "
        "training.gradient_checkpointing to 'full' or 'selective', or parallel.type to 'fsdp'",
    )


def _score(spec: RunSpec) -> Iterator[Contradiction]:
    """Rules of a model that scores texts: it writes none."""
    scores = spec.objective.type == "reward"
    yield from (
        Contradiction(
            scores and given,
            (field, "objective.type"),
            f"{needs}, but objective.type 'reward' trains a model that scores texts; leave {field} out",
        )
        for field, given, needs in (
            ("evaluation.tasks", bool(spec.evaluation.tasks), "are tasks of a model that writes texts"),
            ("evaluation.during", bool(spec.evaluation.during), "needs a model that writes texts"),
            ("export.formats", bool({*spec.export.formats} & _WRITTEN), "are formats of a model that writes texts"),
            ("model.add_special_tokens", bool(spec.model.add_special_tokens), "adds rows to a head of tokens"),
            ("model.trust_remote_code", bool(spec.model.trust_remote_code), "brings a model that writes texts"),
        )
    )


def _losses(objective: Dpo) -> Iterator[Contradiction]:
    loss, others = objective.loss, [name for name in get_args(DpoLoss) if name in _SMOOTHED]
    yield Contradiction(
        objective.label_smoothing > 0 and loss not in _SMOOTHED,
        ("objective.label_smoothing", "objective.loss"),
        f"set, but objective.loss '{loss}' has none; leave objective.label_smoothing out, or set objective.loss to "
        f"{' or '.join(map(repr, others))}",
    )
    yield Contradiction(
        loss == "exo_pair" and objective.label_smoothing == 0,
        ("objective.label_smoothing", "objective.loss"),
        "0, but objective.loss 'exo_pair' takes its logarithm; set it to 0.001, as its authors do",
    )
    yield Contradiction(
        objective.discopop_tau is not None and loss != "discopop",
        ("objective.discopop_tau", "objective.loss"),
        f"set, but objective.loss '{loss}' has none; leave objective.discopop_tau out, or set objective.loss to "
        "'discopop'",
    )
