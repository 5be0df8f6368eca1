"""Write the adapter alone beside the merged model, and read it back with PEFT in another process."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Lora
from tasks.runtime.export.check_folder import difference, expected_of, tolerance_of
from tasks.runtime.models.adapters.adapter_folder import write_adapter
from tasks.runtime.models.build import build_model
from tasks.runtime.models.trained_weights import build_adapted_model, initial_matrices
from tasks.runtime.process.forks import run_module

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

FOLDER = "adapter"
"""The folder of the adapter in that of the exported model."""

# How much more an adapter that was PiSSA's may differ: 1.3 times was measured in bfloat16.
_ROUNDED_PARTS = 5


def export_adapter(
    spec: RunSpec, weights: Path, folder: Path, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> None:
    """Write the adapter and its tokenizer to `folder`/adapter, for `PeftModel.from_pretrained(base_model, ...)`.

    `weights`: the folder of `collect_weights`.

    Raises:
        ValueError: the process that reads the folder finds another model than the trained one.
    """
    assert isinstance(spec.adapter, Lora)
    model = build_adapted_model(spec, weights).model
    initial, base = initial_matrices(weights)
    write_adapter(model, spec.adapter, spec.model, folder / FOLDER, fingerprint=base, initial=initial)
    tokenizer.save_pretrained(folder / FOLDER)
    expected = expected_of(model.to(device), tokenizer)
    del model
    with tempfile.TemporaryDirectory() as temporary:
        given = Path(temporary) / "expected.safetensors"
        save_file(expected, given)
        # The matrices of PiSSA written for the original weights are differences, whose parts are rounded each.
        tolerance = tolerance_of(expected) * (_ROUNDED_PARTS if initial else 1)
        arguments = [str(folder / FOLDER), spec.model_dump_json(), str(given), str(device), str(tolerance)]
        done = run_module("tasks.runtime.export.adapter_export", arguments)
    wrong = f"it cannot be read (exit code {done.returncode}): {done.stderr.strip()[-2000:]}"
    if done.returncode == 0:
        wrong = json.loads(done.stdout.splitlines()[-1])
    if wrong:
        raise ValueError(
            f"the exported adapter in {folder / FOLDER} is not the trained one: {wrong}. It replaces no earlier "
            "export, and the run's checkpoints are complete. Start the run again to export once more"
        )
    log.info("verified: another process reads the same adapter with PEFT")


def read_adapter(folder: Path | str, base: PreTrainedModel) -> PeftModel:
    """An exported adapter on its base model, as PEFT reads it, in the dtype that it was trained in.

    PEFT makes it float32 by default. That rounds otherwise, which sends tokens to other experts of a mixture.
    """
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)


def main() -> None:
    """Print the difference as one line of JSON: null if there is none."""
    from transformers import AutoTokenizer

    folder, spec, given, device, tolerance = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = read_adapter(folder, build_model(RunSpec.model_validate_json(spec).model, 0))
    print(json.dumps(difference(load_file(given), expected_of(model.to(device), tokenizer), float(tolerance))))


if __name__ == "__main__":
    main()
