"""Do the kernels change what a model learns? Losses with and without them, of models of several kinds, step by step.

    PYTHONPATH=kernels:platform:. python -m benchmarks.curves [--only mixture] [--steps 200] [--seeds 4] [--at-once 8]

Each model is trained from scratch with the kernels, without, and without but with another attention implementation. The
third differs from the second in rounding alone, so the distance between their curves is the noise that the first is
measured against. A seed decides the weights, the order of the rows and which of them are held out; curves are compared
with that of the same seed. Each run is a process of its own, so many at once; their speed means nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.training import with_fields
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.models.build import set_special_tokens
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tests.runtime.helpers.pictures import write_shapes
from tests.runtime.helpers.vision_models import qwen2_5_vl

PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {
    "kernels": {"kernels.enabled": "auto"},
    PLAIN: {"kernels.enabled": False},
    "plain, eager attention": {"kernels.enabled": False, "model.attention": "eager"},
}
# The share of the steps that are not compared: in the first ones all curves fall alike.
WITHOUT = 0.1

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_DELTA = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_SINKS = {
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "intermediate_size": 192,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "norm_topk_prob": True}

# What fills a folder with a model of this seed, and the fields of the runs that train it.
Kind = tuple[Callable[[Path, int], None], dict[str, Any]]


def _text(model_type: str, **sizes: Any) -> Kind:
    """A model of text, trained on the docstrings of Python's standard library."""

    def make(folder: Path, seed: int) -> None:
        made = RunSpec.model_validate({"output": str(folder.parent / "tokenizer")})
        recipe = DataRecipe.from_spec(made, fingerprint(made))
        tokenizer = prepare(recipe, data_folder(made.output, recipe), report=print).tokenizer()
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **_SIZES | sizes)
        model = AutoModelForCausalLM.from_config(config)
        set_special_tokens(model, tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return make, {"data.sequence_length": 256, "training.micro_batch_size": 16, "optimizer.lr": 2e-3}


def _vision() -> Kind:
    """A model that names drawn shapes, trained on pictures of them."""

    def make(folder: Path, seed: int) -> None:
        qwen2_5_vl(folder, hidden=64, edge=16, seed=seed)
        write_shapes(folder.parent, 1500, seed=seed, name=f"shapes-{seed}")

    fields = {
        "data.source": "../shapes-{seed}.jsonl",
        "data.sequence_length": 48,
        "data.packing": False,
        "training.micro_batch_size": 32,
        "optimizer.lr": 1e-3,
    }
    return make, fields


KINDS: dict[str, Kind] = {
    "dense (llama)": _text("llama"),
    "QK-norm (qwen3)": _text("qwen3"),
    "mixture (qwen3_moe, 16 experts)": _text("qwen3_moe", **_EXPERTS),
    "hybrid (qwen3_5, gated DeltaNet)": _text("qwen3_5_text", **_DELTA),
    "sinks (gpt_oss, 16 experts)": _text("gpt_oss", **_SINKS),
    "vision-language (qwen2_5_vl)": _vision(),
}


@dataclass(frozen=True)
class Run:
    """One curve."""

    kind: str
    variant: str
    seed: int

    def spec(self, out: Path, steps: int) -> RunSpec:
        """Fields of the kind, the variant and the seed."""
        model = model_folder(out, self.kind, self.seed)
        fields = {
            "name": "-".join(part for part in [*words(self.kind), *words(self.variant), str(self.seed)]),
            "output": str(out / "runs"),
            "seed": self.seed,
            "model.name": str(model),
            "model.dtype": "bfloat16",
            "data.validation_fraction": 0.05,
            "training.steps": steps,
            "checkpoint.every": steps,
            "evaluation.samples": 1,
            "tracking.log_every": 1,
            "tracking.report_to": [],
            "runtime.framework": "torch",
            # It would complain of the memory that the others take of the GPU.
            "faults.health_check": False,
            **KINDS[self.kind][1],
            **VARIANTS[self.variant],
        }
        if "data.source" in fields:
            fields["data.source"] = str((model / fields["data.source"].format(seed=self.seed)).resolve())
        return RunSpec.model_validate(with_fields({}, fields))


@dataclass(frozen=True)
class Curve:
    """What a run left: the loss of every step, and that of the held-out rows afterwards, nats."""

    losses: list[float]
    held_out: float


def words(text: str) -> list[str]:
    """The words of a label, as names of runs may have them."""
    return "".join(letter if letter.isalnum() else " " for letter in text).lower().split()


def model_folder(out: Path, kind: str, seed: int) -> Path:
    """Where the model of a kind and a seed is."""
    return out / "models" / "-".join([*words(kind), str(seed)])


def train(run: Run, out: Path, steps: int) -> Curve:
    """Train in a process of its own. Raises RuntimeError with its last lines if it fails."""
    spec = run.spec(out, steps)
    file = out / f"{spec.name}.json"
    file.write_text(spec.model_dump_json())
    ended = subprocess.run([sys.executable, "-m", "tasks.runtime", str(file)], capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{spec.name}: {(ended.stdout + ended.stderr)[-2000:]}")
    folder = RunFolder.of(spec)
    record = json.loads(folder.record.read_text())
    return Curve([point.loss for point in read_points(folder.metrics)], record["eval_loss_after"])


def spread(values: Sequence[float]) -> str:
    """The mean, and its standard error where there is one."""
    mean = statistics.fmean(values)
    return f"{mean:.4f}" if len(values) < 2 else f"{mean:.4f} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


def table(curves: Mapping[Run, Curve]) -> list[str]:
    """A line for each kind and variant: held-out losses by seed, then differences from plain of the same seed."""
    lines = [
        "| | held-out loss, by seed | less that of plain | loss of a step, less that of plain | the same, absolute |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, variant in dict.fromkeys((run.kind, run.variant) for run in curves):
        own = {run.seed: curve for run, curve in curves.items() if (run.kind, run.variant) == (kind, variant)}
        cells = [f"{kind}: {variant}", ", ".join(f"{curve.held_out:.4f}" for curve in own.values())]
        if variant != PLAIN:
            plain = {seed: curves[Run(kind, PLAIN, seed)] for seed in own}
            first = int(WITHOUT * len(next(iter(own.values())).losses))
            apart = {
                seed: [a - b for a, b in zip(own[seed].losses[first:], plain[seed].losses[first:], strict=True)]
                for seed in own
            }
            cells += [
                spread([own[seed].held_out - plain[seed].held_out for seed in own]),
                spread([statistics.fmean(apart[seed]) for seed in own]),
                spread([statistics.fmean(map(abs, apart[seed])) for seed in own]),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Make the models, train all runs, so many at once, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="first words of kinds")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/curves"))
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if not arguments.only or words(kind)[0] in arguments.only]
    if not kinds:
        parser.error(f"--only: none of {', '.join(words(kind)[0] for kind in KINDS)}")
    arguments.out = arguments.out.resolve()
    seeds = range(arguments.seeds)
    for kind in kinds:
        for seed in seeds:
            if not (folder := model_folder(arguments.out, kind, seed)).exists():
                folder.parent.mkdir(parents=True, exist_ok=True)
                KINDS[kind][0](folder, seed)
    runs = [Run(kind, variant, seed) for kind in kinds for variant in VARIANTS for seed in seeds]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        curves = dict(zip(runs, pool.map(lambda run: train(run, arguments.out, arguments.steps), runs), strict=True))
    print("\n".join(table(curves)))
    kept = {" ".join(words(f"{run.kind} {run.variant} {run.seed}")): curve.losses for run, curve in curves.items()}
    (arguments.out / "curves.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
