"""What DeepSpeed needs, before anything is built for it. What it computes is in test_frameworks_and_strategies.py."""

import sys

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime.training.session import session


def test_without_its_package_it_is_refused_at_once(monkeypatch, tmp_path):
    spec = RunSpec.model_validate(
        {"output": str(tmp_path), "parallel": {"type": "deepspeed"}, "topology": {"nproc_per_node": 2}}
    )
    # As Python has it for a module that is not there.
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"install strata\[deepspeed\]"), session(spec):
        pass
    assert not list(tmp_path.iterdir())
