"""A step that would ruin the weights is not taken, whatever drives the loop; what follows is what the spec says."""

import json
import math
import statistics

import pytest
import torch

from strata_platform.errors import SpecError
from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import read_model_tensors
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.optim.gradients import skip_step
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.runtime.training.step_guard import RollBack, StepGuard, spike_limit
from tests.runtime.helpers import comparable_runs
from tests.runtime.helpers.comparable_runs import approx, curve, file_of
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec
from tests.runtime.helpers.train_with_bad_step import BAD, ruin

pytestmark = pytest.mark.usefixtures("narrowed")
STEPS, SAVED = 6, 2


def make_spec(*cell, **options):
    """With data of more than these steps: what ruins one is read once."""
    values = comparable_runs.make_spec(*cell, steps=STEPS, **options).model_dump()
    return RunSpec.model_validate({**values, "data": {**values["data"], "max_samples": 120}})


def with_faults(spec, optimizer=None, **faults):
    return RunSpec.model_validate({**spec.model_dump(), "faults": faults, "optimizer": optimizer or {}})


# Judging.


def guard(**faults):
    spec = RunSpec.model_validate({"faults": faults})
    return StepGuard(spec.faults, spec.nonfinite, Processes(), {})


def judged(guard, *losses, norm=1.0):
    return [guard.decide(torch.tensor(loss), torch.tensor(norm)).item() for loss in losses]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_is_withheld(loss, norm):
    assert judged(guard(), loss, norm=norm) == [1.0]
    assert judged(guard(), 2.0, 1e30) == [0.0, 0.0]


def test_a_spike_is_far_above_the_losses_of_a_whole_window():
    watching = guard(spike="skip", spike_window=8, spike_deviations=6)
    before = [3.0, 2.9, 3.1, 2.8, 3.05, 2.95, 2.85, 2.9]
    # Not judged while the window fills, however high.
    assert judged(watching, *before[:-1], 9.0) == [0.0] * 8
    watching = guard(spike="skip", spike_window=8, spike_deviations=6)
    assert judged(watching, *before) == [0.0] * 8
    median = sorted(before)[3]
    limit = median + 6 * 1.4826 * sorted(abs(loss - median) for loss in before)[3]
    assert spike_limit(torch.tensor(before).double(), 6.0).item() == pytest.approx(limit)
    assert judged(watching, limit + 0.01, limit + 0.01, limit - 0.01) == [1.0, 1.0, 0.0]
    # Those that were withheld are not among the losses before; the one that was taken has pushed out the first.
    assert watching.metadata()["guard"]["losses"] == pytest.approx([*before[1:], limit - 0.01])


def test_equal_losses_make_no_spike_of_rounding():
    watching = guard(spike="skip", spike_window=8)
    assert judged(watching, *[2.0] * 8, 2.001, 2.1) == [0.0] * 9 + [1.0]


def test_a_checkpoint_has_what_is_needed_to_judge_on():
    first = guard(spike="skip", spike_window=8)
    judged(first, *(3.0 + number / 10 for number in range(6)))
    second = StepGuard(first._faults, first._nonfinite, Processes(), json.loads(json.dumps(first.metadata())))
    assert judged(first, 3.1, 3.2, 9.0, 3.0) == judged(second, 3.1, 3.2, 9.0, 3.0) == [0.0, 0.0, 1.0, 0.0]
    assert first.metadata() == second.metadata()


# Following.


def point(step, loss=2.0, norm=1.0, skipped=0):
    names = ("attempt", "time", "learning_rate", "tokens", "target_tokens", "tokens_per_second", "step_seconds")
    return MetricPoint(step=step, loss=loss, grad_norm=norm, skipped=skipped, memory_bytes=0, **dict.fromkeys(names, 0))


def nan(step):
    return point(step, math.nan, math.nan, skipped=1)


