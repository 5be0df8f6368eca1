"""Rules of `grpo`: prompts, groups and rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction
from strata_platform.spec.sections.data import BUILTIN_SOURCES
from strata_platform.spec.sections.model import Lora
from strata_platform.spec.sections.objectives import PROMPTED, Grpo, RewardTerm

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Adapter, RunSpec
    from strata_platform.spec.sections.data import Data, Reading

_PROMPT_FORMATS = ("prompt", "prompt_chat")
# Tokens of the shortest row that data has.
_SHORTEST = 8


def grpo_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not."""
    sources: list[tuple[Reading, str]] = [
        (source, f"data.sources[{index}]") for index, source in enumerate(spec.data.sources)
    ]
    sources = sources or [(spec.data, "data")]
    for source, path in sources:
        yield from _format(spec.objective.type, source, path)
    objective = spec.objective
    if not isinstance(objective, Grpo):
        return
    for source, path in sources:
        yield from _source(source, path)
    yield from _data(spec.data, objective)
    yield from _batch(spec, objective)
    for number, term in enumerate(objective.rewards):
        yield from _reward(term, f"objective.rewards[{number}]")
    titles = [term.title for term in objective.rewards]
    twice = next((title for title in titles if titles.count(title) > 1), "")
    yield Contradiction(
        bool(twice),
        ("objective.rewards",),
        f"two are called {twice!r} in metrics; give one of them another name",
    )
    yield from _loss(objective)
    yield from _reference(spec.adapter, objective)
    yield from _resume(spec, objective)
    yield from _replacements(spec.data, objective)


def _format(kind: str, source: Reading, path: str) -> Iterator[Contradiction]:
    yield Contradiction(
        (source.format in _PROMPT_FORMATS) != (kind in PROMPTED) and source.format != "auto",
        (f"{path}.format", "objective.type"),
        f"'{source.format}' does not fit objective.type '{kind}', which needs format 'prompt', prompts without "
        f"answers; set {path}.format to 'auto', or another objective.type"
        if kind in PROMPTED
        else f"'{source.format}' does not fit objective.type '{kind}': only {', '.join(map(repr, PROMPTED))} reads "
        f"prompts without answers; set {path}.format to 'auto', or objective.type to 'grpo'",
    )


def _source(source: Reading, path: str) -> Iterator[Contradiction]:
    yield Contradiction(
        source.source in BUILTIN_SOURCES,
        (f"{path}.source", "objective.type"),
        f"'{source.source}' has no prompts, which objective.type 'grpo' needs; set {path}.source to a Hub data set or "
        "to files with a column of prompts, and of what rewards compare answers with",
    )
    yield Contradiction(
        source.template is not None,
        (f"{path}.template", "objective.type"),
        "renders a prompt and its answer, but objective.type 'grpo' generates answers; render prompts beforehand, and "
        "leave it out",
    )
    yield Contradiction(
        source.overlong == "truncate",
        (f"{path}.overlong", "objective.type"),
        "'truncate' would cut the end of a prompt, which an answer follows; set it to 'skip' or 'error'",
    )


def _data(data: Data, objective: Grpo) -> Iterator[Contradiction]:
    new = objective.generation.max_new_tokens
    yield Contradiction(
        data.train_on is not None,
        ("data.train_on", "objective.type"),
        "set, but objective.type 'grpo' learns from generated answers and nothing else; leave data.train_on out",
    )
    yield Contradiction(
        data.sequence_length < new + _SHORTEST,
        ("data.sequence_length", "objective.generation.max_new_tokens"),
        f"{data.sequence_length} tokens have no room for an answer of {new} and a prompt of at least {_SHORTEST}; "
        "raise data.sequence_length, or lower objective.generation.max_new_tokens",
    )


def _batch(spec: RunSpec, objective: Grpo) -> Iterator[Contradiction]:
    answers, size = spec.rows_per_step, objective.group_size
    below = answers // size * size
    yield Contradiction(
        answers % size != 0,
        ("objective.group_size", "training.micro_batch_size", "training.gradient_accumulation_steps", "topology"),
        f"{size} does not divide the {answers} answers of a step (training.micro_batch_size x "
        "training.gradient_accumulation_steps x processes), so that a group would be cut; nearest numbers of answers: "
        f"{f'{below} or ' if below else ''}{below + size}",
    )
    yield Contradiction(
        spec.training.neftune_noise_alpha is not None,
        ("training.neftune_noise_alpha", "objective.type"),
        "puts noise on the probabilities that objective.type 'grpo' compares with those of generation; leave it out",
    )


def _reward(term: RewardTerm, path: str) -> Iterator[Contradiction]:
    yield Contradiction(
        (term.function is None) == (term.model is None),
        (f"{path}.function", f"{path}.model"),
        "a reward is a function or a model; give one of them",
    )
    yield Contradiction(
        term.function is None and bool(term.arguments),
        (f"{path}.arguments", f"{path}.model"),
        "are those of a function, and a reward model takes none; leave them out",
    )
    yield Contradiction(
        term.weight == 0,
        (f"{path}.weight",),
        "0, so that nothing is learned from the reward; leave the reward out, or give it a weight",
    )


