"""Runs under the Hugging Face Trainer beside TRL's trainers: the same rows, steps, losses and gradient norms.

All rows are one batch, so that the order of the data, which is the project's own, is of no account.
"""

import importlib
import importlib.util
import math
from pathlib import Path
from typing import get_args

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.objectives import Distill, DpoLoss
from strata_platform.spec.sections.training import Schedule
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.models.pretrained import load_pretrained
from tasks.runtime.objectives import build_objective
from tasks.runtime.objectives.head_sums import Head
from tasks.runtime.objectives.teacher_divergence import distillation
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
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
    # Among them answers of one token.
    "bare": [
        {**pair, "prompt": "", "rejected": pair["rejected"][: 40 * (n % 2)] or "a"} for n, pair in enumerate(PAIRS)
    ],
    "margins": [{**pair, "margin": n / 4 - 1} for n, pair in enumerate(PAIRS)],
    "labelled": [
        {"prompt": pair["prompt"], "completion": pair[("rejected", "chosen")[n % 3 > 0]], "label": n % 3 > 0}
        for n, pair in enumerate(PAIRS)
    ],
    "answers": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS],
    "chats": [chat_of(pair) for pair in PAIRS],
}
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(PAIRS)}
KTO = {"beta": 0.3, "undesirable_weight": 0.5}
# Rows, objective and settings of the data; TRL's trainer and what it is told.
RUNS = {
    "sft": ("answers", {"type": "sft"}, {}, "SFT", {"completion_only_loss": True}),
    "chat": ("chats", {"type": "sft"}, {"chat_template": "chatml"}, "SFT", {"assistant_only_loss": True}),
    "dpo": ("pairs", {"type": "dpo", "beta": 0.2}, {}, "DPO", {"beta": 0.2}),
    "ipo": ("pairs", {"type": "dpo", "loss": "ipo"}, {}, "DPO", {"loss_type": ["ipo"], "beta": 0.1}),
    # TRL averages the cross entropy over the tokens of a micro-batch, and ORPO's over those of the prompt, too.
    "orpo": ("bare", {"type": "orpo", "beta": 0.3}, {}, "ORPO", {"beta": 0.3, **ONE_BY_ONE}),
    "cpo": (
        "bare", {"type": "cpo", "label_smoothing": 0.1, "alpha": 0.5}, {}, "CPO",
        {"label_smoothing": 0.1, "cpo_alpha": 0.5, **ONE_BY_ONE},
    ),
    "reward": (
        "margins", {"type": "reward", "center_coefficient": 0.05}, {}, "Reward", {"center_rewards_coefficient": 0.05},
    ),
    # Each prompt is mismatched with the completion of the row before it, of the first with that of the last.
    "kto": ("labelled", {"type": "kto", **KTO}, {}, "KTO", {**KTO, "train_sampling_strategy": "sequential"}),
    "apo": (
        "labelled", {"type": "kto", "loss": "apo_zero_unpaired"}, {}, "KTO",
        {"loss_type": "apo_zero_unpaired", "beta": 0.1},
    ),
    "simpo": (
        "bare", {"type": "simpo", "gamma": 0.7, "label_smoothing": 0.1}, {}, "CPO",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0, "label_smoothing": 0.1},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def output(output):
    save_pretrained(output / "pretrained")
    for name, rows in ROWS.items():
        write_pairs(output / f"{name}.jsonl", rows)
    return output


def spec_of(output, name):
    rows, objective, data, *_ = RUNS[name]
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            # On a GPU the default is bf16.
            "model": {"name": f"{output}/pretrained", "dtype": "float32"},
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


def ours(spec):
    """Loss and gradient norm of each step."""
    assert train_spec(spec).status == "complete"
    return [(loss, norm) for _, loss, norm, *_ in curve(spec)]


def pretrained(output):
    return AutoModelForCausalLM.from_pretrained(output / "pretrained", dtype=torch.float32)


def trainer_of(output, kind, rows, options, model, **arguments):
    """TRL's trainer of a kind; its experimental ones are in modules of their own."""
    names = ("trl.experimental.orpo", "trl.experimental.cpo") if kind in ("ORPO", "CPO") else ("trl",)
    module = next(m for m in map(importlib.import_module, names) if hasattr(m, f"{kind}Trainer"))
    settings = {
        "output_dir": str(output / "trl"), "max_steps": STEPS, "per_device_train_batch_size": len(PAIRS),
        "learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "adam_beta2": 0.95,
        "max_length": 96, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(), "bf16": False, **options,
    }  # fmt: skip
    args = getattr(module, f"{kind}Config")(**settings)
    return getattr(module, f"{kind}Trainer")(model=model, args=args, train_dataset=Dataset.from_list(rows), **arguments)


def in_our_order(output, name, tokenizer):
    """The rows in the order in which they are prepared."""
    spec = spec_of(output, name)
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    found = prepare(recipe, data_folder(spec.output, recipe), report=print).train
    texts = [tokenizer.decode(found[n]["input_ids"], skip_special_tokens=True) for n in range(len(found))]
    by_text = {row["prompt"] + row["completion"]: row for row in ROWS[RUNS[name][0]]}
    return [by_text[text] for text in texts]


def theirs(output, name, **more):
    """As `ours`."""
    rows, _, data, kind, options = RUNS[name]
    options = {**options, **more}
    tokenizer = AutoTokenizer.from_pretrained(output / "pretrained")
    if data:
        tokenizer.chat_template = MARKED
    ordered = in_our_order(output, name, tokenizer) if kind == "KTO" else ROWS[rows]
    model = pretrained(output)
    if kind == "Reward":
        # The head is random: it has to be ours.
        model = load_pretrained(str(output / "pretrained"), head="score", dtype=torch.float32)
        model.config.pad_token_id = tokenizer.pad_token_id
    trainer = trainer_of(output, kind, ordered, options, model, processing_class=tokenizer)
    trainer.train()
    return [(point["loss"], point["grad_norm"]) for point in trainer.state.log_history if "loss" in point]


@pytest.mark.any_device
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_trl(output, name):
    found, expected = ours(spec_of(output, name)), theirs(output, name)
    assert len(found) == len(expected) == STEPS
    for step in range(STEPS):
        assert found[step] == pytest.approx(expected[step], rel=1e-5), f"step {step + 1}"
    assert found[-1][0] < 0.8 * found[0][0] or name in ("kto", "apo", "reward")
    if name == "kto":
        assert read_points(RunFolder.of(spec_of(output, name)).metrics)[-1].metrics["kl"] > 0.1


# Columns of rows that TRL has tokenized, with the answers of a row.
TOKENIZED = {"sft": ["completion"], "dpo": ["chosen", "rejected"], "kto": ["completion"]}


def tokens_of(row, answers):
    """The tokens of a row that TRL has tokenized, and their labels without those of the line break after each turn."""
    if "labels" in row:
        return row["input_ids"], [*row["labels"][:-1], -100]
    context = row["prompt_ids"]
    pairs = [
        (context + row[f"{name}_ids"], [-100] * len(context) + row[f"{name}_ids"][:-1] + [-100]) for name in answers
    ]
    return tuple([token for part in parts for token in part] for parts in zip(*pairs, strict=True))


@pytest.mark.parametrize("objective", TOKENIZED)
def test_chat_template_kwargs_of_rows_give_the_tokens_and_labels_of_trl(output, objective):
    """With Qwen3's template: where it does not think, the empty reasoning belongs to the prompt."""
    modes = [{"enable_thinking": False}, {"enable_thinking": True}, {}, {"enable_thinking": False, "other": "text"}]
    answers = TOKENIZED[objective]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n} + {n}?"}],
            **{name: [{"role": "assistant", "content": f"It is {2 * n + m}."}] for m, name in enumerate(answers)},
            **({"label": n % 2 == 0} if objective == "kto" else {}),
            "chat_template_kwargs": mode,
        }
        for n, mode in enumerate(modes)
    ]
    template = f"{importlib.import_module('trl').__path__[0]}/chat_templates/qwen3.jinja"
    tokenizer = AutoTokenizer.from_pretrained(output / "pretrained")
    tokenizer.chat_template = Path(template).read_text()
    trainer = trainer_of(output, objective.upper(), rows, {}, pretrained(output), processing_class=tokenizer)
    expected = [tokens_of(row, answers) for row in trainer.train_dataset]

    write_pairs(output / "modes.jsonl", rows)
    data = {"source": f"{output}/modes.jsonl", "chat_template": template, "sequence_length": 96, "packing": False}
    spec = RunSpec.model_validate(
        {
            "model": {"name": f"{output}/pretrained"},
            "data": {**data, "validation_fraction": 0},
            "objective": {"type": objective},
        }
    )
    found = prepare(DataRecipe.from_spec(spec, fingerprint(spec)), output / f"modes-{objective}", report=print).train
    ours = []
    for row in found:
        filled = row["input_ids"] != tokenizer.pad_token_id
        ours.append((row["input_ids"][filled].tolist(), row["labels"][filled].tolist()))
    assert sorted(ours) == sorted(expected)
    # The reasoning is learned or not.
    assert len({len(ids) - labels.count(-100) for ids, labels in expected}) == 2


