"""The tasks that name the data of a run and prepare it."""

import gc
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import boto3
import fsspec
import pytest
import torch
from flytekit import map_task
from moto.server import ThreadedMotoServer

from strata_platform.spec import RunSpec
from tasks import prepare
from tasks.runtime.run_folder.folder import RunFolder
from tasks.steps import prepare_step as steps

pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an S3 server of its own."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    account = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=url, **account).create_bucket(Bucket="rows")
    # As arguments of each client, which fsspec keeps by them: not that of another server.
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": url, "key": "test", "secret": "test"})
    yield "s3://rows/prepared"
    server.stop()
    # flytekit leaves a folder of each task that it runs to the garbage collector, which warns of it.
    gc.collect()


def test_a_run_that_no_queue_admits_is_refused_before_its_data_is_prepared(tmp_path, monkeypatch):
    shares = {"required": True, "queues": {"research": "r"}, "clusterQueues": [
        {"name": "r", "quotas": [{"flavor": "f", "resources": {"cpu": {"nominal": "1600m"}}}]}]}  # fmt: skip
    monkeypatch.setattr(prepare, "configure_logging", lambda: None)
    # As a pod that the chart's template made.
    monkeypatch.setattr(prepare, "is_local", lambda: False)
    monkeypatch.setenv("STRATA_QUEUES", json.dumps(shares))
    spec = {"output": str(tmp_path), "data": {"max_samples": 60}}
    for asked, said in (
        ({"queue": "typo"}, "there is no queue 'typo', only: research"),
        ({"queue": "research", "cpu": "2"}, "ask for 2 CPUs and at most 1.6 CPUs can be had"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare.plan(spec=RunSpec.model_validate(spec | {"resources": asked}))
    admitted = RunSpec.model_validate(spec | {"resources": {"queue": "research", "cpu": "1"}})
    assert prepare.plan(spec=admitted).output == str(tmp_path)


def test_a_map_task_prepares_shares_into_a_store_that_training_reads(tmp_path: Path, s3: str, monkeypatch):
    from tasks.runtime import data
    from tasks.runtime.data.preparation import part_processes, pipeline

    monkeypatch.setattr(prepare, "configure_logging", lambda: None)
    monkeypatch.setattr(steps, "_SHARE", 3)
    monkeypatch.setattr(pipeline, "PART_BYTES", 1500)
    monkeypatch.setattr(part_processes, "available_cpus", lambda: 1)
    monkeypatch.setenv("STRATA_DATA_CACHE", str(tmp_path / "cache"))
    texts = [f"def name_{number}(value): return value * {number}\n" * (1 + number % 5) for number in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    section = {"source": str(tmp_path / "rows.jsonl"), "sequence_length": 64, "prepared_url": s3}
    spec = RunSpec.model_validate({"data": section, "objective": {"type": "pretrain"}, "output": str(tmp_path / "out")})
    planned = prepare.plan(spec=spec)
    begun = prepare.prepare(recipe=planned.recipe, output=planned.output, url=planned.url, spec=spec)
    assert len(begun.shares) > 2 and begun.shares[:2] == ["0:0-2", "0:3-5"]
    counts = map_task(partial(prepare.prepare_share, data=begun.data, spec=spec))(share=begun.shares)
    completed = Path(prepare.complete(data=begun.data, prepared=counts, spec=spec).path)
    assert not list(completed.glob("*.safetensors"))
    found = data.open_prepared(completed, spec.data)
    alone = data.prepare(planned.recipe, tmp_path / "alone", report=lambda line: None)
    assert found.manifest.content_hash == alone.manifest.content_hash
    assert len(found.train) == len(alone.train) > 10
    for index in range(len(found.train)):
        assert torch.equal(found.train[index]["labels"], alone.train[index]["labels"])
    # A task that is repeated finds all parts done.
    assert prepare.prepare(recipe=planned.recipe, output=planned.output, url=planned.url, spec=spec).shares == []


def test_a_map_task_prepares_the_shares_of_several_sources(tmp_path: Path, s3: str, monkeypatch):
    from tasks.runtime import data
    from tasks.runtime.data.growing_mixture import GrowingMixture
    from tasks.runtime.data.preparation import part_processes, pipeline

    monkeypatch.setattr(prepare, "configure_logging", lambda: None)
    monkeypatch.setattr(steps, "_SHARE", 3)
    monkeypatch.setattr(pipeline, "PART_BYTES", 1500)
    monkeypatch.setattr(part_processes, "available_cpus", lambda: 1)
    monkeypatch.setenv("STRATA_DATA_CACHE", str(tmp_path / "cache"))
    sources = []
    for name, count in (("a", 90), ("b", 60), ("c", 4)):
        texts = [f"def {name}_{number}(value): return value * {number}\n" * (1 + number % 5) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"source": str(tmp_path / f"{name}.jsonl"), "weight": 1})
    how = {"prepared_url": s3, "sequence_length": 64, "shuffle": "window", "streaming": True}
    spec = RunSpec.model_validate(
        {
            "data": {"sources": sources[:2], "validation_source": sources[2]["source"], **how},
            "objective": {"type": "pretrain"},
            "training": {"steps": 3},
            "output": str(tmp_path / "out"),
        }
    )
    planned = prepare.plan(spec=spec)
    begun = prepare.prepare(recipe=planned.recipe, output=planned.output, url=planned.url, spec=spec)
    # The rows for evaluation are there; the two sources take turns.
    assert [share.partition(":")[0] for share in begun.shares[:4]] == ["0", "1", "0", "1"]
    # As a pod has it that trains at the same time: nothing but the folder and the store.
    copy = tmp_path / "pod" / "data"
    shutil.copytree(begun.data.download(), copy)
    growing = data.open_prepared(copy, spec.data)
    assert isinstance(growing, GrowingMixture) and len(growing.validation_by_source()[2]) > 0
    counts = map_task(partial(prepare.prepare_share, data=begun.data, spec=spec))(share=begun.shares)
    completed = Path(prepare.complete(data=begun.data, prepared=counts, spec=spec).path)
    assert not list(completed.rglob("*.safetensors"))
    alone = data.prepare(planned.recipe, tmp_path / "alone" / "mixture", report=lambda line: None)
    for found in (data.open_prepared(completed, spec.data), growing.completed()):
        assert len(found.train) == len(alone.train) > 10
        for index in range(len(found.train)):
            assert torch.equal(found.train[index]["labels"], alone.train[index]["labels"])
    # A task that is repeated finds all parts done.
    assert prepare.prepare(recipe=planned.recipe, output=planned.output, url=planned.url, spec=spec).shares == []


def test_another_execution_of_a_run_reads_the_commit_of_the_first(tmp_path, monkeypatch):
    first, newest = "a" * 40, "b" * 40
    # It would take the loggers from the tests that follow.
    monkeypatch.setattr(prepare, "configure_logging", lambda: None)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *names, **options: SimpleNamespace(sha=newest))
    spec = RunSpec.model_validate({"output": str(tmp_path), "data": {"source": "org/texts"}})
    assert prepare.plan(spec=spec).recipe.data.revision == newest
    folder = RunFolder.of(spec)
    folder.claim(spec)
    folder.write_data_commits([first])
    assert prepare.plan(spec=spec).recipe.data.revision == first