def test_skips_in_a_row_are_limited():
    skipping = guard(max_skips=2)
    skipping.apply_policy([nan(1), nan(2), point(3), nan(4), nan(5)], newest=0, steps=9)
    with pytest.raises(ValueError, match=r"step 6: the loss is nan .* 2 steps before.*faults\.max_skips is 2"):
        skipping.apply_policy([nan(6)], newest=4, steps=9)


def test_a_run_that_took_no_step_does_not_end_well():
    with pytest.raises(ValueError, match=r"step 3: .* all of them were skipped"):
        guard().apply_policy([nan(1), nan(2), nan(3)], newest=0, steps=3)


def test_stop_says_how_to_go_on():
    with pytest.raises(
        ValueError, match=r"step 2: the loss is nan.*was skipped, and faults\.nonfinite is 'stop'.*'rollback'"
    ):
        guard(nonfinite="stop").apply_policy([point(1), nan(2)], newest=0, steps=9)
    with pytest.raises(ValueError, match=r"loss of 9\.0000 is far above.*faults\.spike is 'stop'"):
        guard(spike="stop").apply_policy([point(2, 9.0, skipped=1)], newest=0, steps=9)


def test_rollback_passes_over_all_that_is_bad_so_often_as_it_may():
    returning = guard(nonfinite="rollback", max_rollbacks=2)
    with pytest.raises(RollBack) as caught:
        returning.apply_policy([nan(5), point(6), nan(7), point(8)], newest=4, steps=9)
    assert caught.value.bad == 7
    returning.skip_data(4, caught.value)
    returning.skip_data(4, RollBack(5, ""))
    assert returning.data_skips == [(4, 3), (4, 1)]
    with pytest.raises(ValueError, match=r"returned to a checkpoint 2 times already, and faults\.max_rollbacks"):
        returning.skip_data(4, RollBack(5, "the loss is nan"))


@pytest.mark.parametrize(("bad", "skipped"), [(5, 3), (7, 3), (8, 6)])
def test_steps_that_read_the_same_rows_are_skipped_together(bad, skipped):
    """Later checkpoints fall between those that read other rows, as they do without a rollback."""
    returning = guard(nonfinite="rollback")
    returning.skip_data(4, RollBack(bad, ""), steps_of_rows=3)
    assert returning.data_skips == [(4, skipped)]


def test_of_steps_that_follow_lost_weights_none_is_to_blame():
    returning = guard(nonfinite="rollback")
    with pytest.raises(RollBack, match="step 6: the loss is nan") as caught:
        returning.apply_policy([point(5), *(point(step, math.nan, None) for step in range(6, 9))], newest=4, steps=9)
    returning.skip_data(4, caught.value)
    assert returning.data_skips == [(4, 2)]


def test_before_the_first_checkpoint_rollback_skips_what_was_not_taken():
    guard(nonfinite="rollback").apply_policy([nan(1)], newest=0, steps=9)
    with pytest.raises(ValueError, match=r"weights are lost.*There is no checkpoint to return to"):
        guard(nonfinite="rollback").apply_policy([point(1, math.nan, None)], newest=0, steps=9)


@pytest.mark.parametrize("faults", [{"nonfinite": "skip"}, {"spike": "rollback"}])
def test_steps_in_the_backward_pass_cannot_be_withheld(faults):
    optimizer = {"in_backward": True, "max_grad_norm": 0}
    with pytest.raises(SpecError, match=rf"faults\.{next(iter(faults))}.*optimizer\.in_backward"):
        RunSpec.model_validate({"optimizer": optimizer, "faults": faults})
    assert RunSpec.model_validate({"optimizer": optimizer}).nonfinite == "stop"
    assert RunSpec().nonfinite == "skip"


# Withholding.


