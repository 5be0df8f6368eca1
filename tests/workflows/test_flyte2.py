"""What Flyte 2 is sent, and when it tries again. A cluster would run exactly this; test_finetune.py has a whole run."""

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import flyte
import pytest
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext
from flyte.types import TypeEngine
from google.protobuf.json_format import MessageToDict

from strata_platform.outcomes import UNREACHABLE, RunError
from strata_platform.pod_settings import GRACE_SECONDS, RETRIES
from strata_platform.spec import RunSpec
from tasks.flyte2 import run
from tasks.flyte2.final_errors import final_unless_retried
from tasks.flyte2.pod_overrides import job, overrides
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps.retry import Retry
from tasks.steps.train_step import MAX_RESTARTS
from tests.workflows.test_serialization import TASKS as FLYTE_1
from tests.workflows.test_serialization import template
from workflows.flyte2.finetune import finetune

ROOT = Path(__file__).parents[2]
IMAGE = "registry.example/strata:1"


def sent(task):
    """What is sent of a task, as the SDK writes it."""
    from flyte._internal.image_cache import ImageCache

    names = (run.control.name, run.preparing.name, run.training.name, run.finishing.name)
    context = SerializationContext(
        version="v",
        project="p",
        domain="d",
        root_dir=ROOT,
        image_cache=ImageCache(image_lookup=dict.fromkeys(names, IMAGE)),
    )
    return MessageToDict(translate_task_to_wire(task, context).task_template, preserving_proto_field_name=True)


def trained_by(spec):
    return sent(run.train.override(**overrides(spec.resources, trains=True), plugin_config=job(spec.topology)))


def spec_of(shape=(1, 1), **resources):
    return RunSpec.model_validate({
        "topology": {"nnodes": shape[0], "nproc_per_node": shape[1]}, "resources": resources,
        "parallel": {"type": "single" if shape == (1, 1) else "ddp"},
    })  # fmt: skip


def container(task):
    return task["k8s_pod"]["pod_spec"]["containers"][0]


def test_several_pods_are_the_job_that_flyte_1_makes_of_them():
    task, before = trained_by(spec_of((16, 8))), template(FLYTE_1[16, 8])
    assert (task["type"], task["task_type_version"]) == (before.type, before.task_type_version) == ("pytorch", 1)
    assert task["custom"]["elasticConfig"] == {
        "rdzvBackend": "c10d", "minReplicas": 16.0, "maxReplicas": 16.0, "nprocPerNode": 8.0,
        "maxRestarts": float(MAX_RESTARTS),
    }  # fmt: skip
    assert task["custom"] == before.custom
    # A shape that no task of Flyte 1 has.
    assert trained_by(spec_of((3, 5)))["custom"]["workerReplicas"] == {"replicas": 3.0}


def test_one_pod_needs_no_training_operator():
    task = trained_by(spec_of((1, 8)))
    assert task["type"] == "python"
    assert "custom" not in task


@pytest.mark.parametrize("shape", [(1, 8), (2, 8)], ids=["pod", "job"])
def test_pods_of_training(shape):
    spec = spec_of(
        shape, cpu="3", memory="9Gi", gpu=8, gpu_type="NVIDIA-H100-80GB-HBM3", shared_memory="5Gi", queue="research",
        priority="urgent", time_limit=7200,
    )  # fmt: skip
    task = trained_by(spec)
    pod, main = task["k8s_pod"], container(task)
    # Kueue reads them from the pod, or from the job, where Flyte's plugin copies them.
    assert pod["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "urgent",
        "kueue.x-k8s.io/max-exec-time-seconds": "10800",
    }  # fmt: skip
    assert pod["pod_spec"]["terminationGracePeriodSeconds"] == GRACE_SECONDS
    assert main["image"] == IMAGE
    assert main["resources"]["requests"] == {"cpu": "3", "memory": "9Gi", "gpu": "8"}
    assert {name: main["resources"]["limits"][name] for name in ("cpu", "memory")} == {"cpu": "3", "memory": "9Gi"}
    assert task["extended_resources"]["gpu_accelerator"]["device"] == "NVIDIA-H100-80GB-HBM3"
    assert task["extended_resources"]["shared_memory"]["size_limit"] == "5Gi"
    given = {variable["name"]: variable["value"] for variable in main["env"]}
    of_flyte_1 = template(FLYTE_1[shape]).k8s_pod.pod_spec["containers"][0]["env"]
    assert given == {variable["name"]: variable["value"] for variable in of_flyte_1}
    assert task["metadata"]["retries"]["retries"] == RETRIES
    assert main["args"][-6:] == [
        "--resolver", "flyte._internal.resolvers.default.DefaultTaskResolver", "mod", "tasks.flyte2.run", "instance",
        "train",
    ]  # fmt: skip