def test_answers_are_compared_without_dropout(output):
    """Of a model whose config has dropout, TRL turns it off."""
    tokenizer = AutoTokenizer.from_pretrained(output / "pretrained")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=128,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(output / "gpt2")
    tokenizer.save_pretrained(output / "gpt2")
    spec = spec_of(output, "dpo")
    found = ours(RunSpec.model_validate({**dict(spec), "name": "gpt2", "model": {"name": f"{output}/gpt2"}}))
    assert found[0][0] == pytest.approx(math.log(2), rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(output / "gpt2", dtype=torch.float32)
    trainer = trainer_of(output, "DPO", PAIRS, {"beta": 0.2}, model, processing_class=tokenizer)
    trainer.train()
    expected = [(point["loss"], point["grad_norm"]) for point in trainer.state.log_history if "loss" in point]
    for step in range(STEPS):
        assert found[step] == pytest.approx(expected[step], rel=1e-5), f"step {step + 1}"


@pytest.mark.parametrize("framework", ["hf", "lightning", "torch"])
def test_no_setting_of_the_loop_is_left_at_its_default(output, framework):
    spec = spec_of(output, "sft")
    optimizer = {"betas": (0.6, 0.8), "eps": 1e-2, "weight_decay": 5.0, "max_grad_norm": 0.3}
    own = {
        "name": f"own-{framework}",
        "optimizer": spec.optimizer.model_copy(update=optimizer),
        "schedule": Schedule(type="linear", warmup_steps=0),
        "runtime": {"framework": framework},
    }
    found = ours(RunSpec.model_validate({**dict(spec), **own}))
    options = {
        "adam_beta1": 0.6, "adam_beta2": 0.8, "adam_epsilon": 1e-2, "weight_decay": 5.0, "max_grad_norm": 0.3,
        "lr_scheduler_type": "linear",
    }  # fmt: skip
    expected, default = theirs(output, "sft", **options), theirs(output, "sft")
    for step in range(STEPS):
        assert found[step] == pytest.approx(expected[step], rel=1e-5), f"step {step + 1}"
    assert found[-1][0] != pytest.approx(default[-1][0], rel=1e-2)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergences_are_those_of_trl(beta, temperature):
    """Of a student and a teacher of other widths, from their heads, to 1e-5 in fp32. TRL's have no factor of the
    temperature's square, which keeps gradients as large as they were.
    """
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((3, 23, 8), (40, 8)))
    teacher_x, teacher_weight = torch.randn(3, 23, 12), torch.randn(40, 12)
    labels = torch.randint(40, (3, 23))
    labels[:, ::3] = -100
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    chosen = {"divergence": divergence} | ({"beta": beta} if divergence == "jsd" else {})
    settings = Distill(teacher="some/teacher", temperature=temperature, weight=1.0, **chosen)
    items = (labels != -100).sum()
    found = distillation(x, Head(weight), labels, teacher_x, Head(teacher_weight), settings, items).loss
    logits = torch.nn.functional.linear(x, weight), torch.nn.functional.linear(teacher_x, teacher_weight)
    expected = temperature**2 * GKDTrainer.generalized_jsd_loss(*logits, labels, beta, temperature)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (found, expected)), strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def moved(output):
    """The pretrained model after some training that both answers have seen."""
    torch.manual_seed(1)
    model = pretrained(output)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    return model


