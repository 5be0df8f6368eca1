"""Runs under the Hugging Face Trainer beside TRL's trainers: the same rows, steps, losses and gradient norms.

All rows are one batch, so that the order of the data, which is the project's own, is of no account.
"""

import importlib.util

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata_platform.spec import RunSpec
from strata_platform.spec.objectives import Distill
from tasks.runtime.objectives.divergence import distillation
from tasks.runtime.objectives.head_sums import Head
from tests.runtime.helpers.comparable_runs import curve
from tests.runtime.helpers.preference_pairs import PAIRS as ALL
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
    # Of names that TRL uses, and of its own trainer.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental':UserWarning"),
]

PAIRS = ALL[:12]
STEPS, RATE = 3, 1e-3
# The project's `chatml`, with the marks that TRL finds the assistant's turns by.
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def chat_of(pair):
    turns = [("user", pair["prompt"]), ("assistant", pair["chosen"].strip())]
    turns += [("user", "And then?"), ("assistant", pair["rejected"].strip())]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ROWS = {
    "pairs": PAIRS,
    "answers": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS],
    "chats": [chat_of(pair) for pair in PAIRS],
}
# Rows, objective and settings of the data; TRL's trainer and what it is told.
RUNS = {
    "sft": ("answers", {"type": "sft"}, {}, "SFT", {"completion_only_loss": True}),
    "chat": ("chats", {"type": "sft"}, {"chat_template": "chatml"}, "SFT", {"assistant_only_loss": True}),
    "dpo": ("pairs", {"type": "dpo", "beta": 0.2}, {}, "DPO", {"beta": 0.2}),
    "ipo": ("pairs", {"type": "dpo", "loss": "ipo"}, {}, "DPO", {"loss_type": ["ipo"], "beta": 0.1}),
}


@pytest.fixture(scope="module")
def output(output):
    save_pretrained(output / "pretrained")
    for name, rows in ROWS.items():
        write_pairs(output / f"{name}.jsonl", rows)
    return output


def ours(output, name):
    """Loss and gradient norm of each step."""
    rows, objective, data, *_ = RUNS[name]
    spec = RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"name": f"{output}/pretrained"},
            "data": {"source": f"{output}/{rows}.jsonl", "sequence_length": 96, "packing": False}
            | {"validation_fraction": 0, **data},
            "objective": objective,
            "training": {"steps": STEPS, "micro_batch_size": len(PAIRS)},
            "optimizer": {"lr": RATE, "weight_decay": 0},
            "schedule": {"type": "constant", "warmup_ratio": 0},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": "hf"},
        }
    )
    assert train_spec(spec).status == "complete"
    return [(loss, norm) for _, loss, norm, *_ in curve(spec)]


def theirs(output, name):
    """As `ours`."""
    import trl

    rows, _, data, kind, options = RUNS[name]
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(output / "trl"), max_steps=STEPS, per_device_train_batch_size=len(PAIRS), learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.95, max_length=96, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, **options,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(output / "pretrained")
    if data:
        tokenizer.chat_template = MARKED
    trainer = getattr(trl, f"{kind}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(output / "pretrained", dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(ROWS[rows]),
        processing_class=tokenizer,
    )
    trainer.train()
    return [(point["loss"], point["grad_norm"]) for point in trainer.state.log_history if "loss" in point]


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_trl(output, name):
    found, expected = ours(output, name), theirs(output, name)
    assert len(found) == len(expected) == STEPS
    for step in range(STEPS):
        assert found[step] == pytest.approx(expected[step], rel=1e-5), f"step {step + 1}"
    assert found[-1][0] < 0.8 * found[0][0]


@pytest.mark.parametrize(("divergence", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5)])
def test_divergences_are_those_of_trl(divergence, beta):
    """But for the factor of the temperature's square, which keeps gradients as large as they were."""
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    student, teacher = torch.randn(23, 40, requires_grad=True), torch.randn(23, 40)
    labels = torch.randint(40, (23,))
    labels[::3] = -100
    settings = Distill(teacher="some/teacher", divergence=divergence, temperature=2.0, weight=1.0)
    found = distillation(student, Head(), labels, teacher, Head(), settings, (labels != -100).sum()).loss
    expected = 4 * GKDTrainer.generalized_jsd_loss(student[None], teacher[None], labels[None], beta, 2.0)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
