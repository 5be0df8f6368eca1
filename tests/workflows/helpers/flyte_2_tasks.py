"""Tasks of Flyte 2 for its tests, and what is sent of a task. Imported in tests: it imports Flyte 2's SDK."""

from datetime import timedelta
from pathlib import Path

import flyte
from flyte._internal.image_cache import ImageCache
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext
from google.protobuf.json_format import MessageToDict

from strata_platform.outcomes import UNREACHABLE, RunError
from tasks.flyte2 import run
from tasks.flyte2.final_errors import final_unless_retried
from tasks.flyte2.pod_overrides import job, overrides
from tasks.steps.retry import Retry
from workflows.flyte2.finetune import finetune

IMAGE = "registry.example/strata:1"
TASKS = {
    task.short_name: task for task in (finetune, run.prepare, run.prepare_share, run.complete, run.train, run.finish)
}


def sent(task):
    """What is sent of a task, as the SDK writes it."""
    names = (run.control.name, run.preparing.name, run.training.name, run.finishing.name)
    context = SerializationContext(
        version="v",
        project="p",
        domain="d",
        root_dir=Path(__file__).parents[3],
        image_cache=ImageCache(image_lookup=dict.fromkeys(names, IMAGE)),
    )
    return MessageToDict(translate_task_to_wire(task, context).task_template, preserving_proto_field_name=True)


def trained_by(spec):
    return sent(run.train.override(**overrides(spec.resources, trains=True), plugin_config=job(spec.topology)))


class Away(RunError):
    outcome = UNREACHABLE


MISTAKE = ValueError("training.steps is too large")
ENDS = {
    "Retry": Retry("lost a peer"),
    "away": Away("no answer"),
    "mistake": MISTAKE,
    "mistakes": ExceptionGroup("two processes", [MISTAKE]),
}
trying = flyte.TaskEnvironment("trying")


@trying.task(retries=flyte.RetryStrategy(2, flyte.Backoff(base=timedelta(0))))
def ends(how: str, log: str) -> str:
    with Path(log).open("a") as file:
        file.write("attempt\n")
    with final_unless_retried():
        if Path(log).read_text().count("attempt") == 1:
            raise ENDS[how]
    return "done"