@pytest.mark.parametrize("type", ["adamw", "muon"])
@pytest.mark.parametrize("taken", [0, 2], ids=["first step", "third step"])
def test_a_withheld_step_changes_nothing(type, taken):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)

        def get_output_embeddings(self):
            return None

    torch.manual_seed(0)
    model = Model()
    optimizer = build_optimizer(model, RunSpec.model_validate({"optimizer": {"type": type}}))

    def step(gradient, verdict):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        skip_step(optimizer, torch.tensor(verdict))
        optimizer.step()
        optimizer.zero_grad()

    def state():
        slots = [slot.clone() for p in model.parameters() for _, slot in sorted(optimizer.state[p].items())]
        return [parameter.detach().clone() for parameter in model.parameters()] + [slot for slot in slots if slot.any()]

    for _ in range(taken):
        step(0.5, 0.0)
    before = state()
    step(math.nan, 1.0)
    assert all(torch.equal(*pair) for pair in zip(before, state(), strict=True))
    step(0.5, 0.0)
    assert not torch.equal(before[0], state()[0])


# Training.


def skipped(spec):
    return [point.step for point in read_points(RunFolder.of(spec).metrics) if point.skipped]


def weights(spec, step):
    return read_model_tensors(Index(RunFolder.of(spec).checkpoints / f"checkpoint-{step}"))


@pytest.fixture(scope="module")
def clean(output):
    spec = make_spec(output, "clean", "torch", "single", 1)
    assert train_spec(spec).status == "complete"
    return curve(spec)


@pytest.fixture(scope="module")
def ruined():
    with pytest.MonkeyPatch.context() as patch:
        ruin(patch=patch.setattr)
        yield


@pytest.fixture(scope="module")
def alone(output, clean, ruined):
    """The curve of the plain loop in one process, by what follows."""
    curves = {}
    for action in ("skip", "rollback"):
        spec = with_faults(make_spec(output, f"alone-{action}", "torch", "single", 1), nonfinite=action)
        record = train_spec(spec)
        assert (record.status, record.skipped_steps, record.rollbacks) == {
            "skip": ("complete", 1, 0),
            "rollback": ("complete", 0, 1),
        }[action]
        assert math.isfinite(record.train_loss)
        curves[action] = curve(spec)
    return curves


def test_a_skipped_step_leaves_the_weights_as_they_were(output, clean, alone):
    spec = make_spec(output, "every", "torch", "single", 1)
    spec = with_faults(RunSpec.model_validate({**spec.model_dump(), "checkpoint": {"every": 1, "keep_last": STEPS}}))
    assert train_spec(spec).skipped_steps == 1
    before, after = weights(spec, BAD - 1), weights(spec, BAD)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(after["model.embed_tokens.weight"], weights(spec, BAD + 1)["model.embed_tokens.weight"])
    assert curve(spec)[: BAD - 1] == clean[: BAD - 1]
    assert math.isnan(curve(spec)[BAD - 1][1]) and curve(spec)[BAD:] == alone["skip"][BAD:]


def test_going_back_is_starting_again_past_the_data(output, clean, alone):
    """A run that begins well, and is told by its checkpoint what to pass over, computes the same bits."""
    assert alone["rollback"][:SAVED] == clean[:SAVED] and alone["rollback"][SAVED:] != clean[SAVED:]
    spec = make_spec(output, "clean", "torch", "single", 1)
    folder = RunFolder.of(spec).checkpoints / f"checkpoint-{SAVED}"
    told = {"guard": {"losses": [], "skips": 0, "passed_over": [[SAVED, BAD - SAVED]]}}
    checkpoint.update_metadata(folder, told)
    assert train_spec(spec, SAVED).rollbacks == 1
    assert [step[:4] for step in curve(spec)] == [step[:4] for step in alone["rollback"]]


@pytest.mark.parametrize("step", [SAVED, BAD])
def test_what_continues_a_run_that_went_back_agrees(output, alone, step):
    spec = with_faults(make_spec(output, "alone-rollback", "hf", "single", 1), nonfinite="rollback")
    assert train_spec(spec, step).rollbacks == 1
    assert curve(spec) == alone["rollback"]


