"""Checks that stop a run before it spends anything: one table, and the code that runs a part of it.

`python -m tasks.runtime.preflight` prints the table; so does `strata spec --checks`. A row names its check function
instead of importing it, because printing the table must not take the seconds that torch needs to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, Literal

Needs = Literal["spec", "data", "weights"]
Where = Literal["plan", "launch", "pod", "rank 0", "export"]

WHERE: dict[Where, str] = {
    "plan": "the first task of the Flyte workflow",
    "launch": "rank 0 of `python -m tasks.runtime`, before it prepares the data",
    "pod": "every process, before the process group exists",
    "rank 0": "rank 0, before training; the other ranks raise the same error",
    "export": "the process that exports the model",
}


@dataclass(frozen=True)
class Check:
    """One precondition of a run."""

    name: str
    where: tuple[Where, ...]
    function: str
    """`module:name` below `tasks.runtime`. It returns None, or raises ValueError with the field and what to do."""
    takes: tuple[str, ...]
    """Arguments of `function`: names of arguments of `run_checks`, or paths into the spec such as `spec.export`."""
    requires: str
    """The condition, for the printed table."""

    @property
    def needs(self) -> Needs:
        """The last thing that has to exist before the check can run: a spec, prepared data, or a model's weights."""
        if "model" in self.takes:
            return "weights"
        return "data" if "data" in self.takes else "spec"

    def run(self, arguments: dict[str, Any]) -> None:
        """Call the check. Raises ValueError, or `Unreachable` if the check reads from a Hub that does not answer."""
        module, _, path = self.function.partition(":")
        function: Any = reduce(getattr, path.split("."), import_module(f"tasks.runtime.{module}"))
        paths = [taken.split(".") for taken in self.takes]
        function(*(reduce(getattr, fields, arguments[name]) for name, *fields in paths))


