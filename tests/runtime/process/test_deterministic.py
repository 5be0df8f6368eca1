"""What `training.deterministic` asks of PyTorch, and that two starts then have the same bits."""

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime.training.session import session
from tests.runtime.helpers.comparable_runs import curve
from tests.runtime.helpers.train_only import train_spec


def make_spec(output, name, **training):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "data": {"sequence_length": 2048},
            "training": {"steps": 4, "micro_batch_size": 8, "deterministic": True, **training},
            "checkpoint": {"every": 2, "keep_last": 2},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": "torch"},
        }
    )


def asked():
    settings = torch.utils.deterministic
    return torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What sessions leave in it is put back."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")


@pytest.mark.parametrize("wanted", [True, False])
def test_pytorch_is_asked_for_the_length_of_a_session(tmp_path, wanted):
    before = asked()
    with session(make_spec(tmp_path, "asked", deterministic=wanted)):
        assert asked() == ((True, False) if wanted else before)
    assert asked() == before == (False, True)


def test_an_operation_that_cannot_repeat_ends_the_run_with_the_way_out(tmp_path):
    with pytest.raises(RuntimeError, match="put_") as refused, session(make_spec(tmp_path, "refused")):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    assert "set training.deterministic to false" in refused.value.__notes__[0]


@pytest.mark.gpu
def test_on_a_gpu_a_second_start_and_a_resume_have_the_same_bits(output):
    one, other = (make_spec(output, name) for name in ("one", "other"))
    assert all(train_spec(spec).status == "complete" for spec in (one, other))
    assert curve(one) == curve(other)
    train_spec(other, 2)
    assert curve(other, 1) == curve(one)[2:]
