"""GRPO steps per hour: a run of ours beside TRL's GRPOTrainer with transformers' generation.

    PYTHONPATH=kernels:platform:. python -m benchmarks.grpo [--steps 4] [--only ours]

The shape is Qwen3-0.6B's with random weights in bf16 (AdamW, no activation checkpointing): 8 answers of 512 tokens to
each of 16 prompts in a step. The weights give the end of a text no probability, so that every answer has all of its
tokens. The reward is the same Python function of the text, and both draw at temperature 1 from all tokens. Each line is
the median of the steps after those that compile. The machine needs TRL and `datasets`; a tokenizer is trained on the
built-in data. With `--folder`, a second call finds the model of the first. With `--wait`, our reward takes that many
seconds, and a second run of ours generates ahead.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

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

PROMPTS, GROUP, TOKENS, MICRO_BATCH = 16, 8, 512, 16
# Steps that are not timed: those in which kernels are compiled and graphs captured.
UNTIMED = {"ours": 2, "trl": 1}
SMALL = {
    "num_hidden_layers": 2, "vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
WORDS = ("the", "a", "of", "and", "list", "open", "file", "read", "write", "line", "text", "name", "value", "class")


def vowels(completions: Sequence[Any], wait: float = 0.0, **columns: Any) -> list[float]:
    """A reward that differs between answers, and takes `wait` seconds for all of them."""
    time.sleep(wait)
    return [sum(text.count(vowel) for vowel in "aeiou") / (1 + len(text)) for text in completions]


def prepare_folder(folder: Path, changes: Mapping[str, int]) -> None:
    """Write the model with random weights, a tokenizer, and prompts to a folder."""
    spec = RunSpec.model_validate({"output": str(folder / "made"), "data": {"max_samples": 400}})
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    tokenizer = prepare(recipe, data_folder(spec.output, recipe), report=lambda line: None).tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    shape = {**changes, **ids}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(device, getattr(torch, dtype_name()), patched=False, **shape)
    never_end(model, tokenizer.all_special_ids)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    choices = torch.randint(len(WORDS), (20 * PROMPTS, 60), generator=generator).tolist()
    rows = [{"prompt": " ".join(WORDS[word] for word in row[: 30 + number % 30])} for number, row in enumerate(choices)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class StepTimes(NamedTuple):
    """Seconds of a step, those of its generation, and the mean length of its answers."""

    seconds: float
    generation: float
    answer_tokens: float


def dtype_name() -> str:
    """The dtype of both: CPUs are slow in bf16."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


@torch.no_grad()
def never_end(model: Any, token_ids: Sequence[int]) -> None:
    """Make tokens as unlikely as bf16 can say, for a model whose head is its embedding: every other token puts 1 into
    the first component of the hidden state, which the last norm scales up, and their rows of the head have -1 there.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, 0] = 1.0
    embedding[list(token_ids), 0] = -1.0


def ours(folder: Path, steps: int, tokens: int, *, wait: float = 0.0, ahead: bool = False) -> list[StepTimes]:
    """Times of each step of a run whose reward takes `wait` seconds."""
    spec = RunSpec.model_validate(
        {
            "name": "ahead" if ahead else "grpo", "output": str(folder / "out"),
            "model": {"name": str(folder / "model"), "dtype": dtype_name()},
            "data": {"source": str(folder / "prompts.jsonl"), "sequence_length": tokens + 128}
            | {"validation_fraction": 0},
            "objective": {
                "type": "grpo", "group_size": GROUP, "generate_ahead": ahead,
                "rewards": [{"function": "benchmarks.grpo:vowels", "arguments": {"wait": wait}}],
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
    return [
        StepTimes(point.step_seconds, point.step_seconds * share, point.metrics["answer_tokens"])
        for point in points
        for share in [point.metrics["generation_share"]]
    ]


class _Times(TrainerCallback):  # type: ignore[misc]
    """Times the steps of a Trainer, and the calls of its model's `generate`; prints each part as it ends."""

    def __init__(self, model: Any) -> None:
        self.steps: list[StepTimes] = []
        self._began = self._generating = 0.0
        self._generate = model.generate
        model.generate = self._timed

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began, self._generating = _now(), 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds = _now() - self._began
        self.steps.append(StepTimes(seconds, self._generating, 0.0))
        print(f"trl step {len(self.steps)}: {seconds:.2f} s, generation {self._generating:.2f} s", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "completions/mean_length" in logs:
            self.steps[-1] = self.steps[-1]._replace(answer_tokens=logs["completions/mean_length"])

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        began = _now()
        found = self._generate(*args, **kwargs)
        self._generating += _now() - began
        print(f"trl generation {len(self.steps) + 1}: {self._generating:.2f} s", flush=True)
        return found


def _now() -> float:
    """Seconds, when the device has done all that it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def by_trl(folder: Path, steps: int, tokens: int) -> list[StepTimes]:
    """As `ours`, of TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    trl: Any = import_module("trl")
    on_gpu = torch.cuda.is_available()
    args = trl.GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * GROUP // MICRO_BATCH, num_generations=GROUP,
        max_completion_length=tokens, learning_rate=1e-6, gradient_checkpointing=False, bf16=on_gpu, use_cpu=not on_gpu,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype_name())
    times = _Times(model)
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=vowels, args=args, train_dataset=Dataset.from_list(rows), callbacks=[times],
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )  # fmt: skip
    print("trl: ready", flush=True)
    trainer.train()
    return times.steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", help="keep the model, the data and the runs there")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds of our reward; also with generate_ahead")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--small", action="store_true", help="a model that a CPU can train, to try the program")
    parser.add_argument("--only", choices=("ours", "trl"))
    given = parser.parse_args()
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not (folder / "prompts.jsonl").is_file():
            prepare_folder(folder, SMALL if given.small else {"num_hidden_layers": given.layers})
        own = partial(ours, wait=given.wait)
        runs = [("ours", own), ("ours, ahead", partial(own, ahead=True))][: 2 if given.wait else 1]
        for title, run in [*runs, ("trl", by_trl)]:
            kind = title.partition(",")[0]
            if given.only not in (None, kind):
                continue
            found = run(folder, given.steps, given.tokens)
            timed = found[min(UNTIMED[kind], len(found) - 1) :]
            seconds, generating, length = (statistics.median(values) for values in zip(*timed, strict=True))
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            each = " ".join(f"{step.seconds:.2f}" for step in found)
            print(
                f"{title:11} {3600 / seconds:7.0f} steps/h  {seconds:6.2f} s, {generating:.2f} s of it generation of "
                f"{length:.1f} tokens  {peak:.1f} GiB  all: {each}",
                flush=True,
            )
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
