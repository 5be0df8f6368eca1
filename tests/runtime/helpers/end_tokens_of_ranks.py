"""Builds a folder's model as each process of a run does: `python -m tests.runtime.helpers.end_tokens_of_ranks FOLDER`.

Every process has the settings for generation that transformers reads from the folder.
"""

import sys
from types import SimpleNamespace

from transformers import GenerationConfig

from strata_platform.spec import RunSpec
from tasks.runtime.process.ranks import Processes
from tasks.runtime.training.train import _build_model
from tests.runtime.helpers.train_forked import run_forked


def check(folder):
    """In each of the processes."""
    processes = Processes.from_environment()
    processes.connect()
    spec = RunSpec.model_validate({"output": folder, "model": {"name": folder}})
    model, *_ = _build_model(SimpleNamespace(spec=spec, processes=processes), None)
    found, expected = model.generation_config, GenerationConfig.from_pretrained(folder)
    assert found.eos_token_id == expected.eos_token_id, (processes.rank, found.eos_token_id)
    assert found.max_new_tokens == expected.max_new_tokens
    processes.disconnect()


if __name__ == "__main__":
    sys.exit(run_forked(2, lambda: check(sys.argv[1])))
