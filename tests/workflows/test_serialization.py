"""What is sent to Flyte: task types, payloads, pods, names. A cluster would run exactly this."""

import copy
import importlib
import runpy
import subprocess
import sys
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.core.types import BlobType
from flytekit.models.launch_plan import LaunchPlan
from flytekit.models.task import Resources
from flytekit.tools.translator import get_serializable
from flytekitplugins.kfpytorch import CleanPodPolicy

from strata_platform.pod_settings import GRACE_SECONDS, RETRIES
from strata_platform.spec import RunSpec, load_spec
from tasks import topology
from tasks.prepare import plan
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps.train_step import MAX_RESTARTS
from tasks.topology import SHAPES, task_for, training_task
from tests.workflows.helpers.flyte_1_templates import SETTINGS, template
from workflows.finetune import finetune, train_on_parts
from workflows.scheduled import scheduled
from workflows.sweep import run_all

ROOT = Path(__file__).parents[2]
TASKS = {shape: training_task(*shape) for shape in SHAPES}


def sent_with(entity):
    """All that is registered with `entity`, by name."""
    entities = OrderedDict()
    get_serializable(entities, SETTINGS, entity)
    sent = [e if isinstance(e, LaunchPlan) else getattr(e, "template", None) for e in entities.values()]
    return {one.id.name: one for one in sent if one}


@pytest.fixture(scope="module")
def registered():
    return sent_with(finetune)


def test_flytes_type_of_a_spec_is_flytekits_and_made_once():
    found = TypeEngine.to_literal_type(RunSpec)
    assert found.to_flyte_idl() == PydanticTransformer().get_literal_type(RunSpec).to_flyte_idl()
    assert TypeEngine.to_literal_type(RunSpec) is found


FINETUNE = {
    "workflows.finetune.finetune",
    "tasks.prepare.prepare",
    "workflows.finetune.start",
}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("workflows.finetune.finetune", set()),
        ("workflows.pretrain.pretrain", set()),
        ("workflows.sweep.trial", {"workflows.sweep.one_run", "tasks.sweep.read_record"}),
        (
            "workflows.sweep.sweep",
            {"tasks.sweep.expand", "tasks.sweep.compare", "tasks.sweep.read_record", "tasks.sweep.name_failures"}
            | {"workflows.sweep.trial", "workflows.sweep.one_run", "workflows.sweep.run_all"},
        ),
        (
            "workflows.scheduled.scheduled",
            {"tasks.scheduled.dated_spec", "tasks.scheduled.announce", "tasks.scheduled.announce_failure"},
        ),
    ],
)
def test_names_are_those_of_the_modules(name, others):
    module, _, attribute = name.rpartition(".")
    sent = set(sent_with(getattr(importlib.import_module(module), attribute)))
    assert sent == others | {name} | FINETUNE


def test_names_of_the_stages_are_those_of_its_modules():
    """The stages themselves are known when they run."""
    sent = set(sent_with(importlib.import_module("workflows.align").align))
    assert sent == {"workflows.align.align", "workflows.align.run_stages", "tasks.align.check_stages"}


def test_names_of_the_verification_are_those_of_its_modules():
    sent = set(sent_with(importlib.import_module("workflows.verify").verify))
    assert sent == {"workflows.verify.verify", "workflows.verify.verify_as_trained"}


def test_a_pod_imports_no_command_line_to_load_a_task():
    loaded = "import sys, workflows.finetune, tasks.topology; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, text=True, capture_output=True, check=True)
    heavy = {"torch", "transformers", "datasets", "flytekit.clis.sdk_in_container.run"}
    assert not heavy & set(modules.stdout.split())


def test_every_workflow_is_looked_at():
    files = {path.stem for path in (ROOT / "workflows").glob("*.py")} - {"__init__"}
    assert files == {"align", "finetune", "pretrain", "scheduled", "sweep", "verify"}


def test_a_failed_run_is_told_of_by_the_tenants_secret():
    sent = sent_with(scheduled)
    failure = sent["workflows.scheduled.scheduled"].failure_node
    assert failure.task_node.reference_id.name == "tasks.scheduled.announce_failure"
    assert {binding.var for binding in failure.inputs} == {"spec", "kickoff_time", "err"}
    for name in ("announce", "announce_failure"):
        (secret,) = sent[f"tasks.scheduled.{name}"].security_context.secrets
        assert (secret.group, secret.key) == ("announcements", "url")