def test_evaluation_takes_one_gpu_and_no_time_limit():
    asked = spec_of((2, 8), gpu=8, queue="research", time_limit=7200).resources
    task = sent(run.finish.override(**overrides(asked, gpus=1)))
    assert container(task)["resources"]["requests"]["gpu"] == "1"
    assert task["k8s_pod"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    assert task["metadata"]["generates_deck"] is True


def test_a_pod_template_is_named_and_then_has_the_labels_itself():
    assert trained_by(spec_of(pod_template="strata-rdma"))["metadata"]["pod_template_name"] == "strata-rdma"
    with pytest.raises(ValueError, match=r"pod_template is 'strata-rdma', and resources\.queue, resources\.time_limit"):
        trained_by(spec_of(pod_template="strata-rdma", queue="research", time_limit=60))


@pytest.mark.parametrize("task", [finetune, run.prepare, run.prepare_share, run.complete, run.train, run.finish])
def test_a_pod_of_any_task_may_be_lost_and_loads_it_by_its_module(task):
    found = sent(task)
    assert found["metadata"]["retries"]["retries"] == RETRIES
    assert found.get("container", {}).get("image", IMAGE) == IMAGE
    module = "workflows.flyte2.finetune" if task is finetune else "tasks.flyte2.run"
    assert found["container"]["args"][-4:] == ["mod", module, "instance", task.short_name]


def test_every_environment_is_deployed_with_the_workflow():
    assert set(map(id, run.control.depends_on)) == set(map(id, (run.preparing, run.training, run.finishing)))


def test_a_pod_loads_nothing_of_flyte_1_and_no_torch_to_find_its_task():
    code = "import sys, workflows.flyte2.finetune; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert not {"flytekit", "torch", "transformers", "flyte.cli.main"} & set(loaded.split())


def test_the_spec_and_the_record_travel_as_msgpack_never_as_a_pickle():
    record = CompletionRecord(
        status="complete", name="n", spec_hash="h", steps=1, steps_asked=1, tokens=1, target_tokens=1,
        train_loss=float("nan"), checkpoint="c", restarts=0, seconds=1.0, tokens_per_second=1.0, peak_memory_bytes=1,
        parameters=1, device="d", trainable_parameters=1, world_size=1, data={"read": 1}, kernels={}, versions={},
        warmup={"compiled": [{"name": "k", "seconds": 0.5}]},
    )  # fmt: skip

    async def there_and_back(value):
        kind = type(value)
        literal = await TypeEngine.to_literal(value, kind, TypeEngine.to_literal_type(kind))
        return literal.scalar.binary.tag, await TypeEngine.to_python_value(literal, kind)

    for value in (spec_of((2, 8), gpu=8), record):
        tag, back = asyncio.run(there_and_back(value))
        assert tag == "msgpack"
        assert back.model_dump_json() == value.model_dump_json()


class Away(RunError):
    outcome = UNREACHABLE


ENDS = {"Retry": Retry("lost a peer"), "away": Away("no answer"), "mistake": ValueError("training.steps is too large")}
trying = flyte.TaskEnvironment("trying")


@trying.task(retries=flyte.RetryStrategy(2, flyte.Backoff(base=timedelta(0))))
def ends(how: str, log: str) -> str:
    with Path(log).open("a") as file:
        file.write("attempt\n")
    with final_unless_retried():
        if Path(log).read_text().count("attempt") == 1:
            raise ENDS[how]
    return "done"


@pytest.mark.parametrize(("how", "attempts"), [("Retry", 2), ("away", 2), ("mistake", 1)])
def test_only_what_another_attempt_may_mend_is_tried_again(how, attempts, tmp_path):
    flyte.init()
    log = tmp_path / "log"
    if attempts == 1:
        with pytest.raises(flyte.errors.RuntimeUserError, match=r"training\.steps is too large"):
            flyte.with_runcontext(mode="local").run(ends, how=how, log=str(log))
    else:
        assert flyte.with_runcontext(mode="local").run(ends, how=how, log=str(log)).outputs()[0] == "done"
    assert len(log.read_text().split()) == attempts


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("finishes", "RESULT rank 0 of 2"),
        # The agent may tell of the other process, which lost this one.
        ("misused", "RuntimeError process 1 of this pod: ValueError: training.micro_batch_size is too large"),
        ("killed", "Retry rank 1: a process was killed by SIGKILL; the machine is gone"),
        # As what Flyte leaves no error for: the attempt may go on when the job is resumed.
        ("stopped", "SystemExit 143"),
    ],
)
def test_how_a_pod_ends(how, said, tmp_path):
    # In a process of its own, whose main thread gets the signals.
    command = [sys.executable, "-m", "tests.workflows.helpers.agent_processes", how, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert said in ended.stdout, ended.stderr
