"""What one process refuses, all refuse, and none waits for another that has given up."""

import os
import sys

import pytest
import torch
import torch.multiprocessing as multiprocessing

from strata_platform.spec import RunSpec
from tasks.runtime.process import ranks
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training.frameworks.hf import arguments
from tasks.runtime.training.session import session
from tests.helpers import fork_server
from tests.runtime.helpers.free_port import free_port

# Python 3.12 warns of every fork beside threads, of which pytest and torch have some that nobody waits for.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_one_process_calls_the_function_itself():
    assert Processes().on_main(lambda: 3) == 3


def make_spec(output, **changes):
    return RunSpec.model_validate(
        {"output": str(output), "topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}, **changes}
    )


def refusal(spec):
    with pytest.raises(ValueError) as error, session(spec):
        pass
    return str(error.value)


def ask_in_vain():
    raise Unreachable("the Hub is away")


def work(local_rank, folder, port):
    """What a training process meets, in each of two processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            patch.setenv(name, str(value))
        with session(make_spec(folder / "shared")) as run:
            assert run.processes.on_main(lambda: f"from {run.processes.rank}") == "from 0"
            assert run.processes.all_true(True)
            # What may go better in another attempt is no refusal.
            with pytest.raises(Unreachable, match="the Hub is away"):
                run.processes.on_main(ask_in_vain)
            others = run.processes.in_new_group()
            # Nobody gives up on the main process while it prepares data or copies a checkpoint.
            for group in (others.group, ranks._long_timeout_group):
                assert group._get_backend(torch.device("cpu")).options._timeout == ranks.LONG_TIMEOUT
            gathered = others.gather(local_rank)
            assert gathered == ([0, 1] if others.is_main else None)
            assert others.scatter(gathered) == local_rank
            assert not run.processes.all_true(run.processes.is_main)
            # Something to lose: without it the folder would go to the next spec.
            run.processes.on_main(lambda: (run.folder.checkpoints / "checkpoint-1").mkdir(parents=True))
        root = RunFolder.of(make_spec(folder / "shared")).root
        assert sorted(path.name for path in root.iterdir()) == [".lease", ".lock", "checkpoints", "spec.yaml"]
        # Found by the main process alone.
        assert "seed was 0, is 1" in refusal(make_spec(folder / "shared", seed=1))
        # Each pod has a folder of its own, of the same name.
        patch.chdir(folder / f"pod-{local_rank}")
        assert "output 'out' is not the same folder for all 2 processes" in refusal(make_spec("out"))


def test_two_processes_agree(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"pod-{rank}").mkdir()
    multiprocessing.start_processes(work, args=(tmp_path, free_port()), nprocs=2, start_method="fork")


def test_processes_find_each_other_again_after_a_restart(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = ["tests.runtime.helpers.elastic_forked", "2", "1", "tests.runtime.helpers.restart_once", str(pipe)]
    ended = fork_server.run(
        [sys.executable, "-m", *command],
        env=fork_server.clean_environment(), text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "both are back" in ended.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_single_process_takes_one_gpu(tmp_path):
    assert arguments(RunSpec(), tmp_path, steps=1).n_gpu == 1