# In the order in which they run. `spec` comes before `data`, and `data` before `weights`, at each place.
CHECKS = (
    Check(
        "process count",
        ("pod",),
        "process.ranks:Processes.require_world_size",
        ("processes", "spec.topology"),
        "as many processes were started as topology states",
    ),
    Check(
        "local files",
        ("launch",),
        "data:require_local_files",
        ("spec",),
        "the files and folders that the spec names exist, and output is no file",
    ),
    Check(
        "models of stages",
        ("plan",),
        "data:require_no_stages",
        ("spec",),
        "no model is run:NAME, which workflows/align.py alone resolves",
    ),
    Check(
        "code of the model",
        ("plan", "launch", "pod"),
        "models.custom_code:register_custom_code",
        ("spec.model",),
        "the model's own code, if it brings some, is what model.trust_remote_code names; the process loads it",
    ),
    Check(
        "text input",
        ("plan", "launch"),
        "models.text_input:require_text_input",
        ("spec.model",),
        "the model takes the tokens of a text, needs no other input, and attends to no later token",
    ),
    Check(
        "pretrained weights",
        ("plan", "launch"),
        "models.pretrained:require_complete_weights",
        ("spec.model", "spec.objective"),
        "tensors in the local folders of model.name and objective.teacher are those of their config.json",
    ),
    Check(
        "export formats",
        ("plan", "launch"),
        "export.serving_formats:require_formats",
        ("spec.export", "spec.model", "spec.data", "spec.adapter"),
        "the packages of export.formats are installed, and gguf has a counterpart of the model and its tokenizer",
    ),
    Check(
        "attention",
        ("plan", "launch"),
        "models.config:require_attention",
        ("spec.model",),
        "the model's class supports model.attention",
    ),
    Check(
        "kernels",
        ("plan", "launch"),
        "models.planned_model:require_kernels",
        ("spec.model", "spec.kernels"),
        "with kernels.enabled true, every operator has its place; the loss is fused or transformers' own",
    ),
    Check(
        "frozen weights",
        ("plan", "launch"),
        "models.planned_model:require_names_of_weights",
        ("spec.model",),
        "the names in model.freeze or model.trainable are those of weights, and some weights are left to train",
    ),
    Check(
        "adapter",
        ("plan", "launch"),
        "models.adapters.lora:require_adapter",
        ("spec",),
        "the model has what the adapter names, and PEFT can read it if export.formats has 'adapter'",
    ),
    Check(
        "expert parallelism",
        ("plan", "launch"),
        "parallel.expert:require_expert_parallel_support",
        ("spec",),
        "the fused operator computes the model's experts, and parallel.expert_parallel divides them",
    ),
    Check(
        "reward model",
        ("plan", "launch"),
        "models.score_head:require_score_head",
        ("spec.model",),
        "with objective.type reward, transformers has a model of the family that scores texts, by one score",
    ),
    Check(
        "packed rows",
        ("plan", "launch"),
        "models.attention.packing_support:require_planned_packing_support",
        ("spec",),
        "a small model of the same configuration keeps the sequences of a row apart",
    ),
    Check(
        "planned images and audio",
        ("plan", "launch"),
        "models.media.multimodal:require_planned_media_support",
        ("spec",),
        "where the spec names images or audio, the model's family and the parallelism support them",
    ),
    Check(
        "own objective",
        ("plan", "launch"),
        "objectives:require_objective",
        ("spec.objective",),
        "Python can import objective.object, and it takes objective.arguments",
    ),
    Check(
        "rewards",
        ("plan", "launch"),
        "rewards.scoring:require_rewards",
        ("spec.objective",),
        "Python can import the functions of objective.rewards, they take their arguments, its models have a score",
    ),
    Check(
        "callbacks",
        ("plan", "launch"),
        "extensions.callback_runner:require_callbacks",
        ("spec.runtime.callbacks",),
        "Python can import the callbacks in runtime.callbacks, and they take their arguments",
    ),
    Check(
        "export targets",
        ("launch", "export"),
        "export.publish:require_export_targets",
        ("spec.export", "spec.name"),
        "export.push_to_hub has a token; export.url can be read and holds only exports of this run",
    ),
    Check(
        "evaluation tasks",
        ("plan", "launch"),
        "evaluation.lm_eval_harness:require_tasks",
        ("spec.evaluation.tasks",),
        "lm-evaluation-harness is installed and knows every name in evaluation.tasks",
    ),
    Check(
        "tracker settings",
        ("plan",),
        "metrics.trackers:require_planned_trackers",
        ("spec.tracking", "spec.resources"),
        "the packages of tracking.report_to are installed; without resources.pod_template their variables are set",
    ),
    Check(
        "trackers",
        ("pod",),
        "metrics.trackers:require_trackers",
        ("spec.tracking",),
        "the packages of tracking.report_to are installed and their environment variables are set",
    ),
    Check(
        "packages",
        ("plan", "pod"),
        "parallel:require_packages",
        ("spec",),
        "the optional packages of parallel, adapter, optimizer and model.attention are installed",
    ),
    Check(
        "engine of generation",
        ("plan", "pod"),
        "generation:require_engine",
        ("spec.objective",),
        "the package of objective.generation.engine is installed",
    ),
    Check(
        "cache of generation",
        ("plan", "launch"),
        "generation:require_shared_cache",
        ("spec.model", "spec.objective"),
        "where the embedded engine generates, the model keeps its state in transformers' common cache",
    ),
    Check(
        "FP8 on the GPU",
        ("pod",),
        "models.float8:require_float8",
        ("spec.training",),
        "with training.float8, the GPU has tensor cores for FP8",
    ),
    Check(
        "layers in FP8",
        ("plan", "launch"),
        "models.float8:require_float8_layers",
        ("spec.model", "spec.training"),
        "with training.float8, the model has linear layers whose sizes FP8 products take",
    ),
    Check(
        "tensor parallelism",
        ("rank 0",),
        "parallel.tensor:require_tensor_parallel_support",
        ("spec.model", "spec.parallel"),
        "transformers has a sharding plan for the model, and parallel.tensor_parallel divides its heads and widths",
    ),
    Check(
        "context parallelism",
        ("rank 0",),
        "parallel.context:require_context_parallel_support",
        ("spec.model", "spec.parallel"),
        "with parallel.context_parallel, attention is the only operation of the model across a row",
    ),
    Check(
        "position embeddings",
        ("rank 0",),
        "models.attention.packing_support:require_position_embeddings",
        ("spec.model", "spec.data.sequence_length"),
        "data.sequence_length is within the positions that the model has learned",
    ),
    Check(
        "token embeddings",
        ("rank 0",),
        "models.build:require_embeddings",
        ("spec.model", "data"),
        "the model has an embedding for every token of the prepared rows",
    ),
    Check(
        "images and audio",
        ("rank 0",),
        "models.media.multimodal:require_media_support",
        ("spec", "data"),
        "with images or audio in the rows, the model's family and the parallelism support them",
    ),
    Check(
        "validation rows",
        ("rank 0",),
        "evaluation.during_training:require_validation_rows",
        ("spec.evaluation", "data"),
        "with evaluations during training, the prepared data has rows to evaluate on",
    ),
    Check(
        "columns of rewards",
        ("rank 0",),
        "rewards.scoring:require_reward_columns",
        ("spec.objective", "data"),
        "the prepared prompts have the columns that the functions of objective.rewards need",
    ),
    Check(
        "teacher's vocabulary",
        ("rank 0",),
        "objectives:require_same_tokens",
        ("spec.objective", "data"),
        "objective.teacher gives the tokens of the data the same numbers",
    ),
    Check(
        "packing",
        ("rank 0",),
        "models.attention.packing_support:require_packing_support",
        ("model", "spec"),
        "with data.packing or pairs of answers, no sequence of a row depends on another",
    ),
)


def run_checks(where: Where, *needs: Needs, **arguments: Any) -> None:
    """Run the rows of one place that need `needs`, in the order of the table.

    `arguments` holds what the rows take: `spec`, `processes`, `data`, `model`. Call it on one process, inside
    `Processes.on_main` where the others must hear of an error: one collective for all rows.

    Raises:
        ValueError: the run cannot work as specified.
    """
    for check in CHECKS:
        if where in check.where and check.needs in needs:
            check.run(arguments)


def table() -> str:
    """The checks as aligned text, one line each."""
    rows = [("check", "needs", "runs in", "requires that")]
    rows += [(check.name, check.needs, ", ".join(check.where), check.requires) for check in CHECKS]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return "\n".join([*lines, "", *(f"{name}: {meaning}" for name, meaning in WHERE.items())])


if __name__ == "__main__":
    print(table())
