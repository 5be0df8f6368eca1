"""What Flyte 2 is sent, and when it tries again. A cluster would run exactly this; test_finetune.py has a whole run."""

import asyncio
import importlib
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from strata_platform import kept_log
from strata_platform.pod_settings import GRACE_SECONDS, RETRIES
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.models.initial_weights import initial_weights
from tasks.runtime.process.error_explanations import MemoryKills
from tasks.runtime.run_folder import kept_logs
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps import agent
from tasks.steps.retry import Retry
from tasks.steps.train_step import MAX_RESTARTS
from tasks.topology import training_task
from tests.workflows.helpers.flyte_1_templates import template

ROOT = Path(__file__).parents[2]
TASKS = ("finetune", "prepare", "prepare_share", "complete", "train", "finish")


@pytest.fixture(scope="module")
def flyte_2():
    """The tasks. Their SDK replaces fsspec's clients of object stores, which other tests of this process expect."""
    clients = importlib.import_module("fsspec.registry")._registry
    before = dict(clients)
    yield importlib.import_module("tests.workflows.helpers.flyte_2_tasks")
    clients.clear()
    clients.update(before)


def spec_of(shape=(1, 1), **resources):
    return RunSpec.model_validate({
        "topology": {"nnodes": shape[0], "nproc_per_node": shape[1]}, "resources": resources,
        "parallel": {"type": "single" if shape == (1, 1) else "ddp"},
    })  # fmt: skip


def container(task):
    return task["k8s_pod"]["pod_spec"]["containers"][0]


def test_several_pods_are_the_job_that_flyte_1_makes_of_them(flyte_2):
    task, before = flyte_2.trained_by(spec_of((16, 8))), template(training_task(16, 8))
    assert (task["type"], task["task_type_version"]) == (before.type, before.task_type_version) == ("pytorch", 1)
    assert task["custom"]["elasticConfig"] == {
        "rdzvBackend": "c10d", "minReplicas": 16.0, "maxReplicas": 16.0, "nprocPerNode": 8.0,
        "maxRestarts": float(MAX_RESTARTS),
    }  # fmt: skip
    assert task["custom"] == before.custom
    # A shape that no task of Flyte 1 has.
    assert flyte_2.trained_by(spec_of((3, 5)))["custom"]["workerReplicas"] == {"replicas": 3.0}


def test_one_pod_needs_no_training_operator(flyte_2):
    task = flyte_2.trained_by(spec_of((1, 8)))
    assert task["type"] == "python"
    assert "custom" not in task


@pytest.mark.parametrize("shape", [(1, 8), (2, 8)], ids=["pod", "job"])
def test_pods_of_training(shape, flyte_2):
    spec = spec_of(
        shape, cpu="3", memory="9Gi", gpu=8, gpu_type="NVIDIA-H100-80GB-HBM3", shared_memory="5Gi", queue="research",
        priority="urgent", time_limit=7200,
    )  # fmt: skip
    task = flyte_2.trained_by(spec)
    pod, main = task["k8s_pod"], container(task)
    # Kueue reads them from the pod, or from the job, where Flyte's plugin copies them.
    assert pod["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "urgent",
        "kueue.x-k8s.io/max-exec-time-seconds": "10800",
    }  # fmt: skip
    assert pod["pod_spec"]["terminationGracePeriodSeconds"] == GRACE_SECONDS
    assert main["image"] == flyte_2.IMAGE
    assert main["resources"]["requests"] == {"cpu": "3", "memory": "9Gi", "gpu": "8"}
    assert {name: main["resources"]["limits"][name] for name in ("cpu", "memory")} == {"cpu": "3", "memory": "9Gi"}
    assert task["extended_resources"]["gpu_accelerator"]["device"] == "NVIDIA-H100-80GB-HBM3"
    assert task["extended_resources"]["shared_memory"]["size_limit"] == "5Gi"
    given = {variable["name"]: variable["value"] for variable in main["env"]}
    of_flyte_1 = template(training_task(*shape)).k8s_pod.pod_spec["containers"][0]["env"]
    assert given == {variable["name"]: variable["value"] for variable in of_flyte_1}
    assert task["metadata"]["retries"]["retries"] == RETRIES
    assert main["args"][-6:] == [
        "--resolver", "flyte._internal.resolvers.default.DefaultTaskResolver", "mod", "tasks.flyte2.run", "instance",
        "train",
    ]  # fmt: skip


