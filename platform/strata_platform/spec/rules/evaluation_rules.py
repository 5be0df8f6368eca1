"""Rules of the section `evaluation`, and of the checkpoints that depend on evaluation during training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Checkpoint, Evaluation, RunSpec


def evaluation_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not."""
    yield from _tasks(spec.evaluation)
    yield from _evaluation(spec.evaluation, spec.checkpoint)
    yield from _during(spec)


def _tasks(evaluation: Evaluation) -> Iterator[Contradiction]:
    yield from (
        Contradiction(
            value is not None and not evaluation.tasks,
            (f"evaluation.{field}", "evaluation.tasks"),
            f"set, but evaluation.tasks names none; name some, or leave evaluation.{field} out",
        )
        for field, value in (("few_shot", evaluation.few_shot), ("task_limit", evaluation.task_limit))
    )


def _evaluation(evaluation: Evaluation, checkpoint: Checkpoint) -> Iterator[Contradiction]:
    dependent = {
        "evaluation.during": bool(evaluation.during),
        "evaluation.early_stopping_patience": evaluation.early_stopping_patience is not None,
        "checkpoint.keep_best": checkpoint.keep_best,
    }
    yield from (
        Contradiction(
            given and evaluation.interval_field is None,
            (field, "evaluation.every", "evaluation.per_epoch"),
            "set, but neither evaluation.every nor evaluation.per_epoch is, so that nothing is evaluated during "
            f"training; set one of them, or leave {field} out",
        )
        for field, given in dependent.items()
    )
    yield Contradiction(
        evaluation.every is not None and evaluation.per_epoch is not None,
        ("evaluation.per_epoch", "evaluation.every"),
        "contradicts evaluation.every; give one of them",
    )
    yield Contradiction(
        evaluation.early_stopping_threshold > 0 and evaluation.early_stopping_patience is None,
        ("evaluation.early_stopping_threshold", "evaluation.early_stopping_patience"),
        "set, but evaluation.early_stopping_patience is not; set that, or leave "
        "evaluation.early_stopping_threshold out",
    )
    yield Contradiction(
        checkpoint.load_best_model_at_end and not checkpoint.keep_best,
        ("checkpoint.load_best_model_at_end", "checkpoint.keep_best"),
        "needs the best checkpoint, which checkpoint.keep_best keeps; set checkpoint.keep_best to true, or leave "
        "checkpoint.load_best_model_at_end out",
    )
    yield from (
        Contradiction(
            what in evaluation.during and not given,
            ("evaluation.during", f"evaluation.{what}"),
            f"has '{what}', but evaluation.{what} asks for none; set it, or leave '{what}' out of evaluation.during",
        )
        for what, given in (("samples", evaluation.samples), ("tasks", evaluation.tasks))
    )


def _during(spec: RunSpec) -> Iterator[Contradiction]:
    evaluation, parallel = spec.evaluation, spec.parallel
    sources = spec.data.single_sources()
    yield Contradiction(
        evaluation.interval_field is not None
        and not any(source.validation_only or source.data.validation_fraction for source in sources),
        (evaluation.interval_field or "evaluation.every", "data.validation_fraction"),
        "set, but data.validation_fraction 0 holds no rows out to evaluate on; set data.validation_fraction or "
        f"data.validation_source, or leave {evaluation.interval_field} out",
    )
    sharded = parallel.type == "fsdp" or (parallel.type == "deepspeed" and parallel.stage == 3)
    yield Contradiction(
        bool(evaluation.during) and sharded,
        ("evaluation.during", "parallel.type"),
        f"generates with the whole model on one process, but parallel.type '{parallel.type}' shards its weights; leave "
        "evaluation.during out, which keeps the validation loss, or set parallel.type to 'ddp'",
    )
    yield Contradiction(
        bool(evaluation.during) and spec.training.compile,
        ("evaluation.during", "training.compile"),
        "generates texts of any length, for which compiled layers would be compiled again; leave evaluation.during "
        "out, or set training.compile to false",
    )
