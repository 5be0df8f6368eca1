"""GRPO steps per hour: a run of ours beside TRL's GRPOTrainer with transformers' generation.

    PYTHONPATH=kernels:platform:. python -m benchmarks.grpo [--steps 3] [--only ours]

The shape is Qwen3-0.6B's with random weights in bf16 (AdamW, no activation checkpointing): 8 answers of up to 512
tokens to each of 16 prompts in a step, which random weights hardly ever end before. The reward is the same Python
function of the text, and both draw at temperature 1 from all tokens. Each line is the median of the steps after the
first two. The machine needs TRL and `datasets`; a tokenizer is trained on the built-in data.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.generation import SHAPE, build
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.training.session import session
from tasks.runtime.training.train import train

PROMPTS, GROUP, TOKENS, MICRO_BATCH, UNTIMED = 16, 8, 512, 16, 2
WORDS = ("the", "a", "of", "and", "list", "open", "file", "read", "write", "line", "text", "name", "value", "class")


def vowels(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A reward that differs between answers."""
    return [sum(text.count(vowel) for vowel in "aeiou") / (1 + len(text)) for text in completions]


def prepare_folder(folder: Path, layers: int, vocabulary: int) -> None:
    """Write the model with random weights, a tokenizer, and prompts to a folder."""
    spec = RunSpec.model_validate({"output": str(folder / "made"), "data": {"max_samples": 400}})
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    tokenizer = prepare(recipe, data_folder(spec.output, recipe), report=lambda line: None).tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    shape = {"num_hidden_layers": layers, "vocab_size": vocabulary, **ids}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    build(device, torch.bfloat16, patched=False, **shape).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    choices = torch.randint(len(WORDS), (20 * PROMPTS, 60), generator=generator).tolist()
    rows = [{"prompt": " ".join(WORDS[word] for word in row[: 30 + number % 30])} for number, row in enumerate(choices)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(folder: Path, steps: int, tokens: int) -> list[tuple[float, float]]:
    """Seconds of each step, and of its generation."""
    spec = RunSpec.model_validate(
        {
            "name": "grpo", "output": str(folder / "out"),
            "model": {"name": str(folder / "model"), "dtype": "bfloat16"},
            "data": {"source": str(folder / "prompts.jsonl"), "sequence_length": tokens + 128}
            | {"validation_fraction": 0},
            "objective": {
                "type": "grpo", "rewards": [{"function": "benchmarks.grpo:vowels"}], "group_size": GROUP,
                "generation": {"max_new_tokens": tokens}, "overlong": "rewarded",
            },
            "training": {
                "steps": steps, "micro_batch_size": MICRO_BATCH,
                "gradient_accumulation_steps": PROMPTS * GROUP // MICRO_BATCH,
            },
            "optimizer": {"precision": "nearest"}, "checkpoint": {"every": 10**6},
            "runtime": {"framework": "torch"}, "tracking": {"log_every": 1, "report_to": []},
        }
    )  # fmt: skip
    configure_logging()
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    with session(spec) as run:
        train(run, prepare(recipe, data_folder(spec.output, recipe), report=lambda line: None))
    points = read_points(RunFolder.of(spec).metrics)
    return [(point.step_seconds, point.step_seconds * point.metrics["generation_share"]) for point in points]


class _Times(TrainerCallback):  # type: ignore[misc]
    """The seconds of each step of a Trainer."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - self._began)
        # A slow run may be cut.
        print(f"trl step {len(self.steps)}: {self.steps[-1]:.2f} s", flush=True)


def by_trl(folder: Path, steps: int, tokens: int) -> list[tuple[float, float]]:
    """As `ours`, without the time of generation."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    trl: Any = import_module("trl")
    on_gpu = torch.cuda.is_available()
    args = trl.GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * GROUP // MICRO_BATCH, num_generations=GROUP,
        max_completion_length=tokens, learning_rate=1e-6, gradient_checkpointing=False, bf16=on_gpu, use_cpu=not on_gpu,
        logging_steps=1000, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    times = _Times()
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16),
        reward_funcs=vowels, args=args, train_dataset=Dataset.from_list(rows), callbacks=[times],
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )  # fmt: skip
    trainer.train()
    return [(seconds, 0.0) for seconds in times.steps]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--only", choices=("ours", "trl"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_folder(folder, given.layers, given.vocabulary)
        for title, run in (("ours", ours), ("trl", by_trl)):
            if given.only not in (None, title):
                continue
            found = run(folder, given.steps, given.tokens)
            timed = found[min(UNTIMED, len(found) - 1) :]
            seconds, generating = (statistics.median(values) for values in zip(*timed, strict=True))
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            each = " ".join(f"{step:.2f}" for step, _ in found)
            share = f", {generating:.2f} s of it generation" if generating else ""
            print(
                f"{title:5} {3600 / seconds:7.0f} steps/h  {seconds:6.2f} s{share}  {peak:.1f} GiB  all: {each}",
                flush=True,
            )
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