@pytest.fixture(scope="module")
def dpo_trainer(output):
    """TRL's, with one batch of all pairs, and ours."""
    tokenizer = AutoTokenizer.from_pretrained(output / "pretrained")
    options = {"beta": 0.2, "discopop_tau": 0.07, "loss_weights": [1.0]}
    trainer = trainer_of(
        output, "DPO", ROWS["bare"], options, moved(output), ref_model=pretrained(output), processing_class=tokenizer
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    spec = dpo_spec(output, "sigmoid")
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    rows = prepare(recipe, data_folder(spec.output, recipe), report=print).train
    return trainer, inputs, collate([rows[index] for index in range(len(rows))])


def dpo_spec(output, loss):
    smoothing = {"robust": 0.2, "exo_pair": 0.01}.get(loss, 0.0)
    tau = {"discopop_tau": 0.07} if loss == "discopop" else {}
    return RunSpec.model_validate(
        {
            "output": str(output),
            "model": {"name": f"{output}/pretrained"},
            "data": {"source": f"{output}/bare.jsonl", "sequence_length": 96, "validation_fraction": 0},
            "objective": {"type": "dpo", "loss": loss, "beta": 0.2, "label_smoothing": smoothing, **tau},
        }
    )


@pytest.mark.parametrize("loss", get_args(DpoLoss))
def test_each_loss_of_pairs_is_that_of_trl(output, dpo_trainer, loss):
    """Rows of several pairs here, a pair in two rows there; answers of one token and of many."""
    trainer, inputs, batch = dpo_trainer
    spec = dpo_spec(output, loss)
    trainer.loss_types, trainer.label_smoothing = [loss], spec.objective.label_smoothing
    trainer.model.train().zero_grad()
    expected = trainer.compute_loss(trainer.model, dict(inputs))
    expected.backward()

    objective, model = build_objective(spec, fused=False), moved(output)
    batch = {**batch, "reference": objective.log_probs(pretrained(output), batch)}
    share = objective.micro_batch_loss(model.train(), batch, objective.count(batch))
    share.loss.backward()
    assert int(objective.count(batch)) == len(PAIRS)
    assert float(share.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - theirs[name].grad).norm() <= 1e-5 * theirs[name].grad.norm() + 1e-9, name