def test_evaluation_takes_one_gpu_and_no_time_limit(flyte_2):
    asked = spec_of((2, 8), gpu=8, queue="research", time_limit=7200).resources
    task = flyte_2.sent(flyte_2.run.finish.override(**flyte_2.overrides(asked, gpus=1)))
    assert container(task)["resources"]["requests"]["gpu"] == "1"
    assert task["k8s_pod"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    assert task["metadata"]["generates_deck"] is True


def test_a_pod_template_is_named_and_then_has_the_labels_itself(flyte_2):
    assert flyte_2.trained_by(spec_of(pod_template="strata-rdma"))["metadata"]["pod_template_name"] == "strata-rdma"
    with pytest.raises(ValueError, match=r"pod_template is 'strata-rdma', and resources\.queue, resources\.time_limit"):
        flyte_2.trained_by(spec_of(pod_template="strata-rdma", queue="research", time_limit=60))


@pytest.mark.parametrize("name", TASKS)
def test_a_pod_of_any_task_may_be_lost_and_loads_it_by_its_module(name, flyte_2):
    found = flyte_2.sent(flyte_2.TASKS[name])
    assert found["metadata"]["retries"]["retries"] == RETRIES
    assert found["container"]["image"] == flyte_2.IMAGE
    module = "workflows.flyte2.finetune" if name == "finetune" else "tasks.flyte2.run"
    assert found["container"]["args"][-4:] == ["mod", module, "instance", name]


def test_every_environment_is_deployed_with_the_workflow(flyte_2):
    run = flyte_2.run
    assert set(map(id, run.control.depends_on)) == set(map(id, (run.preparing, run.training, run.finishing)))


def test_a_pod_loads_nothing_of_flyte_1_and_no_torch_to_find_its_task():
    code = "import sys, workflows.flyte2.finetune; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert not {"flytekit", "torch", "transformers", "flyte.cli.main"} & set(loaded.split())


def test_the_spec_and_the_record_travel_as_msgpack_never_as_a_pickle(flyte_2):
    from flyte.types import TypeEngine

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


@pytest.mark.parametrize(("how", "attempts"), [("Retry", 2), ("away", 2), ("mistake", 1), ("mistakes", 1)])
def test_only_what_another_attempt_may_mend_is_tried_again(how, attempts, tmp_path, flyte_2):
    import flyte

    flyte.init()
    log = tmp_path / "log"
    if attempts == 1:
        with pytest.raises(flyte.errors.RuntimeUserError, match=r"training\.steps is too large"):
            flyte.with_runcontext(mode="local").run(flyte_2.ends, how=how, log=str(log))
    else:
        ended = flyte.with_runcontext(mode="local").run(flyte_2.ends, how=how, log=str(log))
        assert ended.outputs()[0] == "done"
    assert len(log.read_text().split()) == attempts


@pytest.mark.parametrize(
    ("how", "said"),
    [
        # The agent may tell of the other process, which lost this one.
        ("misused", "RuntimeError process 1 of this pod: ValueError: training.micro_batch_size is too large"),
        # As what Flyte leaves no error for: the attempt may go on when the job is resumed.
        ("stopped", "SystemExit 143"),
    ],
)
def test_how_a_pod_ends(how, said, tmp_path):
    # In a process of its own, whose main thread gets the signals.
    command = [sys.executable, "-m", "tests.workflows.helpers.agent_processes", how, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert said in ended.stdout, ended.stderr


def test_a_pod_of_any_task_keeps_its_log(flyte_2, tmp_path, monkeypatch):
    from tasks.flyte2 import run

    class Folder:
        path = "s3://runs/data"

        async def download(self):
            return str(tmp_path)

    def fail(spec, *_):
        raise ValueError(f"{spec.name} failed")

    monkeypatch.setattr(run, "is_local", lambda: False)
    for module in (run, kept_logs):
        monkeypatch.setattr(module, "configure_logging", lambda: None)
    monkeypatch.setattr(run, "train_in_pod", fail)
    monkeypatch.setattr(run.finish_step, "finish", fail)
    for name in ("prepare", "prepare_share", "complete"):
        monkeypatch.setattr(run.prepare_step, name, lambda *_: fail(current))
    recipe = DataRecipe.from_spec(RunSpec())
    for name, function, arguments in (
        ("one", run.train.func, {"data": Folder()}),
        ("two", run.finish.func, {"record": None, "weights": Folder(), "data": Folder()}),
        ("three", run.prepare.func, {"recipe": recipe, "output": str(tmp_path), "url": ""}),
        ("four", run.prepare_share.func, {"data": Folder(), "share": "0:0-1"}),
        ("five", run.complete.func, {"data": Folder()}),
    ):
        current = RunSpec(name=name, output=str(tmp_path))
        with pytest.raises(Exception, match=f"{name} failed"):
            asyncio.run(function(spec=current, **arguments))
        (file,) = (tmp_path / name / "logs").iterdir()
        assert kept_log.parse(file.name, file.read_bytes())[-1].text == f"ValueError: {name} failed"


def test_a_finished_run_has_its_outputs_unless_its_weights_were_replaced(flyte_2, tmp_path, monkeypatch):
    """What tells weights apart is tested in test_initial_weights.py."""
    run = flyte_2.run
    monkeypatch.setattr(run, "is_local", lambda: False)
    (tmp_path / "model").mkdir()

    def weights(value):
        save_file({"x": torch.tensor([value])}, tmp_path / "model" / "model.safetensors")

    weights(1.0)
    spec = RunSpec.model_validate({"output": str(tmp_path / "out"), "model": {"name": str(tmp_path / "model")}})
    recipe, folder = DataRecipe.from_spec(spec), RunFolder.of(spec)
    folder.create()
    folder.write_initial_weights_ids(initial_weights(spec))
    stored = [str(tmp_path / "model"), *2 * [str(tmp_path / "model" / "model.safetensors")]]
    run.finish_step.note_outputs(folder, run.finish_step.Outputs(spec.hash(), recipe.hash(), *stored))
    assert [output.path for output in asyncio.run(run.finished(spec, recipe))] == stored
    weights(2.0)
    with pytest.raises(ValueError, match=r"model\.name '.*' has other weights than when this run began"):
        asyncio.run(run.finished(spec, recipe))


def test_a_run_that_asks_for_what_no_task_of_flyte_2_has_leaves_its_log(flyte_2, tmp_path, monkeypatch):
    from workflows.flyte2 import finetune as workflow

    monkeypatch.setattr(workflow, "is_local", lambda: False)
    monkeypatch.setattr(kept_logs, "configure_logging", lambda: None)
    asked = {"pod_template": "strata-rdma", "queue": "research"}
    spec = RunSpec.model_validate({"name": "refused", "output": str(tmp_path), "resources": asked})
    with pytest.raises(Exception, match="pod_template is 'strata-rdma'"):
        asyncio.run(workflow.finetune.func(spec))
    (file,) = (tmp_path / "refused" / "logs").glob("*.plan.jsonl")
    assert "pod_template is 'strata-rdma'" in kept_log.parse(file.name, file.read_bytes())[-1].text


def test_a_pod_that_is_stopped_keeps_its_log_before_it_ends():
    program = (
        "import os, signal\nfrom tasks.steps.agent import end_on_sigterm\n"
        "end_on_sigterm(lambda: os.write(1, b'kept'))\nos.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (143, "kept"), ended.stderr


def test_a_process_that_is_killed_ends_the_attempt_as_one_that_may_be_repeated(tmp_path):
    """Of two, neither of which has written an error. Real processes are killed in test_elastic.py."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    error_file = tmp_path / "1" / "error.json"
    killed = ProcessFailure(local_rank=1, pid=1, exitcode=-signal.SIGKILL, error_file=str(error_file))
    end = agent._failure(ChildFailedError("train", {1: killed}), spec_of(), MemoryKills())
    assert isinstance(end, Retry)
    assert str(end).startswith("rank 1: a process was killed by SIGKILL; the machine is gone")


def test_a_folder_that_is_not_there_is_not_waited_for(tmp_path, flyte_2):
    from tasks.flyte2.files import stored

    async def sleep(_):
        raise AssertionError("waited")

    with pytest.raises(FileNotFoundError, match="lost"):
        asyncio.run(stored(tmp_path / "lost", sleep))


def test_a_store_that_is_away_when_a_folder_is_read_is_waited_for(tmp_path, flyte_2, monkeypatch):
    from flyte.io import Dir

    from tasks.flyte2.files import fetched

    (tmp_path / "data").mkdir()
    folder, pauses, download = asyncio.run(Dir.from_local(str(tmp_path / "data"))), [], Dir.download

    async def away(self, *arguments):
        if len(pauses) < 3:
            raise ConnectionError("no route to the store")
        return await download(self, *arguments)

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(Dir, "download", away)
    assert asyncio.run(fetched(folder, sleep)).is_dir() and pauses == [1, 2, 4]


def denied():
    import obstore.exceptions

    return obstore.exceptions.UnauthenticatedError("no")


FINAL = {
    "ValueError": lambda: ValueError("no"),
    "TypeError": lambda: TypeError("no"),
    "KeyError": lambda: KeyError("no"),
    "AttributeError": lambda: AttributeError("no"),
    "PermissionError": lambda: PermissionError("no"),
    "UnauthenticatedError": denied,
    "group": lambda: ExceptionGroup("no", [ConnectionError("no route to the store"), denied()]),
}


@pytest.mark.parametrize("name", FINAL)
def test_what_another_call_would_not_mend_is_not_waited_for(name, tmp_path, flyte_2, monkeypatch):
    from flyte.io import Dir

    from tasks.flyte2.files import stored

    error = FINAL[name]()

    async def fail(*_):
        raise error

    async def sleep(_):
        raise AssertionError("waited")

    monkeypatch.setattr(Dir, "from_local", fail)
    with pytest.raises(type(error), match="no"):
        asyncio.run(stored(tmp_path, sleep))


class Store(BaseHTTPRequestHandler):
    """An S3 server with two files in the folder `data`, which nobody may read, and none elsewhere."""

    def do_GET(self):
        keys = ("data/1", "data/2") if "prefix=data" in self.path else ()
        listing = "".join(
            f"<Contents><Key>{key}</Key><Size>4</Size><ETag>e</ETag><LastModified>2026-01-01T00:00:00Z</LastModified>"
            "</Contents>" for key in keys
        )  # fmt: skip
        is_list = "list-type" in self.path
        answer = (
            f"<ListBucketResult>{listing}</ListBucketResult>" if is_list else "<Error><Code>AccessDenied</Code></Error>"
        )
        self.send_response(200 if is_list else 403)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def denying(flyte_2):
    """Flyte's own client of that server."""
    import flyte
    from flyte.storage import S3

    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    flyte.init(storage=S3(endpoint=url, access_key_id="k", secret_access_key="s", region="us-east-1"))
    yield
    flyte.init()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("folder", ["data", "lost"])
def test_a_store_that_answers_is_not_waited_for(folder, denying):
    """Flyte's client raises a group of errors of files, or an error of its own for a folder that is not there."""
    from flyte.io import Dir
    from obstore.exceptions import PermissionDeniedError

    from tasks.flyte2.files import fetched

    async def sleep(_):
        raise TimeoutError("waited")

    # If one file fails first, its error comes alone.
    kinds = {"data": (ExceptionGroup, PermissionDeniedError), "lost": RuntimeError}[folder]
    with pytest.raises(kinds):
        asyncio.run(fetched(Dir.from_existing_remote(f"s3://runs/{folder}"), sleep))


@pytest.mark.parametrize("name", ["prepare", "prepare_share", "complete", "train", "finish"])
def test_a_folder_that_cannot_be_handed_over_ends_a_task_for_good(name, flyte_2, monkeypatch):
    from flyte.errors import NonRecoverableError

    class Denied:
        path = "s3://runs/data"

        async def download(self):
            raise PermissionError("denied")

    monkeypatch.setattr(flyte_2.run.prepare_step, "prepare", lambda *_: (Path("/lost"), []))
    monkeypatch.setattr(flyte_2.run, "configure_logging", lambda: None)
    arguments = {
        "prepare": (DataRecipe.from_spec(RunSpec()), "out", "", RunSpec()), "complete": (Denied(), RunSpec()),
        "prepare_share": (Denied(), "share", RunSpec()),
        "train": (RunSpec(), Denied()), "finish": (RunSpec(), None, Denied(), Denied()),
    }[name]  # fmt: skip
    with pytest.raises(NonRecoverableError, match=r"denied|/lost is to be stored"):
        asyncio.run(flyte_2.TASKS[name].func(*arguments))