def _loss(objective: Grpo) -> Iterator[Contradiction]:
    given, loss = objective.model_fields_set, objective.loss
    unread = {"sapo": ("epsilon", "epsilon_high", "delta"), "cispo": ("epsilon", "delta")}.get(loss, ())
    yield from (
        Contradiction(
            field in given and getattr(objective, field) is not None,
            (f"objective.{field}", "objective.loss"),
            f"set, but objective.loss '{loss}' has none; leave it out",
        )
        for field in unread
    )
    yield Contradiction(
        "delta" not in unread and objective.delta is not None and objective.delta < 1 + objective.highest_ratio,
        ("objective.delta", "objective.epsilon_high"),
        f"{objective.delta} is below 1 + epsilon_high, {1 + objective.highest_ratio:g}, up to which ratios count "
        "anyway; raise it, or leave it out",
    )


def _reference(adapter: Adapter, objective: Grpo) -> Iterator[Contradiction]:
    yield from (
        Contradiction(
            objective.beta > 0 and isinstance(adapter, Lora) and bool(getattr(adapter, field)),
            ("objective.beta", f"adapter.{field}"),
            f"above 0 takes the model without its adapter for the reference, but adapter.{field} makes that another "
            f"model than the initial one; set objective.beta to 0, or leave adapter.{field} out",
        )
        for field in ("modules_to_save", "init_from")
    )
    yield Contradiction(
        objective.beta > 0 and isinstance(adapter, Lora) and adapter.is_pissa,
        ("objective.beta", "adapter.init_lora_weights"),
        "above 0 takes the model without its adapter for the reference, but 'pissa' takes a part of the weights out of "
        "it; set objective.beta to 0, or leave adapter.init_lora_weights out",
    )


def _replacements(data: Data, objective: Grpo) -> Iterator[Contradiction]:
    used, field = objective.replacement_rounds > 0, "objective.replacement_rounds"
    yield Contradiction(
        used and not objective.filter_groups,
        (field, "objective.filter_groups"),
        f"{objective.replacement_rounds} replaces groups that objective.filter_groups leaves out, but it is false; "
        "set it to true, or leave objective.replacement_rounds out",
    )
    yield Contradiction(
        used and objective.generate_ahead,
        (field, "objective.generate_ahead"),
        "draws prompts when the rewards of a step are known, but objective.generate_ahead true generates the next "
        "step's answers before; set it to false, or leave objective.replacement_rounds out",
    )
    yield Contradiction(
        used and data.shuffle == "window",
        (field, "data.shuffle"),
        "draws prompts from all rows, but 'window' reads only some of them at a time; set data.shuffle to 'global', or "
        "leave objective.replacement_rounds out",
    )


def _resume(spec: RunSpec, objective: Grpo) -> Iterator[Contradiction]:
    """A run that resumes between steps that share answers, or their weights, would generate others."""
    checkpoint, faults = spec.checkpoint, spec.faults
    count, ahead = objective.num_iterations, objective.generate_ahead
    every = checkpoint.interval or count
    yield Contradiction(
        every % count != 0,
        ("checkpoint.every", "objective.num_iterations"),
        f"{every} is not a multiple of objective.num_iterations {count}: a run that resumes in between "
        f"would generate other answers; set it to one, for example {count * max(1, every // count)}",
    )
    yield Contradiction(
        count > 1 and checkpoint.per_epoch is not None,
        ("checkpoint.per_epoch", "objective.num_iterations"),
        f"may save between the {count} steps of objective.num_iterations, and a run that resumes there would generate "
        f"other answers; set checkpoint.every to a multiple of {count} instead",
    )
    yield Contradiction(
        count > 1 and ahead,
        ("objective.generate_ahead", "objective.num_iterations"),
        f"true, but {count} steps learn from the same answers, which are older than one step anyway; set "
        "objective.generate_ahead to false, or objective.num_iterations to 1",
    )
    field, off = ("objective.generate_ahead", "false") if ahead else ("objective.num_iterations", "1")
    yield from (
        Contradiction(
            (count > 1 or ahead) and given,
            (path, field),
            f"saves where the next step's answers are there already, so that a run that resumes would generate others; "
            f"{way_out}, or set {field} to {off}",
        )
        for path, given, way_out in (
            ("checkpoint.on_sigterm", checkpoint.on_sigterm == "save", "set it to 'stop'"),
            ("checkpoint.keep_best", checkpoint.keep_best, "set it to false"),
            ("resources.time_limit", spec.resources.time_limit is not None, "leave it out"),
        )
    )
    yield from (
        Contradiction(
            ahead and getattr(faults, name) == "rollback",
            (f"faults.{name}", "objective.generate_ahead"),
            "'rollback' skips data whose answers are there already; set it to 'skip' or 'stop', or "
            "objective.generate_ahead to false",
        )
        for name in ("nonfinite", "spike")
    )