def test_the_example_of_a_schedule_is_switched_on_as_it_is_registered(monkeypatch):
    monkeypatch.chdir(ROOT)
    launch_plan = runpy.run_path("examples/nightly.py")["nightly"]
    assert launch_plan.should_auto_activate
    sent = sent_with(launch_plan)
    assert set(sent_with(scheduled)) < set(sent)
    spec = sent["nightly"].spec
    assert spec.workflow_id.name == "workflows.scheduled.scheduled"
    schedule = spec.entity_metadata.schedule
    assert (schedule.cron_schedule.schedule, schedule.kickoff_time_input_arg) == ("0 2 * * *", "kickoff_time")
    assert TypeEngine.to_python_value(
        FlyteContextManager.current_context(), spec.fixed_inputs.literals["spec"], RunSpec
    ) == load_spec(ROOT / "examples/llama-3.1-8b-lora.yaml")
    (mail,) = spec.entity_metadata.notifications
    assert mail.email.recipients_email == ["training@example.org"]


@pytest.mark.parametrize("shape", sorted(TASKS), ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_task_is_loaded_in_its_pod_by_the_name_it_is_registered_by(shape):
    name = f"train_{shape[0]}x{shape[1]}"
    found = template(TASKS[shape])
    assert found.id.name == f"tasks.topology.{name}"
    assert getattr(topology, name) is TASKS[shape]
    command = (found.container or found.k8s_pod.pod_spec["containers"][0]).args if found.container else None
    arguments = command or found.k8s_pod.pod_spec["containers"][0]["args"]
    assert arguments[-4:] == ["task-module", "tasks.topology", "task-name", name]


def test_one_pod_needs_no_training_operator():
    found = template(TASKS[1, 8])
    assert found.type == "python-task"
    assert not found.custom


def test_several_pods_are_a_pytorchjob_whose_shape_is_the_specs():
    found = template(TASKS[16, 8])
    assert found.type == "pytorch"
    assert found.task_type_version == 1
    custom = found.custom
    assert custom["elasticConfig"] == {
        "rdzvBackend": "c10d",
        "minReplicas": 16,
        "maxReplicas": 16,
        "nprocPerNode": 8,
        "maxRestarts": MAX_RESTARTS,
    }
    assert custom["workerReplicas"]["replicas"] == 16
    assert custom["runPolicy"] == {"cleanPodPolicy": "CLEANPOD_POLICY_RUNNING"}


@pytest.mark.parametrize("shape", [(1, 1), (2, 8)], ids=["1x1", "2x8"])
def test_pods_of_training(shape):
    found = template(TASKS[shape])
    assert found.metadata.retries.retries == RETRIES
    pod = found.k8s_pod.pod_spec
    assert pod["terminationGracePeriodSeconds"] == GRACE_SECONDS
    environment = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < GRACE_SECONDS
    assert environment["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "300"
    # The plugin's own way to enlarge /dev/shm writes to a template that tasks share.
    assert "volumes" not in pod


def test_rendezvous_waits_for_slow_pods():
    for task in TASKS.values():
        assert task.task_config.rdzv_configs == {"timeout": 900, "join_timeout": 900, "read_timeout": 900}
        assert task.task_config.run_policy.clean_pod_policy is CleanPodPolicy.RUNNING


def test_prepared_data_is_cached_by_the_recipe_alone(registered):
    prepare = registered["tasks.prepare.prepare"]
    assert prepare.metadata.discoverable
    assert set(prepare.interface.inputs) == {"recipe", "output", "url", "spec"}
    # The run that has it prepared is told for its log alone.
    assert set(prepare.metadata.cache_ignore_input_vars) == {"output", "spec"}
    assert prepare.interface.outputs["data"].type.blob.dimensionality == BlobType.BlobDimensionality.MULTIPART
    assert not any(
        registered[name].metadata.discoverable
        for name in registered
        if name not in ("tasks.prepare.prepare", "workflows.finetune.finetune")
    )


SPEC = RunSpec.model_validate(
    {
        "topology": {"nnodes": 2, "nproc_per_node": 8},
        "parallel": {"type": "ddp"},
        "resources": {"cpu": "32", "memory": "512Gi", "gpu": 8, "gpu_type": "NVIDIA-H200", "shared_memory": "64Gi"},
    }
)


def compiled(spec, shares=()):
    """What the dynamic task of large data makes for `spec` when it runs in a cluster."""
    return compiled_by(train_on_parts, spec=spec, data="s3://bucket/data", shares=list(shares))


def compiled_by(dynamic_task, **inputs):
    fresh = copy.copy(dynamic_task)
    # Flytekit keeps the workflow of the first call: a pod makes no other.
    fresh._wf = None
    context = FlyteContextManager.current_context().new_builder().with_serialization_settings(SETTINGS)
    with FlyteContextManager.with_context(context) as ctx:
        return fresh.compile_into_workflow(ctx, fresh.task_function, **inputs)


def test_each_run_of_a_sweep_is_an_execution_of_its_own():
    made = compiled_by(run_all, runs=[SPEC, SPEC.model_copy(update={"name": "other"})])
    assert [node.workflow_node.launchplan_ref.name for node in made.nodes] == ["workflows.sweep.trial"] * 2


@pytest.fixture(scope="module")
def nodes():
    """The nodes for the spec, by the task they run."""
    return {node.task_node.reference_id.name: node for node in compiled(SPEC).nodes}


def test_the_spec_chooses_the_training_task(nodes):
    assert set(nodes) == {"tasks.topology.train_2x8", "tasks.finish.finish"}


@pytest.mark.parametrize(
    ("task", "gpus"),
    [("tasks.topology.train_2x8", "8"), ("tasks.finish.finish", "1")],
)
def test_pods_get_what_the_spec_asks_for(nodes, task, gpus):
    overrides = nodes[task].task_node.overrides
    names = Resources.ResourceName
    for asked in (overrides.resources.requests, overrides.resources.limits):
        assert {(entry.name, entry.value) for entry in asked} == {
            (names.CPU, "32"),
            (names.MEMORY, "512Gi"),
            (names.GPU, gpus),
        }
    assert overrides.extended_resources.gpu_accelerator.device == "NVIDIA-H200"
    assert overrides.extended_resources.shared_memory.size_limit == "64Gi"


@pytest.fixture
def in_a_pod():
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield


def test_pods_without_a_common_folder_are_refused_before_they_start(in_a_pod):
    spec = RunSpec.model_validate({"topology": {"nnodes": 2, "nproc_per_node": 8}, "parallel": {"type": "ddp"}})
    with pytest.raises(ValueError, match=r"output 'out' is a folder inside each pod, but topology\.nnodes 2 pods"):
        plan(spec)


@pytest.mark.parametrize("gpus", [0, 8])
def test_several_processes_without_gpus_are_warned_of_in_a_pod(in_a_pod, gpus, capsys):
    spec = RunSpec.model_validate(
        {
            "output": "/runs",
            "topology": {"nproc_per_node": 8},
            "parallel": {"type": "ddp"},
            "resources": {"gpu": gpus},
        }
    )
    plan(spec)
    warned = "resources.gpu is 0: the 8 processes of each pod train on CPUs; set resources.gpu to 8"
    assert (warned in capsys.readouterr().out) == (gpus == 0)


@pytest.mark.parametrize(
    ("asked", "found", "problem"),
    [
        (
            {
                "parallel": {"type": "deepspeed"},
                "topology": {"nproc_per_node": 2},
                "tracking": {"report_to": []},
            },
            None,
            r"parallel\.type 'deepspeed' needs the package deepspeed.* install strata\[deepspeed\]",
        ),
        ({"tracking": {"report_to": ["wandb"]}}, None, r"'wandb', which is not installed"),
        (
            {"tracking": {"report_to": ["wandb"]}, "resources": {"pod_template": "own"}},
            None,
            r"'wandb', which is not installed",
        ),
        ({"tracking": {"report_to": ["wandb"]}}, "site.py", r"'wandb': set the environment variable WANDB_API_KEY"),
        ({"tracking": {"report_to": ["wandb"]}, "resources": {"pod_template": "own"}}, "site.py", None),
    ],
    ids=["strategy", "tracker", "tracker elsewhere", "nobody to tell", "told by the template"],
)
def test_what_the_image_lacks_is_said_before_data_are_prepared(asked, found, problem, monkeypatch):
    spec = RunSpec.model_validate(asked)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for module in ("parallel", "metrics.trackers"):
        installed = None if found is None else SimpleNamespace(origin=found)
        monkeypatch.setattr(f"tasks.runtime.{module}.find_spec", lambda name, installed=installed: installed)
    with nullcontext() if problem is None else pytest.raises(ValueError, match=problem):
        plan(spec)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=["pod", "job"])
def test_queue_priority_and_pod_template_are_asked_for_where_the_cluster_looks(shape):
    spec = RunSpec.model_validate(
        {
            "topology": {"nnodes": shape[0], "nproc_per_node": shape[1]},
            "parallel": {"type": "ddp"},
            "resources": {
                "queue": "research", "priority": "urgent", "pod_template": "strata-rdma", "time_limit": 7200,
            },
        }
    )  # fmt: skip
    sent = {task.id.name: task for task in compiled(spec).tasks}
    assert set(sent) == {f"tasks.topology.train_{shape[0]}x{shape[1]}", "tasks.finish.finish"}
    for task in sent.values():
        assert task.metadata.pod_template_name == "strata-rdma"
        labels = {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "urgent"}
        # An hour more than the time for training itself; evaluation has no such limit.
        limit = {"kueue.x-k8s.io/max-exec-time-seconds": "10800"} if "train" in task.id.name else {}
        assert task.metadata.k8s_object_metadata.labels == labels | limit
    # The next run in this process asks for what it asks for.
    assert all(template(task).metadata.k8s_object_metadata.labels is None for task in TASKS.values())


@pytest.mark.parametrize("streaming", [False, True], ids=["waiting", "streaming"])
def test_pods_prepare_shares_of_a_large_source_and_training_waits_unless_it_streams(streaming):
    how = {"prepared_url": "s3://bucket/rows", "shuffle": "window", "streaming": streaming}
    spec = RunSpec.model_validate({"data": {"source": "a.jsonl", **how}, "training": {"steps": 3}})
    nodes = {node.id: node for node in compiled(spec, ["0:0-31", "0:32-40"]).nodes}

    def comes_after(node):
        return set().union(*({name, *comes_after(nodes[name])} for name in node.upstream_node_ids if name in nodes))

    mapped, complete = (
        next(id_ for id_, node in nodes.items() if word in node.metadata.name) for word in ("share", "complete")
    )
    trained = next(node for node in nodes.values() if "train_1x1" in node.metadata.name)
    evaluated = next(node for node in nodes.values() if "finish" in node.metadata.name)
    assert mapped in comes_after(nodes[complete]) and complete in comes_after(evaluated)
    assert (complete in comes_after(trained)) == (not streaming)
    assert not any("share" in node.metadata.name for node in compiled(spec).nodes)


def test_a_pod_of_any_task_may_be_lost(registered):
    for task in (*compiled(SPEC).tasks, *registered.values()):
        if hasattr(task, "metadata") and task.id.name != "workflows.finetune.finetune":
            assert task.metadata.retries.retries == RETRIES, task.id.name


def test_a_run_that_names_no_queue_has_no_label():
    assert all(task.metadata.k8s_object_metadata.labels is None for task in compiled(SPEC).tasks)


def test_unknown_shape_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"3x5.*1x1, 1x2.*tasks/topology\.py"):
        task_for(
            RunSpec.model_validate(
                {"topology": {"nnodes": 3, "nproc_per_node": 5}, "parallel": {"type": "ddp"}}
            ).topology
        )


def test_the_shared_pod_template_is_not_changed_by_a_task():
    templates = [task.pod_template for task in TASKS.values()]
    assert all(template.pod_spec.containers == [] and template.pod_spec.volumes is None for template in templates)


def test_the_spec_and_the_record_travel_as_msgpack_never_as_a_pickle():
    record = CompletionRecord(
        status="complete", name="n", spec_hash="h", steps=1, steps_asked=1, tokens=1, target_tokens=1, train_loss=1.0,
        checkpoint="c", restarts=0, seconds=1.0, tokens_per_second=1.0, peak_memory_bytes=1, parameters=1, device="d",
        trainable_parameters=1, world_size=1, data={"read": 1}, kernels={}, versions={},
        warmup={"compiled": [{"name": "k", "seconds": 0.5}]},
    )  # fmt: skip
    context = FlyteContextManager.current_context()
    for value in (SPEC, record):
        kind = TypeEngine.to_literal_type(type(value))
        literal = TypeEngine.to_literal(context, value, type(value), kind)
        assert literal.scalar.binary.tag == "msgpack"
        assert TypeEngine.to_python_value(context, literal, type(value)) == value
