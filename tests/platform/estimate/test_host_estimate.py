"""A run on CPUs, before it is launched."""

import json

import pytest

from strata_platform.estimate import shape_of
from strata_platform.estimate.host_estimate import estimate_on_host
from strata_platform.spec import RunSpec
from tests.platform.estimate.test_estimate import strata

LLAMA = {"model": {"name": "meta-llama/Llama-3.2-1B"}}


@pytest.mark.parametrize(
    ("memory", "size"), [("8Gi", 8 * 2**30), ("1.5Ti", 1.5 * 2**40), ("64G", 64e9), ("1000000000", 1e9)]
)
def test_memory_is_that_of_a_pod_with_all_processes(memory, size):
    changes = {"resources": {"memory": memory}, "topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}}
    spec = RunSpec.model_validate(LLAMA | changes)
    shape = shape_of("llama-3.2-1b")
    found = estimate_on_host(spec, shape)
    assert found.available == size and found.peak == 2 * found.memory.peak
    # `auto` is float32 on CPUs.
    assert found.memory.weights == 4 * shape.parameters
    assert found.fits == (found.peak < size)


def test_a_spec_without_gpus_is_answered_for_cpus(tmp_path):
    (tmp_path / "my.yaml").write_text(json.dumps(LLAMA))
    ended = strata(tmp_path / "my.yaml")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "1.24 B parameters, all weights trained, on CPUs: resources.gpu is 0" in ended.stdout
    assert "weights          4.6" in ended.stdout and "resources.memory 8Gi is " in ended.stdout
    assert "too little" in ended.stdout and "H200" not in ended.stdout
    data = json.loads(strata(tmp_path / "my.yaml", "--format", "json").stdout)
    assert (data["gpu"], data["fits"]) == (None, False)
    assert data["memory"]["peak"] == sum(v for k, v in data["memory"].items() if k not in ("peak", "available"))
    assert "on 1 x H200" in strata(tmp_path / "my.yaml", "--gpu", "h200").stdout
