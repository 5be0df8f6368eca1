"""Read an exported model as its users would, and compare it with the trained model.

The comparison runs in a process of its own, which gets nothing from training except the folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tasks.runtime.models.pretrained import load_pretrained

if TYPE_CHECKING:
    from torch import Tensor

# Tokens of the compared text.
TOKENS = 64
# Largest difference of logits relative to the largest logit, by dtype. Equal arithmetic in equal order differs by 0.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_TEXT = (
    "The exported model must read this text as the trained one did: the same tokens, and for each of them the same "
    "expectation of what comes next, whatever was merged, cast or renamed on the way to the folder. 0123456789 {}[]()\n"
)


def expected_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """The model's result for a short text: `input_ids` [1, T] and `logits` [1, T, V], on the CPU."""
    ids = tokenizer(_TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"][:, :TOKENS]
    with torch.inference_mode():
        logits = model.eval()(input_ids=ids.to(model.device)).logits
    return {"input_ids": ids, "logits": logits.cpu().contiguous()}


def difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    """A description of the difference; None if there is none beyond rounding."""
    for name in expected:
        if expected[name].shape != found[name].shape or expected[name].dtype != found[name].dtype:
            return f"{name} are {_form(found[name])}, not {_form(expected[name])}"
    if not torch.equal(expected["input_ids"], found["input_ids"]):
        return "the tokenizer makes other tokens of a text"
    wanted, got = expected["logits"].float(), found["logits"].float()
    most, allowed = float((wanted - got).abs().max()), _TOLERANCE[expected["logits"].dtype] * float(wanted.abs().max())
    # Written so that NaN counts as a difference.
    return None if most <= allowed else f"logits differ by {most:.3g}, and by rounding at most by {allowed:.2g}"


def verify(folder: Path, expected: dict[str, Tensor], device: torch.device, attention: str) -> None:
    """Raises ValueError if a fresh process reads another model from `folder` than `expected` describes."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "expected.safetensors"
        save_file(expected, file)
        done = subprocess.run(
            [sys.executable, "-m", "tasks.runtime.export.check_folder", str(folder), str(file), str(device), attention],
            text=True,
            capture_output=True,
        )
    if done.returncode == 0:
        wrong = json.loads(done.stdout.splitlines()[-1])
    else:
        wrong = f"it cannot be read (exit code {done.returncode}): {done.stderr.strip()[-2000:]}"
    if wrong is not None:
        raise ValueError(
            f"the exported model in {folder} is not the trained one: {wrong}. It replaces no earlier export, and the "
            "run's checkpoints are complete. Start the run again to export once more"
        )


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def main() -> None:
    """Print the difference as one line of JSON."""
    folder, file, device, attention = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = load_pretrained(folder, dtype="auto", attn_implementation=attention)
    print(json.dumps(difference(load_file(file), expected_of(model.to(device), tokenizer))))


if __name__ == "__main__":
    main()