def test_stop_ends_the_run_before_a_checkpoint(output, ruined):
    spec = with_faults(make_spec(output, "stop", "hf", "single", 1), nonfinite="stop")
    with pytest.raises(ValueError, match=rf"step {BAD}: the loss is nan .* faults\.nonfinite is 'stop'"):
        train_spec(spec)
    assert checkpoint.step_of(checkpoint.latest(RunFolder.of(spec).checkpoints)) == SAVED


def test_weights_that_were_lost_in_the_backward_pass_come_back(output, ruined):
    spec = make_spec(output, "in-backward", "torch", "single", 1, training={"micro_batch_size": 4})
    spec = RunSpec.model_validate(
        {**spec.model_dump(), "training": {**spec.training.model_dump(), "gradient_accumulation_steps": 1}}
    )
    spec = with_faults(spec, {"in_backward": True, "max_grad_norm": 0}, nonfinite="rollback")
    record = train_spec(spec)
    assert (record.status, record.rollbacks, record.skipped_steps) == ("complete", 1, 0)
    assert all(map(math.isfinite, (loss for _, loss, *_ in curve(spec))))


# By stage of ZeRO.
SPIKES = {2: "skip", 3: "rollback"}

# Each framework and each strategy, with each of what follows.
CELLS = [
    ("skip", "hf", "ddp"),
    ("skip", "lightning", "fsdp"),
    ("skip", "torch", "deepspeed"),
    ("rollback", "hf", "deepspeed"),
    ("rollback", "lightning", "ddp"),
    ("rollback", "torch", "fsdp"),
]


@pytest.fixture(scope="module")
def launched(output):
    specs = {cell: with_faults(make_spec(output, "-".join(cell), *cell[1:], 2), nonfinite=cell[0]) for cell in CELLS}
    specs["muon"] = with_faults(
        make_spec(output, "muon", "torch", "fsdp", 2), {"type": "muon", "max_grad_norm": 0}, nonfinite="skip"
    )
    for stage, action in SPIKES.items():
        spec = make_spec(output, f"spike-{stage}", "torch", "deepspeed", 2, stage=stage)
        specs["spike", stage] = with_faults(spec, spike=action)
    files = [file_of(output, spec) for spec in specs.values()]
    launch(2, "--narrow", *files, module="tests.runtime.helpers.train_with_bad_step")
    return specs


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_all_processes_and_frameworks_do_the_same(launched, alone, cell):
    spec = launched[cell]
    got, expected = curve(spec), alone[cell[0]]
    assert skipped(spec) == ([BAD] if cell[0] == "skip" else [])
    bad = BAD - 1 if cell[0] == "skip" else None
    assert [step for number, step in enumerate(got) if number != bad] == approx(
        [step for number, step in enumerate(expected) if number != bad]
    )
    record = CompletionRecord.load(RunFolder.of(spec).record)
    assert record.rollbacks == (cell[0] == "rollback")


def test_muon_and_unclipped_gradients_are_watched_as_well(launched):
    losses = [loss for _, loss, *_ in curve(launched["muon"])]
    assert skipped(launched["muon"]) == [BAD] and math.isnan(losses[BAD - 1])
    assert statistics.mean(losses[BAD:]) < losses[0]


@pytest.mark.parametrize(("stage", "action"), SPIKES.items())
def test_a_spike_is_not_taken(output, ruined, launched, stage, action):
    """Gradients of one are finite, so that DeepSpeed by itself would take the step."""
    spec = with_faults(make_spec(output, f"spike-alone-{stage}", "lightning", "single", 1), spike=action)
    assert (train_spec(spec).skipped_steps, train_spec(spec).rollbacks) == (action == "skip", action == "rollback")
    got, expected = curve(launched["spike", stage]), curve(spec)
    assert skipped(spec) == skipped(launched["spike", stage]) == ([BAD] if action == "skip" else [])
    assert got == approx(expected)
    assert (got[BAD - 1][1] > 100) == (action == "skip")
