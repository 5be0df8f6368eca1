"""Runs of `grpo`: beside TRL's trainer, on several processes, in several frameworks, killed and continued."""

import importlib.util
import json
import os
import signal
import warnings
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata_kernels.policy import truncated_importance_weights
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.generation import EmbeddedGenerator, sampling
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.objectives.grpo import Grpo
from tasks.runtime.objectives.rollout import Rollout
from tasks.runtime.objectives.scored_answers import withheld
from tasks.runtime.rewards.scoring import Rewards
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points
from tasks.runtime.warmup.plan import plan_kernels
from tests.runtime.helpers import own_rewards
from tests.runtime.helpers.comparable_runs import curve, file_of
from tests.runtime.helpers.narrow_preset import narrow
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

STEPS, RATE, GROUP, PROMPTS = 3, 1e-3, 4, 3
WORDS = ("apple", "bread", "cheese", "dates", "eggs", "figs", "grapes", "honey", "ice")


@pytest.fixture(scope="module")
def output(output):
    with narrow():
        save_pretrained(output / "pretrained")
    rows = [{"prompt": f"{word} and {other}", "answer": word} for word in WORDS for other in WORDS[:3]]
    (output / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return output


def spec_of(output, name, objective=None, **changes):
    settings = {
        "name": name,
        "output": str(output),
        "model": {"name": f"{output}/pretrained"},
        "data": {"source": f"{output}/prompts.jsonl", "sequence_length": 32, "validation_fraction": 0},
        "objective": {
            "type": "grpo",
            "rewards": [{"function": "tests.runtime.helpers.own_rewards:varied"}],
            "group_size": GROUP,
            "generation": {"max_new_tokens": 12, "temperature": 0.9},
            "overlong": "rewarded",
            **(objective or {}),
        },
        "training": {"steps": STEPS, "micro_batch_size": GROUP * PROMPTS},
        "optimizer": {"lr": RATE, "weight_decay": 0},
        "schedule": {"type": "constant", "warmup_ratio": 0},
        "checkpoint": {"every": 2, "keep_last": 10},
        "tracking": {"log_every": 1, "report_to": []},
        "runtime": {"framework": "torch"},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
    return RunSpec.model_validate(settings)


def prepared(spec):
    """The data of a run."""
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print)


def recorded(spec):
    """Train, and return the steps that were learned from."""
    steps, run = [], Rollout.run

    def recording(self, *arguments):
        steps.append(run(self, *arguments))
        return steps[-1]

    with mock.patch.object(Rollout, "run", recording):
        assert train_spec(spec).status == "complete"
    return steps


CUT = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS}
UNKNOWN = [{"function": "tests.runtime.helpers.own_rewards:unknown_for_some"}]
# Our settings and TRL's names for them.
RUNS = {
    "grpo": ({"loss": "grpo"}, {"loss_type": "grpo"}),
    "dapo": ({"loss": "dapo", "epsilon_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": ({"loss": "dr_grpo", "scale_rewards": "none"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "kl": ({"loss": "bnpo", "beta": 0.2}, {"loss_type": "bnpo", "beta": 0.2, "use_bias_correction_kl": False}),
    "iterations": (
        {"loss": "dapo", "num_iterations": 2, "epsilon": 0.02, "delta": 1.5, "scale_rewards": "batch"},
        {"loss_type": "dapo", "num_iterations": 2, "epsilon": 0.02, "delta": 1.5, "scale_rewards": "batch"},
    ),
    "gspo": (
        {"loss": "gspo", "num_iterations": 2, "epsilon": 0.001},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 0.001},
    ),
    "cispo": (
        {"loss": "cispo", "num_iterations": 2, "epsilon_high": 1.01},
        {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 1.01},
    ),
    "sapo": ({"loss": "sapo", "num_iterations": 2}, {"loss_type": "sapo", "num_iterations": 2}),
    # What the ratio has of the steps since is not in the weight.
    "importance": (
        {"loss": "dapo", "num_iterations": 2, "epsilon": 0.02, "importance_cap": 1.05},
        {
            "loss_type": "dapo",
            "num_iterations": 2,
            "epsilon": 0.02,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.05,
        },
    ),
    "mask": ({"loss": "dapo", "overlong": "mask"}, {"loss_type": "dapo", "mask_truncated_completions": True}),
    # Means are over the step, however it is cut.
    "cut-grpo": ({"loss": "grpo"}, {"loss_type": "grpo", **CUT}),
    "cut-dapo": ({"loss": "dapo", "overlong": "mask"}, {"mask_truncated_completions": True, **CUT}),
    # Answers that no reward has a value for.
    "unscored": ({"rewards": UNKNOWN}, {"loss_type": "dapo"}),
    "unscored-batch": (
        {"rewards": UNKNOWN, "loss": "grpo", "scale_rewards": "batch"},
        {"loss_type": "grpo", "scale_rewards": "batch"},
    ),
}


def by_trl(output, steps, options, reward=own_rewards.varied):
    """Loss and gradient norm of each step of TRL's trainer, with the answers of our run."""
    from trl import GRPOConfig, GRPOTrainer

    left = iter(steps)

    def rollout(prompts, trainer):
        step = next(left)
        order = sorted(range(len(step.prompts)), key=lambda index: step.prompts[index].answer)
        return {
            "prompt_ids": [list(step.prompts[index].token_ids) for index in order],
            "completion_ids": [step.samples[index].token_ids.tolist() for index in order],
            "logprobs": [step.samples[index].log_probs.tolist() for index in order],
        }

    rows = [{"prompt": "any"}] * (GROUP * PROMPTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {
            "output_dir": str(output / "trl"), "max_steps": STEPS, "per_device_train_batch_size": GROUP * PROMPTS,
            "num_generations": GROUP, "max_completion_length": 12, "temperature": 0.9, "learning_rate": RATE,
            "adam_beta2": 0.95, "lr_scheduler_type": "constant", "weight_decay": 0.0, "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, **options,
        }  # fmt: skip
        args = GRPOConfig(**settings)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(output / "pretrained", dtype=torch.float32),
            reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(output / "pretrained"), rollout_func=rollout,
        )  # fmt: skip
        if "vllm_importance_sampling_mode" in options:
            # It corrects for vLLM alone, which has given the answers for all that it knows.
            trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, mock.Mock(), -1
        trainer.train()
    return [(point["loss"], point["grad_norm"]) for point in trainer.state.log_history if "loss" in point]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_trl(output, name):
    objective, options = RUNS[name]
    cut = {"micro_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS} if "cut" in name else {}
    spec = spec_of(output, name.replace("_", "-"), objective, training=cut)
    generate = EmbeddedGenerator.generate

    def inexactly(self, *arguments):
        """As an engine that computes other log-probabilities."""
        return [
            sample._replace(log_probs=sample.log_probs + 0.1 * torch.arange(len(sample.log_probs)).sin())
            for sample in generate(self, *arguments)
        ]

    with mock.patch.object(EmbeddedGenerator, "generate", inexactly):
        steps = recorded(spec)
    assert len(steps) == -(-STEPS // spec.objective.num_iterations)
    found = [(loss, norm) for _, loss, norm, *_ in curve(spec)]
    reward = own_rewards.unknown_for_some if "rewards" in objective else own_rewards.varied
    expected = by_trl(output, steps, options, reward)
    assert len(found) == len(expected) == STEPS
    for step in range(STEPS):
        assert found[step][1] == pytest.approx(expected[step][1], rel=1e-4), f"step {step + 1}"
        # Losses of answers with their own policy are close to 0.
        assert found[step][0] == pytest.approx(expected[step][0], rel=1e-5, abs=2e-6), f"step {step + 1}"


def losses(spec, attempt=None):
    return [(loss, norm) for _, loss, norm, *_ in curve(spec, attempt)]


def answers(spec):
    """The answers that a run wrote down."""
    lines = map(json.loads, (RunFolder.of(spec).root / "answers.jsonl").read_text().splitlines())
    by_step = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append((line["answer"], line["reward"]))
    return by_step


def written(spec):
    return (RunFolder.of(spec).root / "answers.jsonl").read_text()


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_run_that_was_killed_continues_with_the_same_answers_and_losses(output, iterations):
    options = {"num_iterations": iterations, "beta": 0.1}
    changes = {"training": {"steps": 4, "micro_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS}}
    whole = spec_of(output, f"whole-{iterations}", options, **changes)
    cut = spec_of(output, f"cut-{iterations}", options, **changes)
    for spec in (whole, cut):
        train_spec(spec)
    train_spec(cut, step=2)
    assert len(losses(whole)) == 4 and losses(cut) == losses(whole)
    assert max(answers(whole)) > 2 and written(cut) == written(whole)


def test_a_run_that_is_killed_while_it_generates_continues_with_the_same_bits(output):
    """By SIGKILL in step 3, in the middle of an answer and of a line that tells of one."""
    whole, cut = (spec_of(output, name, training={"steps": 4, "micro_batch_size": GROUP}) for name in ("calm", "shot"))
    train_spec(whole)
    child = os.fork()
    if child == 0:
        draw, generate, steps = sampling.draw, EmbeddedGenerator.generate, iter("12")
        draws = iter("12345")

        def dying(*arguments):
            return draw(*arguments) if next(draws, None) else os.kill(os.getpid(), signal.SIGKILL)

        def in_the_third(self, *arguments):
            if next(steps, None):
                return generate(self, *arguments)
            with mock.patch("tasks.runtime.generation.embedded.draw", dying):
                return generate(self, *arguments)

        with mock.patch.object(EmbeddedGenerator, "generate", in_the_third):
            train_spec(cut)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with (RunFolder.of(cut).root / "answers.jsonl").open("a") as file:
        file.write('{"step": 3, "prom')
    train_spec(cut)
    assert losses(cut) == losses(whole)
    assert written(cut) == written(whole)


@pytest.mark.parametrize(
    ("iterations", "every", "bad", "groups"),
    [(1, 3, 5, [0, 1, 2, 3, 4, 5, 5, 6, 7]), (2, 4, 5, [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4])],
)
def test_after_a_rollback_the_weights_of_the_checkpoint_answer(output, iterations, every, bad, groups):
    """A bad step is noticed at the next checkpoint, when the prompts that come after those that are skipped have been
    answered by weights that are discarded. The run continues as one that resumes from the last checkpoint.
    """
    steps = 2 * every
    spec = spec_of(
        output, f"back-{iterations}", {"num_iterations": iterations},
        training={"steps": steps, "micro_batch_size": GROUP}, checkpoint={"every": every},
        tracking={"log_every": steps}, faults={"nonfinite": "rollback"},
    )  # fmt: skip
    read, plain_batches, plain_loss = [], Grpo.step_batches, Grpo.micro_batch_loss

    def step_batches(self, model, batches, processes):
        found = plain_batches(self, model, batches, processes)
        read.append(self._prompt_numbers[0] // GROUP)
        return found

    def micro_batch_loss(self, *arguments):
        share = plain_loss(self, *arguments)
        return share._replace(loss=share.loss * (torch.nan if len(read) == bad else 1.0))

    with (
        mock.patch.object(Grpo, "step_batches", step_batches),
        mock.patch.object(Grpo, "micro_batch_loss", micro_batch_loss),
    ):
        assert train_spec(spec).rollbacks == 1
        assert read == groups
        # The data that are passed over have theirs, and no step is there twice.
        told = {iterations * group + 1: GROUP for group in groups}
        assert {step: len(found) for step, found in answers(spec).items()} == told
        train_spec(spec, step=every)
    assert read[len(groups) :] == groups[-every:]
    assert len(losses(spec, 1)) == every and losses(spec, 1) == losses(spec)[-every:]
    assert losses(spec, 0)[-every:] == losses(spec, 1)
    assert {step: len(found) for step, found in answers(spec).items()} == told


def test_frameworks_and_micro_batches_do_not_change_a_step(output):
    """A group may be spread over micro-batches."""
    options = {"loss": "grpo", "overlong": "unrewarded", "scale_rewards": "batch"}
    whole = spec_of(output, "one-batch", options)
    train_spec(whole)
    for framework, size in (("hf", 6), ("lightning", 2)):
        training = {"steps": STEPS, "micro_batch_size": size, "gradient_accumulation_steps": GROUP * PROMPTS // size}
        spec = spec_of(output, f"cut-{framework}", options, training=training, runtime={"framework": framework})
        train_spec(spec)
        for found, expected in zip(losses(spec), losses(whole), strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


# Framework, strategy and adapter.
CELLS = [
    ("torch", "ddp", "lora"), ("hf", "fsdp", "none"), ("lightning", "fsdp", "lora"), ("lightning", "zero-2", "none"),
    ("torch", "zero-3", "none"), ("torch", "tensor-parallel", "none"),
]  # fmt: skip


def distributed(output, framework, strategy, adapter):
    """A run whose groups are spread over processes: each has two answers of every group, or draws half of the answers
    that both learn from.
    """
    processes, readers = 1 if strategy == "single" else 2, 1 if strategy in ("single", "tensor-parallel") else 2
    parallel = {"type": "deepspeed", "stage": int(strategy[-1])} if "zero" in strategy else {"type": strategy}
    if strategy == "tensor-parallel":
        parallel = {"type": "fsdp", "tensor_parallel": 2}
    training = {"steps": STEPS, "micro_batch_size": 2, "gradient_accumulation_steps": 6 // readers}
    objective = {"beta": 0.1, "num_iterations": 2, **REPLACING, "replacement_rounds": 3}
    return spec_of(
        output, f"{framework}-{strategy}-{adapter}", objective,
        training=training, adapter={"type": adapter}, topology={"nproc_per_node": processes}, parallel=parallel,
        runtime={"framework": framework}, data={"validation_fraction": 0.3}, evaluation={"every": 2, "samples": 0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(output):
    """Runs of two processes: from the start, and again from the first checkpoint."""
    specs = {cell: distributed(output, *cell) for cell in CELLS}
    files = [file_of(output, spec) for spec in specs.values()]
    launch("2", *files, *(f"{file}@2" for file in files))
    return specs


@pytest.fixture(scope="module")
def alone(output):
    specs = {adapter: distributed(output, "torch", "single", adapter) for adapter in ("none", "lora")}
    for spec in specs.values():
        train_spec(spec)
    return specs


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_two_processes_are_one(trained, alone, cell):
    one, two = alone[cell[-1]], trained[cell]
    for found, expected in zip(losses(two, 0), losses(one), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert read_points(RunFolder.of(two).metrics)[-1].metrics["kl"] > 0
    measured, expected = (read_evaluations(RunFolder.of(spec).metrics) for spec in (two, one))
    assert measured[0].metrics == pytest.approx(dict(expected[0].metrics), rel=1e-5)
    # The first rank tells of its rows' first prompt.
    assert answers(two)[1] == answers(one)[1][: None if cell[1] == "tensor-parallel" else 2]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_two_processes_continue_with_the_same_bits(trained, cell):
    assert losses(trained[cell], 1) == losses(trained[cell], 0)[2:]


AHEAD = {"generate_ahead": True}
FOUR = {"training": {"steps": 4, "micro_batch_size": GROUP * PROMPTS}, "optimizer": {"lr": 0.1, "weight_decay": 0}}


def test_answers_of_the_next_step_are_those_of_the_weights_before_the_step(output):
    """Step 3 follows a checkpoint, and generates for itself."""
    ahead = spec_of(output, "ahead", AHEAD, **FOUR)
    train_spec(ahead)
    unlearned = spec_of(output, "unlearned", **{**FOUR, "optimizer": {"lr": 1e-30, "weight_decay": 0}})
    at_once = spec_of(output, "at-once", **FOUR)
    for spec in (unlearned, at_once):
        train_spec(spec)
    found, of_first, of_each = map(answers, (ahead, unlearned, at_once))
    assert found[1] == of_first[1] and found[2] == of_first[2] != of_each[2]
    points = read_points(RunFolder.of(ahead).metrics)
    assert [point.metrics["staleness"] for point in points] == [0, 1, 0, 1]
    differences = [point.metrics["generation_difference"] for point in points]
    assert max(differences[::2]) < 1e-5 < 1e-2 < min(differences[1::2])
    # Killed after the checkpoint, it generates the same.
    train_spec(ahead, step=2)
    assert losses(ahead, 1) == losses(ahead, 0)[2:]


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_on_a_gpu_draws_its_answers_by_cuda_graphs(output, adapter, monkeypatch):
    replay, replayed = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replayed.append(self) or replay(self))
    # Each number of rows and of positions has a graph of its own, captured when it is met again.
    spec = spec_of(output, f"graphs-{adapter}", {"generation": {"max_new_tokens": 24}}, adapter={"type": adapter})
    assert train_spec(spec).status == "complete"
    assert replayed


def test_rewards_are_asked_for_before_the_model_learns(output):
    """In the order of a run whose second step generates nothing more: it is the last one before a checkpoint."""
    order = []

    def noting(owner, name, said):
        method = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *a, **k: (order.append(said), method(*a, **k))[1])

    with (
        noting(EmbeddedGenerator, "generate", "generate"), noting(Rewards, "begin", "begin"),
        noting(Rewards, "finish", "finish"), noting(Grpo, "micro_batch_loss", "learn"),
    ):  # fmt: skip
        train_spec(spec_of(output, "order", AHEAD, training={"steps": 2, "micro_batch_size": GROUP * PROMPTS}))
    assert order == ["generate", "begin", "generate", "finish", "begin", "learn", "finish", "learn"]


@pytest.mark.parametrize("cap", [None, 1.01])
def test_a_stale_token_weighs_what_its_probability_has_become_but_no_more_than_the_cap(output, cap):
    options = {**AHEAD, "importance_cap": cap, "loss": "dr_grpo", "scale_rewards": "none"}
    spec = spec_of(output, f"capped-{cap is None}".lower(), options, **FOUR)
    seen = []

    def weights(log_probs, generated, sequences, *arguments, **most):
        seen.append((log_probs.detach().clone(), generated.clone(), sequences.clone()))
        return truncated_importance_weights(log_probs, generated, sequences, *arguments, **most)

    with mock.patch("tasks.runtime.objectives.grpo.truncated_importance_weights", weights):
        steps = recorded(spec)
    log_probs, generated, sequences = seen[1]
    answered = sequences >= 0
    became = (log_probs - generated).exp()[answered]
    assert (became > 1.01).any() and (became < 0.99).any()
    advantages = steps[1].advantages.float()[sequences[answered]]
    expected = -(became.clamp(max=cap or 2.0) * advantages).sum() / (GROUP * PROMPTS * 12)
    assert losses(spec)[1][0] == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


def test_no_answer_that_was_cut_is_preferred_to_one_that_ended():
    """With rewards below 0, as a penalty of length or a reward model gives, 0 would be the prize for not ending."""
    finished = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    rewards = torch.tensor([[-0.5, -0.25, 0.0], [1.0, 0.5, -2.0], [0.0, -1.0, 0.0]])
    assert withheld(rewards, finished).tolist() == [[-0.5, -0.25, -0.5], [1.0, 0.5, -2.0], [0.0, -1.0, 0.0]]


@pytest.mark.parametrize("overlong", ["rewarded", "unrewarded"])
def test_an_answer_that_was_cut_has_the_reward_that_the_spec_says(output, overlong):
    """Answers end with a stop string or are cut, and rewards have weights."""
    rewards = [
        {"function": "tests.runtime.helpers.own_rewards:varied", "weight": 2.0},
        {"function": "regex", "weight": 0.5, "arguments": {"pattern": "."}},
    ]
    generation = {"max_new_tokens": 3, "stop": ["a", "e"]}
    spec = spec_of(output, overlong, {"rewards": rewards, "overlong": overlong, "generation": generation})
    train_spec(spec)
    told = [json.loads(line) for line in (RunFolder.of(spec).root / "answers.jsonl").read_text().splitlines()]
    assert {answer["finished"] for answer in told} == {True, False}
    for answer in told:
        varied, found = answer["rewards"].values()
        counts = answer["finished"] or overlong == "rewarded"
        assert answer["reward"] == pytest.approx(counts * (2 * varied + 0.5 * found))
        assert answer["finished"] == any(letter in answer["answer"] for letter in "ae")


def test_groups_without_signal_are_left_out(output):
    rewards = [{"function": "tests.runtime.helpers.own_rewards:rounded"}]
    loss_and_norm = {}
    for filtered in (False, True):
        spec = spec_of(
            output, f"filtered-{filtered}".lower(), {"rewards": rewards, "group_size": 2, "filter_groups": filtered}
        )
        steps = recorded(spec)
        loss_and_norm[filtered] = losses(spec)[0]
        silent = [step.advantages.eq(0).view(-1) for step in steps]
        assert any(found.any() for found in silent)
        for step, found in zip(steps, silent, strict=True):
            assert torch.equal(step.learned, ~found if filtered else torch.ones_like(found))
            assert step.answers == int(step.learned.sum())
    # The same gradient, divided by fewer tokens.
    assert loss_and_norm[True][1] > 1.05 * loss_and_norm[False][1]


REPLACING = {
    "rewards": [{"function": "tests.runtime.helpers.own_rewards:of_late_prompts"}],
    "filter_groups": True,
    "replacement_rounds": 20,
}


def test_groups_without_signal_are_replaced(output):
    """More than half of the prompts have none. A run that is killed draws the same ones."""
    changes = {"training": {"steps": 4, "micro_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS}}
    whole, cut = (spec_of(output, f"{name}-replaced", REPLACING, **changes) for name in ("whole", "cut"))
    steps, _ = recorded(whole), train_spec(cut)
    for step in steps:
        assert step.answers == GROUP * PROMPTS and bool(step.learned.all())
        assert all(prompt.known["prompt"] > "e" for prompt in step.prompts)
    points = read_points(RunFolder.of(whole).metrics)
    for step, point in zip(steps, points, strict=True):
        # Each round draws as many groups as are missing, and fills some.
        rounds, replaced = point.metrics["replacement_rounds"], point.metrics["replaced_groups"]
        silent = round(PROMPTS * (1 - point.metrics["groups_with_signal"]))
        assert silent == sum(prompt.answer >= 1 << 49 for prompt in step.prompts) / GROUP
        assert silent + rounds - 1 <= replaced <= silent * rounds if silent else rounds == replaced == 0
    assert len({point.metrics["replacement_rounds"] for point in points}) > 1
    train_spec(cut, step=2)
    assert losses(cut) == losses(whole)
    assert [answers(cut)[step][:GROUP] for step in (3, 4)] == [answers(whole)[step] for step in (3, 4)]


def test_what_is_silent_after_the_last_round_is_left_out_and_logged(output, caplog):
    spec = spec_of(output, "silent", {**REPLACING, "replacement_rounds": 1})
    steps = recorded(spec)
    left = [GROUP * PROMPTS - step.answers for step in steps]
    assert any(left) and [int((~step.learned).sum()) for step in steps] == left
    assert caplog.text.count("are all equal after objective.replacement_rounds 1") == sum(map(bool, left))


def test_a_model_is_measured_by_rewards_of_held_out_prompts(output):
    spec = spec_of(
        output, "measured",
        {
            "rewards": [
                {"function": "exact_match"}, {"function": "regex", "weight": 0.5, "arguments": {"pattern": "."}},
                {"function": "tests.runtime.helpers.own_rewards:sometimes", "weight": 0.1},
            ]
        },
        data={"validation_fraction": 0.3}, evaluation={"every": STEPS, "samples": 1},
    )  # fmt: skip
    record = train_spec(spec)
    (measured,) = read_evaluations(RunFolder.of(spec).metrics)
    found = measured.metrics
    # The mean of the last one is over answers that have it, of which a sum counts the others 0.
    rest = found["reward"] - found["reward/exact_match"] - 0.5 * found["reward/regex"]
    assert found["reward/sometimes"] == 2.0 and 0 < rest < 0.2
    assert measured.loss == -found["reward"] and found["reward/regex"] > 0
    after = evaluate(spec, record, prepared(spec), collect_weights(RunFolder.of(spec), spec.adapter, record))
    assert after.eval_metrics["reward"] == pytest.approx(found["reward"])


def test_a_column_that_a_reward_needs_is_missed_before_training(output):
    rewards = [{"function": "numeric", "arguments": {"column": "solution"}}]
    with pytest.raises(ValueError, match=r"rewards\[0\]: 'numeric' needs the column 'solution'"):
        train_spec(spec_of(output, "missing", {"rewards": rewards}))


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "num_iterations": 2}], ids=["plain", "all"])
def test_kernels_are_planned(output, options):
    changes = {"model": {"dtype": "bfloat16"}, "data": {"validation_fraction": 0.2}, "evaluation": {"every": 2}}
    spec = spec_of(output, "planned", options, **changes)
    names = {specialization.name for specialization in plan_kernels(spec).specializations}
    assert names >= {"cross_entropy_kernel", "norm_bwd_kernel", "rope_kernel"}
