"""Moments in memory that gives way: the same steps, where they are, and where that cannot be."""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Model
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import load_optimizer
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.checkpoint.writer import CheckpointWriter
from tasks.runtime.models.build import build_model
from tasks.runtime.optim import managed_memory, state_tensors
from tasks.runtime.optim.lr_schedule import set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.parallel import require_packages
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tests.runtime.helpers.train_only import train_spec

TYPES = ["adamw", "adamw_8bit"]
DEVICE = torch.device("cuda", 0)


def spec_of(**optimizer):
    return RunSpec.model_validate({"optimizer": {"lr": 1e-2, "max_grad_norm": 0, **optimizer}})


def model_of(device="cpu", dtype=torch.float32):
    """An embedding, a matrix whose moments are large on a GPU also in eight bits, and small ones."""
    torch.manual_seed(0)
    width = 512 if device == "cpu" else 16384
    layers = nn.Embedding(2048, 256), nn.Linear(256, width), nn.Linear(width, 24)
    return nn.Sequential(*layers).to(device, dtype)


def optimizer_of(model, **fields):
    return build_optimizer(model, spec_of(**fields))


def take_steps(model, optimizer, first, count):
    """With gradients that are functions of the step: no kernel of a backward pass adds to them in another order."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        set_learning_rate(optimizer, 1e-2 / (1 + step))
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer):
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"{slot}.{name}": tensor for slot, tensor in optimizer.state[parameter].items()}
    return state


def require_same(ours, others):
    assert list(ours) == list(others)
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.device) == (others[name].dtype, others[name].device), name
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_and_state_are_those_of_ordinary_memory(type, dtype):
    states = []
    for is_paged in (False, True):
        model = model_of(dtype=dtype)
        optimizer = optimizer_of(model, type=type, paged=is_paged)
        take_steps(model, optimizer, 0, 3)
        states.append(state_of(model, optimizer))
    require_same(*states)


@pytest.mark.parametrize("type", TYPES)
def test_steps_in_the_backward_pass_are_the_same(type):
    def train(**fields):
        model = model_of()
        optimizer = optimizer_of(model, type=type, in_backward=True, **fields)
        for _ in range(2):
            model(torch.arange(6)).square().sum().backward()
        return state_of(model, optimizer)

    require_same(train(), train(paged=True))


def test_what_has_no_gradient_has_no_state():
    model = model_of()
    model[0].weight.requires_grad_(False)
    optimizer = optimizer_of(model, paged=True)
    model[1](torch.ones(256)).sum().backward()
    optimizer.step()
    assert {name for name, parameter in model.named_parameters() if optimizer.state.get(parameter)} == {
        "1.weight", "1.bias",
    }  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """Shapes and addresses of the tensors that are asked for as managed memory."""
    found = {}

    def zeros(shape, *, dtype, device):
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        found[tensor.data_ptr()] = tensor
        return tensor

    monkeypatch.setattr(state_tensors, "paged_zeros", zeros)
    return found


def where(model, optimizer):
    """Addresses of the state; the count of `adamw_8bit` is a new tensor in each step."""
    slots_of = [optimizer.state[parameter] for parameter in model.parameters()]
    return [tensor.data_ptr() for state in slots_of for name, tensor in state.items() if name != "step"]


def saved(folder, model, optimizer):
    writer = CheckpointWriter(folder, model, optimizer, Processes(), keep_last=1, metadata={})
    writer.save(1)
    writer.finish()
    return Index(checkpoint.latest(folder))


@pytest.mark.parametrize("type", TYPES)
def test_new_slots_and_loaded_ones_are_made_in_one_place(type, made, tmp_path):
    spec = spec_of(type=type, paged=True)
    model = build_model(spec.model, spec.seed)
    optimizer = build_optimizer(model, spec)
    take_steps(model, optimizer, 0, 1)
    assert where(model, optimizer) and set(where(model, optimizer)) <= made.keys()
    index = saved(tmp_path, model, optimizer)
    loaded = build_optimizer(model, spec)
    load_optimizer(index, model, loaded)
    assert set(where(model, loaded)) <= made.keys() - set(where(model, optimizer))
    require_same(state_of(model, optimizer), state_of(model, loaded))
    before = where(model, loaded)
    # As accelerate does.
    loaded.load_state_dict(loaded.state_dict())
    assert where(model, loaded) == before
    made.clear()
    load_optimizer(index, model, build_optimizer(model, spec_of(type=type)))
    assert not made


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(0), Shard(1))],
    ids=["rows", "rows twice", "both"],
)
def test_a_slot_is_split_like_its_parameter(placements, mesh, made):
    parameter = nn.Parameter(distribute_tensor(torch.ones(6, 512), mesh, placements))
    moment = state_tensors.new_state_tensor(parameter, parameter.shape, torch.uint8, paged=True)
    scales = state_tensors.new_state_tensor(parameter, torch.Size((6, 2)), torch.float32, paged=True)
    for slot, shape in ((moment, (6, 512)), (scales, (6, 2))):
        assert isinstance(slot, DTensor) and not slot.requires_grad
        assert (slot.shape, slot.stride(), slot.placements) == (shape, (shape[1], 1), parameter.placements)
        assert slot.device_mesh == parameter.device_mesh and slot.to_local().data_ptr() in made
    count = state_tensors.new_state_tensor(parameter, torch.Size(), torch.float32, paged=True)
    assert not isinstance(count, DTensor) and count.shape == ()


def test_what_is_not_in_one_piece_keeps_its_order(made):
    parameter = nn.Parameter(torch.ones(4, 6).t())
    slot = state_tensors.new_state_tensor(parameter, parameter.shape, torch.float32, paged=True)
    assert slot.stride() == parameter.stride() and not made


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_on_the_cpu_memory_is_ordinary(shape):
    tensor = managed_memory.zeros(shape, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(tensor, torch.zeros(shape, dtype=torch.bfloat16))


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's, without a GPU."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "cudaSetDevice", lambda device: (runtime.cudaError_t.cudaSuccess,))
    return runtime


@pytest.mark.parametrize(
    ("error", "type", "message"),
    [
        (
            "cudaErrorMemoryAllocation",
            torch.OutOfMemoryError,
            r"^optimizer\.paged: neither cuda:0 nor the host has 2\.0 MiB more",
        ),
        (
            "cudaErrorNotSupported",
            ValueError,
            r"^optimizer\.paged: cuda:0 cannot allocate .*cudaErrorNotSupported.* to false",
        ),
    ],
)
def test_memory_that_is_not_there_is_told(error, type, message, runtime, monkeypatch):
    monkeypatch.setattr(runtime, "cudaMallocManaged", lambda size, flags: (getattr(runtime.cudaError_t, error), None))
    with pytest.raises(type, match=message):
        managed_memory.zeros((1 << 19,), torch.float32, DEVICE)


def test_memory_lasts_as_long_as_its_object(runtime, monkeypatch):
    freed = []
    monkeypatch.setattr(runtime, "cudaMallocManaged", lambda size, flags: (runtime.cudaError_t.cudaSuccess, 4096))
    monkeypatch.setattr(runtime, "cudaFree", freed.append)
    memory = managed_memory._Managed(1 << 20, DEVICE)
    assert memory.__cuda_array_interface__ == {
        "version": 3, "shape": (1 << 20,), "typestr": "|u1", "data": (4096, False),
    }  # fmt: skip
    assert not freed
    del memory
    assert freed == [4096]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("tasks.runtime.parallel.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"optimizer\.paged needs the package cuda-bindings, .* optimizer\.paged to f"):
        require_packages(spec_of(paged=True))


@pytest.mark.parametrize(
    ("optimizer", "parallel", "message"),
    [
        ({"type": "muon"}, {"type": "fsdp"}, r"optimizer\.paged: .* optimizer\.type 'muon' .* to 'adamw', or"),
        ({}, {"type": "deepspeed"}, r"optimizer\.paged: .* parallel\.type 'deepspeed' .* parallel\.offload_optimizer"),
        ({}, {"type": "fsdp", "cpu_offload": True}, r"optimizer\.paged: .* parallel\.cpu_offload .* one of the two"),
    ],
    ids=["muon", "deepspeed", "cpu_offload"],
)
def test_what_cannot_be_is_refused(optimizer, parallel, message):
    with pytest.raises(SpecError, match=message):
        RunSpec.model_validate(
            {"optimizer": {"paged": True, **optimizer}, "parallel": parallel, "topology": {"nproc_per_node": 2}}
        )


def run_of(output, name, framework="torch", **optimizer):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "data": {"sequence_length": 64, "max_samples": 60},
            "training": {"steps": 4, "micro_batch_size": 4, "deterministic": torch.cuda.is_available()},
            "optimizer": optimizer,
            "checkpoint": {"every": 2, "keep_last": 4},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": framework},
        }
    )


def losses(spec):
    return [(point.step, point.loss, point.grad_norm) for point in read_points(RunFolder.of(spec).metrics)]


@pytest.fixture(scope="module")
def ordinary(output):
    spec = run_of(output, "ordinary")
    assert train_spec(spec).status == "complete"
    return spec, losses(spec)


@pytest.mark.parametrize("framework", ["hf", "lightning", "torch"])
def test_a_run_has_the_same_losses_and_goes_on_with_and_without(framework, output, ordinary, caplog):
    _, expected = ordinary
    spec = run_of(output, f"paged-{framework}", framework, paged=True)
    assert train_spec(spec).status == "complete"
    if framework == "torch" or not torch.cuda.is_available():
        assert losses(spec) == expected
    # On a GPU frameworks differ by rounding.
    expected = losses(spec)
    warnings = [record.getMessage() for record in caplog.records if "optimizer.paged" in record.getMessage()]
    without_gpu = ["optimizer.paged has no effect without a GPU: moments are in ordinary memory"]
    assert warnings == ([] if torch.cuda.is_available() else without_gpu)
    for is_paged in (True, False):
        assert train_spec(run_of(output, spec.name, framework, paged=is_paged), 2).status == "complete"
        assert losses(spec) == expected


def test_a_run_that_began_without_goes_on_with_it(output, ordinary):
    spec, expected = ordinary
    assert train_spec(run_of(output, spec.name, paged=True), 2).status == "complete"
    assert losses(spec) == expected


def kind_of(tensor):
    """What CUDA says of a tensor's memory."""
    from cuda.bindings import runtime

    return kind_at(tensor.data_ptr(), runtime)


