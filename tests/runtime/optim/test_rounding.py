"""Updates of bfloat16 weights, held against fp32 training by PyTorch's own optimizers."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split
from torch.testing._internal.distributed.fake_pg import FakeStore

from strata_kernels import join_weight, split_weight
from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Model
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.flat_shard import FlatShard
from tasks.runtime.checkpoint.state import load_model, load_optimizer
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.checkpoint.writer import CheckpointWriter
from tasks.runtime.models.build import build_model
from tasks.runtime.models.config import PRESETS
from tasks.runtime.optim.adamw_8bit import BLOCK
from tasks.runtime.optim.lr_schedule import set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.process.ranks import Processes

PRECISIONS = ("fp32_master", "stochastic_rounding", "nearest")
TYPES = ("adamw", "adamw_8bit", "muon")
STEPS, RATE = 100, 1e-5


class ToyModel(nn.Module):
    """A matrix that every optimizer takes in its own way, and a norm."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, BLOCK)
        self.proj = nn.Linear(BLOCK, 64, bias=False)
        self.norm = nn.Parameter(torch.ones(64))

    def get_output_embeddings(self):
        return None


def model_of(dtype):
    torch.manual_seed(0)
    # The same start in both dtypes.
    return ToyModel().bfloat16().to(dtype)


def gradients(model, step):
    """The same in every run, of one sign for most weights: a drift that is lost if every step of it is."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).add(0.5).bfloat16() for p in model.parameters()]


def spec_of(**optimizer):
    return RunSpec(optimizer={"max_grad_norm": 0, "weight_decay": 0.1, **optimizer})


def train(dtype, steps=range(STEPS), model=None, optimizer=None, **settings):
    model = model or model_of(dtype)
    optimizer = optimizer or build_optimizer(model, spec_of(**settings))
    set_learning_rate(optimizer, RATE)
    for step in steps:
        for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def masters(model, optimizer):
    """fp32 weights, of which a model in bfloat16 shows the upper halves."""
    return [
        join_weight(p.detach(), optimizer.state[p]["remainder"]) if "remainder" in optimizer.state[p] else p.float()
        for p in model.parameters()
    ]


def drift(weights):
    start = [parameter.detach().float() for parameter in model_of(torch.float32).parameters()]
    return torch.cat([(new.detach() - old).flatten() for new, old in zip(weights, start, strict=True)])


@pytest.fixture(scope="module")
def exact():
    """How far fp32 weights come under PyTorch's own optimizer, by `optimizer.type`."""
    found = {}
    for type in ("adamw", "adamw_8bit", "muon"):
        model, _ = train(torch.float32, type=type)
        found[type] = drift(masters(model, build_optimizer(model, spec_of(type=type))))
    return found


@pytest.mark.parametrize("type", TYPES)
def test_fp32_masters_follow_fp32_training(type, exact):
    model, optimizer = train(torch.bfloat16, type=type)
    error = (drift(masters(model, optimizer)) - exact[type]).norm() / exact[type].norm()
    # AdamW on a CPU has fp32 moments, and PyTorch's own bits; elsewhere moments are bfloat16, rounded at random.
    assert error == 0 if type == "adamw" else error < 0.01
    weights = [parameter.detach() for parameter in model.parameters()]
    for weight, master in zip(weights, masters(model, optimizer), strict=True):
        assert torch.equal(weight, split_weight(master)[0])


@pytest.mark.parametrize("type", TYPES)
def test_stochastic_rounding_follows_fp32_training_in_the_mean(type, exact):
    model, optimizer = train(torch.bfloat16, type=type, precision="stochastic_rounding")
    found = drift([parameter.float() for parameter in model.parameters()])
    # Along the direction of the drift. Noise of 17,000 weights, each rounded to steps ten times the drift, leaves 0.04.
    assert torch.dot(found, exact[type]) / exact[type].square().sum() == pytest.approx(1, abs=0.2)
    assert not any("remainder" in state for state in optimizer.state.values())


@pytest.mark.parametrize("type", TYPES)
def test_nearest_loses_most_of_it(type, exact):
    model, _ = train(torch.bfloat16, type=type, precision="nearest")
    found = drift([parameter.float() for parameter in model.parameters()])
    assert torch.dot(found, exact[type]) / exact[type].square().sum() < 0.5


