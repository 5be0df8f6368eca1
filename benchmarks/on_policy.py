"""Does a student come closer to its teacher on its own answers, or on the teacher's? On a CPU, in a quarter of an hour.

    PYTHONPATH=kernels:platform:. python -m benchmarks.on_policy [--steps 300] [--seeds 2] [--out out/on-policy]

The teacher writes sequences in which two tokens decide the next but for a choice of two; the student, a tenth of its
size, cannot hold all of that. It first learns from answers of the teacher (`forward_kl`), and then for as many steps
again, with equal numbers of tokens, either from more of them, or from answers that it writes itself
(`on_policy: 1`, `reverse_kl`). All runs are the runtime's, each a process of its own.

Prints how far the student is from its teacher in its own answers to new prompts, in nats per token, the same in answers
of the teacher, and how many of its own tokens follow the rule.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.run_folder.folder import RunFolder

PROMPT, NEW, ROWS = 4, 20, 32
# Tokens of the rule, behind the tokenizer's special ones.
FIRST, KINDS = 5, 24


def small_model(seed: int, hidden: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    """A model with random weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, initializer_range=0.1, eos_token_id=2, pad_token_id=0, **sizes, **heads
        )
    )  # fmt: skip


def successor(before: Tensor, last: Tensor, choice: int | Tensor) -> Tensor:
    """The token after two others."""
    return FIRST + ((before - FIRST) * 3 + (last - FIRST) * 7 + choice * 11) % KINDS


def prompts(count: int, draw: torch.Generator) -> Tensor:
    """Random tokens [count, PROMPT]."""
    return torch.randint(FIRST, FIRST + KINDS, (count, PROMPT), generator=draw)


def teacher_model(vocabulary: int) -> LlamaForCausalLM:
    """A model that has learned the rule, whose first choice is right in 7 of 10 cases."""
    model, draw = small_model(1, 64, 2, vocabulary), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(700):
        ids = prompts(64, draw)
        for _ in range(NEW):
            choice = (torch.rand(64, generator=draw) < 0.3).long()
            ids = torch.cat([ids, successor(ids[:, -2], ids[:, -1], choice)[:, None]], 1)
        loss = cross_entropy(model(ids).logits[:, PROMPT - 1 : -1].flatten(0, 1), ids[:, PROMPT:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def answers(model: LlamaForCausalLM, ids: Tensor, draw: torch.Generator) -> Tensor:
    """Prompts with NEW tokens of the model."""
    for _ in range(NEW):
        logits = model(ids).logits[:, -1, FIRST : FIRST + KINDS]
        ids = torch.cat([ids, FIRST + torch.multinomial(logits.softmax(-1), 1, generator=draw)], 1)
    return ids


def write_answers(file: Path, model: LlamaForCausalLM, rows: int, seed: int) -> None:
    """A file of rows with answers of the model."""
    draw = torch.Generator().manual_seed(seed)
    found = answers(model, prompts(rows, draw), draw).tolist()
    lines = [json.dumps({"input_ids": ids, "labels": [-100] * PROMPT + ids[PROMPT:]}) for ids in found]
    file.write_text("\n".join(lines))


def train(out: Path, name: str, student: Path, data: Path, steps: int, objective: dict[str, Any]) -> Path:
    """Distill the teacher in a process of its own; returns the folder of the model."""
    spec = RunSpec.model_validate(
        {
            "name": name,
            "output": str(out / "runs"),
            "model": {"name": str(student), "dtype": "float32"},
            "data": {
                "source": str(data), "sequence_length": PROMPT + NEW, "packing": False, "validation_fraction": 0.02,
            },
            "objective": {"type": "distill", "teacher": str(out / "teacher"), "weight": 1, **objective},
            "training": {"steps": steps, "micro_batch_size": ROWS},
            "optimizer": {"lr": 3e-3},
            "schedule": {"type": "constant"},
            "checkpoint": {"every": steps},
            "evaluation": {"samples": 1},
            "tracking": {"report_to": []},
        }
    )  # fmt: skip
    (file := out / f"{name}.json").write_text(spec.model_dump_json())
    subprocess.run([sys.executable, "-m", "tasks.runtime", str(file)], check=True, stdout=subprocess.DEVNULL)
    record = json.loads(RunFolder.of(spec).record.read_text())
    print(f"{name}: {record['target_tokens']:,} tokens", flush=True)
    return RunFolder.of(spec).model


@torch.no_grad()
def distances(folder: Path, teacher: LlamaForCausalLM) -> list[str]:
    """KL(student || teacher) in its own answers, KL(teacher || student) in the teacher's, and the share of the rule."""
    student, draw = LlamaForCausalLM.from_pretrained(folder).float().eval(), torch.Generator().manual_seed(5)
    own, others = (answers(model, prompts(512, draw), draw) for model in (student, teacher))

    def log_probs(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        return model(ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)

    p, q = log_probs(student, own), log_probs(teacher, own)
    reverse = (p.exp() * (p - q)).sum(-1).mean()
    p, q = log_probs(student, others), log_probs(teacher, others)
    forward = (q.exp() * (q - p)).sum(-1).mean()
    pairs, found = (own[:, PROMPT - 2 : -2], own[:, PROMPT - 1 : -1]), own[:, PROMPT:]
    right = (found == successor(*pairs, 0)) | (found == successor(*pairs, 1))
    return [f"{reverse:.2f}", f"{forward:.2f}", f"{right.float().mean():.0%}"]


def main() -> None:
    """Train all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/on-policy"))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(["nothing in particular"])
    teacher = teacher_model(len(tokenizer))
    teacher.save_pretrained(out / "teacher")
    save_tokenizer(tokenizer, out / "teacher")
    rows = arguments.steps * ROWS * 51 // 50
    for name, seed in (("first", 2), ("more", 3)):
        write_answers(out / f"{name}.jsonl", teacher, rows, seed)
    lines = [
        "| | KL of its own answers | KL of the teacher's answers | tokens that follow the rule |",
        "| --- | --- | --- | --- |",
    ]
    off = {"divergence": "forward_kl"}
    on = {"divergence": "reverse_kl", "on_policy": 1.0, "generation": {"max_new_tokens": NEW, "temperature": 1.0}}
    for seed in range(arguments.seeds):
        small_model(10 + seed, 16, 1, len(tokenizer)).save_pretrained(fresh := out / f"student-{seed}")
        save_tokenizer(tokenizer, fresh)
        begun = train(out, f"begun-{seed}", fresh, out / "first.jsonl", arguments.steps, off)
        ended = {"teacher's answers": begun}
        for what, label, objective in (("off", "more of them", off), ("on", "own answers", on)):
            ended[label] = train(out, f"{what}-{seed}", begun, out / "more.jsonl", arguments.steps, objective)
        for label, folder in ended.items():
            lines.append("| " + " | ".join([f"student {seed}: {label}", *distances(folder, teacher)]) + " |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
