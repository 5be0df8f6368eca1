"""What a run serves while it trains, scraped as Prometheus does."""

import socket
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata_kernels.warmup import Compiled, Failed, WarmupReport
from strata_platform.spec import RunSpec
from tasks.runtime.metrics.trackers import serve_prometheus
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.training.job import Job
from tests.runtime.helpers.free_port import free_port
from tests.runtime.helpers.train_only import train_spec
from tests.runtime.helpers.train_with_bad_step import BAD, ruin


def make_spec(output, port):
    return RunSpec.model_validate(
        {
            "output": str(output),
            "data": {"sequence_length": 64, "max_samples": 20},
            "training": {"steps": 4, "micro_batch_size": 1},
            "checkpoint": {"every": 2},
            "runtime": {"framework": "torch"},
            "tracking": {"log_every": 1, "report_to": [], "prometheus_port": port},
        }
    )


def scrape(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.pop("state", sample.labels.pop("part", None))): (sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_run_serves_what_is_on_its_record(tmp_path, monkeypatch):
    port = free_port()
    spec = make_spec(tmp_path, port)
    scraped = []
    share = NextToken.micro_batch_loss

    def while_it_trains(self, *args):
        scraped.append(scrape(port))
        return share(self, *args)

    monkeypatch.setattr(NextToken, "micro_batch_loss", while_it_trains)
    assert train_spec(spec).status == "complete"
    # Nothing is served that is not known yet; what counts checkpoints and steps that are not taken begins at none.
    skips = {"strata_skipped_steps_total", "strata_rollbacks_total"}
    counters = skips | {"strata_checkpoint_seconds_total"}
    assert {name for name, _ in scraped[0]} == {"strata_target_steps", "strata_warmup_later_misses"} | counters
    assert all(scraped[0][name, None][0] == 0 for name in counters)
    assert all(scraped[-1][name, None][0] == 0 for name in skips)
    third = read_points(RunFolder.of(spec).metrics)[2]
    values = {name: value for (name, _), (value, _) in scraped[3].items()}
    for field in ("step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_seconds"):
        assert values[f"strata_{field}"] == getattr(third, field)
    assert values["strata_target_steps"] == 4
    assert values["strata_memory_peak_bytes"] == third.memory_bytes
    assert values["strata_data_wait_seconds_total"] > 0
    # Training stood still for the checkpoint of step 2, not for those of the steps around it.
    waits = [samples["strata_checkpoint_seconds_total", None][0] for samples in scraped]
    assert waits[0] == waits[1] == 0.0 < waits[2] == waits[3]
    assert "strata_mfu_ratio" not in values
    assert all(labels == {"run": "finetune", "rank": "0", "framework": "torch"} for _, labels in scraped[3].values())
    with pytest.raises(OSError):
        scrape(port)


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_steps_that_are_not_taken_are_counted(tmp_path, monkeypatch, action):
    port = free_port()
    spec = make_spec(tmp_path, port)
    spec = RunSpec.model_validate({**spec.model_dump(), "faults": {"nonfinite": action}})
    ruin(rows_per_step=1, patch=monkeypatch.setattr)
    scraped = []
    end_step = Job.end_step

    def after_each(self, *args):
        end_step(self, *args)
        scraped.append({name: value for (name, _), (value, _) in scrape(port).items()})

    monkeypatch.setattr(Job, "end_step", after_each)
    assert train_spec(spec).status == "complete"
    counted = [(values["strata_skipped_steps_total"], values["strata_rollbacks_total"]) for values in scraped]
    assert counted == [(0, 0)] * (BAD - 1) + [(1, int(action == "rollback"))] * (len(counted) - BAD + 1)
    assert len(counted) > BAD - 1


def test_processes_of_a_pod_serve_side_by_side_and_the_first_its_warm_up(tmp_path):
    port = free_port()
    kernels = (Compiled("a", "", seconds=1.0, hit=False), Compiled("b", "", seconds=0.0, hit=True))
    report = WarmupReport("NVIDIA H200", planned=3, compiled=kernels, failed=(Failed("c", "", "why"),), seconds=1.5)
    told = {**report.to_dict(), "cache_hits": 0, "image_hits": 1, "store_hits": 0, "plan_seconds": 0.5}
    told |= {"modules": 2, "module_wait_seconds": 0.25, "graphs_found": 4, "graphs_compiled": 0, "graphs_not_kept": 0}
    later = []
    spec = make_spec(tmp_path, port)
    served = [
        serve_prometheus(
            spec, Processes(rank + 8, rank, 16), lambda rank=rank: {**([told, {}][rank]), "later_compiles": len(later)}
        )
        for rank in (0, 1)
    ]
    later += ["norm_fwd_kernel", "rope_kernel"]
    first, second = scrape(port), scrape(port + 1)
    for one in served:
        one.close()
    assert {(name.removeprefix("strata_warmup_"), of): value for (name, of), (value, _) in first.items()} == {
        ("kernels", "planned"): 3, ("kernels", "compiled"): 1, ("kernels", "failed"): 1,
        ("kernels", "cache"): 0, ("kernels", "image"): 1, ("kernels", "store"): 0,
        ("seconds", "plan"): 0.5, ("seconds", "kernels"): 1.5, ("seconds", "modules"): 0.25,
        ("graphs", "found"): 4, ("graphs", "compiled"): 0, ("graphs", "not_kept"): 0, ("later_misses", None): 2,
    }  # fmt: skip
    assert first["strata_warmup_kernels", "image"][1]["rank"] == "8"
    assert {name for name, _ in second} == {"strata_warmup_later_misses"}


def test_a_port_that_is_taken_costs_the_endpoint_alone(tmp_path, caplog):
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        spec = make_spec(tmp_path, other.getsockname()[1])
        assert train_spec(spec).status == "complete"
    [warning] = [message for message in caplog.messages if "prometheus" in message]
    assert "cannot listen on port" in warning and "choose another port" in warning


def test_none_is_served_unless_asked_for(tmp_path):
    assert serve_prometheus(make_spec(tmp_path, None), Processes(), dict) is None