def small_model(type):
    """As small as 8-bit moments allow, and smaller for Muon: its products in bfloat16 are slow where a CPU has none."""
    width = 64 if type == "muon" else BLOCK
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": width, "intermediate_size": width}
    with mock.patch.dict(PRESETS["tiny-llama"], sizes):
        return build_model(Model(dtype="bfloat16"), 0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("type", TYPES)
def test_steps_repeat_bit_for_bit_and_go_on_from_a_checkpoint(type, precision, tmp_path):
    def bits(model, optimizer):
        return [*model.parameters(), *(t for p in model.parameters() for t in optimizer.state[p].values())]

    def trained(steps):
        model = small_model(type)
        return train(torch.bfloat16, steps, model, build_optimizer(model, spec))

    spec = spec_of(type=type, precision=precision)
    whole = trained(range(3))
    # A run of its own, which would be another if its first steps did not repeat.
    model, optimizer = trained(range(2))
    again = build_optimizer(model, spec)
    load_optimizer(saved(tmp_path, model, optimizer), model, again)
    train(torch.bfloat16, range(2, 3), model, again)
    assert all(map(torch.equal, bits(*whole), bits(model, again)))


@pytest.mark.parametrize("type", TYPES)
def test_state_keeps_its_types_when_it_is_loaded_as_accelerate_does(type):
    model, optimizer = train(torch.bfloat16, range(2), type=type)
    before = {p: dict(optimizer.state[p]) for p in model.parameters()}
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter, state in before.items():
        assert {name: tensor.dtype for name, tensor in optimizer.state[parameter].items()} == {
            name: tensor.dtype for name, tensor in state.items()
        }
        assert all(torch.equal(optimizer.state[parameter][name], tensor) for name, tensor in state.items())


def test_other_seeds_round_otherwise():
    def weights(seed):
        model = model_of(torch.bfloat16)
        spec = RunSpec(seed=seed, optimizer={"precision": "stochastic_rounding", "max_grad_norm": 0})
        return train(torch.bfloat16, range(3), model, build_optimizer(model, spec))[0].proj.weight

    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("before", PRECISIONS)
@pytest.mark.parametrize("after", PRECISIONS)
def test_precision_may_change_between_attempts(before, after):
    """Also from a run of a version that had no `optimizer.precision`, which was `nearest`."""
    model, optimizer = train(torch.bfloat16, range(2), precision=before)
    changed = build_optimizer(model, spec_of(precision=after))
    changed.state = optimizer.state
    train(torch.bfloat16, range(2, 4), model, changed)
    assert all(("remainder" in state) == (after == "fp32_master") for state in changed.state.values())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_in_the_backward_pass_are_the_same(precision):
    def trained(**settings):
        model = model_of(torch.bfloat16)
        optimizer = build_optimizer(model, spec_of(precision=precision, **settings))
        set_learning_rate(optimizer, RATE)
        for _ in range(3):
            model.norm.mul(model.proj(model.embed.weight)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert all(map(torch.equal, trained(), trained(in_backward=True)))


class FlatMasters(torch.optim.Optimizer):
    """Keeps fp32 master weights in flat memory, as DeepSpeed's engine does."""

    def __init__(self, model):
        super().__init__(list(model.parameters()), {})
        self.copy_weights_to_masters()

    def optimizer_state(self, parameter):
        return {"master": FlatShard(parameter.shape, 0, self.flat[parameter])}

    def new_state_tensor(self, parameter, name, shape, dtype):
        # Moments are the engine's own matter.
        return self.optimizer_state(parameter)[name] if name == "master" else None

    def copy_weights_to_masters(self):
        self.flat = {p: p.detach().float().flatten() for group in self.param_groups for p in group["params"]}


def saved(folder, model, optimizer):
    writer = CheckpointWriter(folder, model, optimizer, Processes(), keep_last=1, metadata={})
    writer.save(1)
    writer.finish()
    return Index(checkpoint.latest(folder))


def test_master_weights_go_from_one_strategy_to_another_bit_for_bit(tmp_path):
    def small():
        with mock.patch.dict(PRESETS["tiny-llama"], {"num_hidden_layers": 1, "vocab_size": 64}):
            return build_model(Model(dtype="bfloat16"), 0)

    model = small()
    _, optimizer = train(torch.bfloat16, range(3), model, build_optimizer(model, spec_of()))
    expected = masters(model, optimizer)
    assert not all(torch.equal(m, p.float()) for m, p in zip(expected, model.parameters(), strict=True))
    engine = FlatMasters(model)
    load_optimizer(saved(tmp_path / "split", model, optimizer), model, engine)
    assert all(torch.equal(engine.flat[p].view_as(p), m) for p, m in zip(model.parameters(), expected, strict=True))

    other = small()
    index = saved(tmp_path / "flat", model, engine)
    load_model(index, other)
    split = build_optimizer(other, spec_of())
    load_optimizer(index, other, split)
    assert all(map(torch.equal, masters(other, split), expected))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("type", TYPES)
def test_low_bits_are_not_loaded_where_none_are_kept(type, precision, tmp_path, caplog):
    """A run that was out of memory starts again with a precision that takes less: from its first step on."""
    model = small_model(type)
    _, optimizer = train(torch.bfloat16, range(1), model, build_optimizer(model, spec_of(type=type)))
    other = build_optimizer(model, spec_of(type=type, precision=precision))
    with caplog.at_level("WARNING", "tasks"):
        load_optimizer(saved(tmp_path, model, optimizer), model, other)
    assert ("master weights of" in caplog.text) == (precision != "fp32_master")
    assert all(("remainder" in state) == (precision == "fp32_master") for state in other.state.values())


PARTS = {"rows": (3, 1), "columns": (1, 2), "both": (3, 2)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows, columns", PARTS.values(), ids=PARTS.keys())
def test_shards_have_the_bits_of_the_whole(rows, columns, precision):
    """Each process of a job steps its part: rows that FSDP splits unevenly, columns that tensor parallelism splits."""
    weight, gradient = torch.randn(7, 10).bfloat16(), torch.randn(7, 10).bfloat16()

    def stepped(parameter, part):
        model = nn.Module()
        model.register_parameter("weight", parameter)
        optimizer = build_optimizer(model, spec_of(precision=precision))
        set_learning_rate(optimizer, RATE)
        for _ in range(3):
            parameter.grad = part
            optimizer.step()
        state = optimizer.state[parameter]
        found = [parameter.detach(), *(state[name] for name in sorted(state) if name != "step")]
        return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in found]

    whole = stepped(nn.Parameter(weight.clone()), gradient)
    parts = [[None] * columns for _ in range(rows)]
    for rank in range(rows * columns):
        dist.init_process_group("fake", rank=rank, world_size=rows * columns, store=FakeStore())
        try:
            # Names of its own, or DTensor's cache of operators gives tensors the mesh of the rank before.
            mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=(f"rows-{rank}", f"columns-{rank}"))
            places = [Split(0) if rows > 1 else Replicate(), Split(1) if columns > 1 else Replicate()]

            def part_of(tensor, mesh=mesh, places=places, rank=rank):
                rows_of = tensor.tensor_split([3, 6]) if rows > 1 else [tensor]
                local = rows_of[rank // columns].chunk(columns, dim=1)[rank % columns].contiguous()
                return DTensor.from_local(local, mesh, places, shape=tensor.shape, stride=tensor.stride())

            parts[rank // columns][rank % columns] = stepped(nn.Parameter(part_of(weight)), part_of(gradient))
        finally:
            dist.destroy_process_group()
    for number, tensor in enumerate(whole):
        joined = torch.cat([torch.cat([part[number] for part in row], dim=1) for row in parts])
        assert torch.equal(joined, tensor)


def test_a_skipped_step_changes_nothing():
    model, optimizer = train(torch.bfloat16, range(2))
    before = [t.clone() for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    optimizer.found_inf = torch.ones(())
    train(torch.bfloat16, range(2, 3), model, optimizer)
    after = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_without_effect_is_warned_of(precision, caplog):
    with caplog.at_level("WARNING", "tasks"):
        build_optimizer(model_of(torch.float32), spec_of(precision=precision))
    assert ("has no effect: no trainable weight is bfloat16" in caplog.text) == (precision != "fp32_master")


def test_the_engine_of_deepspeed_keeps_masters_of_its_own():
    two = {"topology": {"nproc_per_node": 2}, "parallel": {"type": "deepspeed"}}
    model = model_of(torch.bfloat16)
    assert type(build_optimizer(model, RunSpec.model_validate(two))) is torch.optim.AdamW
    for precision in PRECISIONS[1:]:
        with pytest.raises(SpecError, match=r"optimizer\.precision.*always keeps them; set optimizer\.precision to"):
            RunSpec.model_validate({**two, "optimizer": {"precision": precision}})