def kind_at(pointer, runtime):
    error, attributes = runtime.cudaPointerGetAttributes(pointer)
    assert error == runtime.cudaError_t.cudaSuccess
    return attributes.type.name.removeprefix("cudaMemoryType")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_memory_is_managed_and_the_allocator_does_not_count_it(dtype):
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    tensor = managed_memory.zeros((1024, 1031), dtype, DEVICE)
    assert torch.cuda.memory_allocated(DEVICE) == before
    assert (tensor.shape, tensor.dtype, tensor.device) == ((1024, 1031), dtype, DEVICE)
    assert tensor.is_contiguous() and kind_of(tensor) == "Managed"
    assert not tensor.count_nonzero()
    # Kernels, copies to pinned memory and back.
    tensor.copy_(torch.arange(1031, device=DEVICE))
    assert torch.equal(tensor.cpu()[7], torch.arange(1031).to(dtype))
    pinned = torch.empty(tensor.shape, dtype=dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    torch.cuda.synchronize(DEVICE)
    assert torch.equal(pinned, tensor.cpu())
    tensor.copy_(pinned.flip(1))
    assert torch.equal(tensor.cpu(), pinned.flip(1))


@pytest.mark.gpu
def test_on_a_gpu_small_and_empty_tensors_are_ordinary():
    assert kind_of(managed_memory.zeros((1024,), torch.float32, DEVICE)) == "Device"
    assert managed_memory.zeros((0, 1 << 20), torch.float32, DEVICE).shape == (0, 1 << 20)


@pytest.mark.gpu
def test_on_a_gpu_memory_is_freed_with_the_last_view():
    from cuda.bindings import runtime

    tensor = managed_memory.zeros((1 << 20,), torch.float32, DEVICE)
    pointer, view = tensor.data_ptr(), tensor[1:].view(torch.uint8)
    del tensor
    gc.collect()
    assert kind_at(pointer, runtime) == "Managed" and not view.count_nonzero()
    del view
    gc.collect()
    assert kind_at(pointer, runtime) != "Managed"


@pytest.mark.gpu
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_steps_have_the_same_bits(type, dtype):
    states, allocated = [], []
    for is_paged in (False, True):
        model = model_of(DEVICE, dtype)
        optimizer = optimizer_of(model, type=type, paged=is_paged)
        gc.collect()
        before = torch.cuda.memory_allocated(DEVICE)
        take_steps(model, optimizer, 0, 3)
        allocated.append(torch.cuda.memory_allocated(DEVICE) - before)
        states.append(state_of(model, optimizer))
        slots_of = {name: tensor for name, tensor in states[-1].items() if name.startswith("exp_avg")}
        assert max(tensor.nbytes for tensor in slots_of.values()) >= managed_memory.SMALLEST
        for name, tensor in slots_of.items():
            expected = "Managed" if is_paged and tensor.nbytes >= managed_memory.SMALLEST else "Device"
            assert kind_of(tensor) == expected, name
    require_same(*states)
    assert allocated[1] < allocated[0] / 4


@pytest.mark.gpu
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("after", [True, False], ids=["paged", "ordinary"])
@pytest.mark.parametrize("before", [True, False], ids=["paged", "ordinary"])
def test_on_a_gpu_state_comes_back_into_the_memory_that_is_asked_for(type, before, after, tmp_path, monkeypatch):
    monkeypatch.setattr(managed_memory, "SMALLEST", 1)
    model = build_model(Model(), 0).to(DEVICE)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, spec_of(type=type, paged=before))
    take_steps(model, optimizer, 0, 2)
    index = saved(tmp_path, model, optimizer)
    halfway = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    take_steps(model, optimizer, 2, 2)
    expected = {name: tensor.clone() for name, tensor in state_of(model, optimizer).items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert not torch.equal(halfway[name], start[name])
            parameter.copy_(halfway[name])
    loaded = build_optimizer(model, spec_of(type=type, paged=after))
    load_optimizer(index, model, loaded)
    # As accelerate does.
    loaded.load_state_dict(loaded.state_dict())
    take_steps(model, loaded, 2, 2)
    require_same(state_of(model, loaded), expected)
    kinds = {
        kind_of(tensor)
        for parameter in model.parameters()
        for name, tensor in loaded.state[parameter].items()
        if name != "step"
    }
    assert kinds == ({"Managed"} if after else {"Device"})


@pytest.mark.gpu
@pytest.mark.parametrize("type", TYPES)
def test_on_a_gpu_steps_in_the_backward_pass_make_managed_memory(type):
    """Their hooks run in a thread of PyTorch's."""
    model = model_of(DEVICE)
    optimizer = optimizer_of(model, type=type, in_backward=True, paged=True)
    model(torch.arange(6, device=DEVICE)).square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters() if parameter.ndim > 1)
    assert kind_of(optimizer.state[model[1].weight]["exp_avg"]) == "Managed"
