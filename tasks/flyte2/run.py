"""The tasks of a run. Their bodies are the functions of `tasks.steps`; folders travel as `flyte.io.Dir`."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import flyte
import flyte.report
from flyte.io import Dir, File

from strata_platform import kept_log, progress_line
from strata_platform.pod_settings import RETRIES
from strata_platform.spec import DataRecipe, RunSpec
from tasks.flyte2.files import fetched, is_local, stored
from tasks.flyte2.final_errors import final_unless_retried
from tasks.flyte2.pod_overrides import IMAGE, size
from tasks.runtime.metrics import startup
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.folder import data_folder
from tasks.runtime.run_folder.kept_logs import copy_preparation_logs
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps import finish_step, prepare_step
from tasks.steps.agent import train_in_pod
from tasks.steps.pod_log import pod_log
from tasks.steps.pod_sizes import CONTROL, PREPARE
from tasks.steps.train_step import ENVIRONMENT

preparing = flyte.TaskEnvironment("strata-prepare", image=IMAGE, resources=size(PREPARE))
training = flyte.TaskEnvironment("strata-train", image=IMAGE, env_vars=ENVIRONMENT)
finishing = flyte.TaskEnvironment("strata-finish", image=IMAGE, env_vars={progress_line.VARIABLE: "1"})
control = flyte.TaskEnvironment(
    "strata", image=IMAGE, resources=size(CONTROL), depends_on=[preparing, training, finishing]
)


class Prepared(NamedTuple):
    """The folder of prepared data, and shares of its parts that are left to prepare, as `source:first-last`."""

    data: Dir
    shares: list[str]


class Trained(NamedTuple):
    """The outputs of a training task."""

    record: CompletionRecord
    weights: Dir


class Exported(NamedTuple):
    """The outputs of a run."""

    model: Dir
    report: File
    record: File


# All are coroutines that block. Flyte runs them in the main thread of their pod, where they get SIGTERM, and other
# functions in another thread.


@preparing.task(retries=RETRIES)
async def prepare(recipe: DataRecipe, output: str, url: str, spec: RunSpec) -> Prepared:
    """Tokenize and pack; with a URL only plan it. spec: the run that has it prepared, where the log is kept."""
    configure_logging()
    with final_unless_retried(), pod_log(spec, kept_log.PREPARE, local=is_local(), data=data_folder(output, recipe)):
        folder, shares = prepare_step.prepare(recipe, output, url)
        data = await stored(folder)
        if not url and not is_local():
            prepare_step.note_stored(folder, data.path)
        return Prepared(data, shares)


@preparing.task(retries=RETRIES)
async def prepare_share(data: Dir, share: str, spec: RunSpec) -> int:
    """Prepare a range of parts, without those that are done, and write them to the store. Returns their number."""
    configure_logging()
    with final_unless_retried(), pod_log(spec, kept_log.PREPARE, local=is_local()):
        return prepare_step.prepare_share(await fetched(data), share)


@control.task(retries=RETRIES)
async def complete(data: Dir, spec: RunSpec) -> Dir:
    """Write the manifests after all parts."""
    configure_logging()
    with final_unless_retried(), pod_log(spec, kept_log.PREPARE, local=is_local()):
        folder = await fetched(data)
        prepare_step.complete(folder)
        return await stored(folder)


@training.task(retries=RETRIES)
async def train(spec: RunSpec, data: Dir) -> Trained:
    """Train in all processes of this pod, under an elastic agent."""
    startup.mark_pod()
    with final_unless_retried():
        folder = await fetched(data)
        startup.mark("data")
        with pod_log(spec, kept_log.TRAIN, local=is_local()) as keep_the_rest:
            record, weights = train_in_pod(spec, folder, keep_the_rest)
        # The processes are gone, so the GPUs are idle while the store is waited for.
        return Trained(record, await stored(weights))


@finishing.task(retries=RETRIES, report=True)
async def finish(spec: RunSpec, record: CompletionRecord, weights: Dir, data: Dir) -> Exported:
    """Evaluate a complete run, and write the model, the report and the record. The report is also the task's."""
    configure_logging()
    with final_unless_retried():
        folders = await fetched(weights), await fetched(data)
        with pod_log(spec, kept_log.FINISH, local=is_local()):
            done = finish_step.finish(spec, record, *folders)
        await flyte.report.replace.aio(done.report)
        outputs = Exported(
            await stored(done.folder.model), await stored(done.folder.report), await stored(done.folder.record)
        )
        if not is_local():
            addresses = (output.path for output in outputs)
            noted = finish_step.Outputs(finish_step.spec_hash(spec), done.recipe_hash, *addresses)
            finish_step.note_outputs(done.folder, noted)
        return outputs


def plan(spec: RunSpec) -> prepare_step.Planned:
    """Reject a run that cannot work before it costs anything, and identify its data by content."""
    configure_logging()
    if is_local() and spec.topology.nnodes > 1:
        raise ValueError(
            f"topology.nnodes is {spec.topology.nnodes}, and --local is one machine; leave it out for a cluster, or "
            "set topology.nnodes to 1"
        )
    return prepare_step.plan(spec, local=is_local())


async def found(planned: prepare_step.Planned, spec: RunSpec) -> Dir | None:
    """Prepared data that an earlier run with this recipe and output folder stored, if they are still there."""
    if is_local():
        return None
    address = prepare_step.stored_data(planned)
    if address is not None and not await Dir.from_existing_remote(address).exists():
        address = None
    prepare_step.log_data_source(planned, address)
    if address or planned.url:
        await asyncio.to_thread(copy_preparation_logs, spec, data_folder(planned.output, planned.recipe))
    return Dir.from_existing_remote(address) if address else None


async def finished(spec: RunSpec, recipe: DataRecipe) -> Exported | None:
    """The outputs of a run that has finished on a cluster with this very spec and these data, if all are stored."""
    noted = None if is_local() else finish_step.stored_outputs(spec, recipe)
    if noted is None:
        return None
    outputs = Exported(
        Dir.from_existing_remote(noted.model),
        File.from_existing_remote(noted.report),
        File.from_existing_remote(noted.record),
    )
    are_there = await asyncio.gather(*(output.exists() for output in outputs))
    return outputs if all(are_there) else None
