"""An operator's kernels are in its own module or package, and at most two files lie between its function and a launch.

Each operator runs forward and backward on meta tensors while launches are recorded. At every launch the test notes the
kernel, and the files of `ops` on Python's stack, without those of the general machinery.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch

import strata_kernels
from strata_kernels import Shard, StepPlan, adamw_step, ops, weight_step
from strata_kernels.ops import _launch
from strata_kernels.warmup import plan_model
from tests.kernels.helpers.operators import OPERATORS, Operator

OPS = Path(ops.__file__).parent
MACHINERY = {"_operator.py", "_launch.py", "_launch_cache.py"}
# Where two files are not enough: between an activation and its kernels, `activation_linear.py` decides whether a
# projection follows; fused losses walk over parts of the logits in the engine that they share, and launch the kernels
# of cross_entropy.
ACTIVATIONS = ("swiglu", "swiglu_packed", "geglu", "geglu_packed", "relu_squared", "gelu", "silu")
ENGINE = f"{ops.__name__}.head"
FUSED = {
    "linear_cross_entropy": 5,
    "linear_cross_entropy_with_predictions": 5,
    "linear_logprobs": 5,
    "linear_logprobs_with_entropy": 5,
    "linear_preference": 6,
    "linear_kto": 6,
    "linear_grpo": 6,
    "linear_topk_kl_div": 4,
    "linear_cosine_distance": 4,
    "linear_distillation": 4,
    "linear_jsd": 4,
    "linear_kl_div": 4,
}
# Whose kernels and whose operators they use.
KERNELS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FUSED, ("cross_entropy",)),
    **dict.fromkeys(("linear_jsd", "linear_kl_div", "linear_cosine_distance"), ("jsd",)),
    "linear_distillation": ("cross_entropy", "jsd"),
}
OPERATORS_OF = dict.fromkeys(("linear_preference", "linear_kto", "linear_grpo"), "linear_logprobs")
FILES = {**dict.fromkeys(ACTIVATIONS, 3), **FUSED}


def differentiate(operator: Operator) -> None:
    inputs = [x.to("meta") for x in operator.inputs().values()]
    operator.differentiate(operator.ours, inputs, [torch.empty(shape, device="meta") for shape in operator.results])


def step(function: Callable[..., None], moments: int) -> None:
    """One step of an optimizer in bf16 with the rest of an fp32 weight."""
    weight, gradient, *states = (torch.empty(8, dtype=torch.bfloat16, device="meta") for _ in range(2 + moments))
    remainder = torch.empty(8, dtype=torch.int16, device="meta")
    lists = [[tensor] for tensor in (weight, gradient, *states, remainder)]
    settings: dict[str, object] = {"lr": 1e-5, "weight_decay": 0.0}
    if moments:
        lists.append([torch.empty((), device="meta")])
        settings |= {"betas": (0.9, 0.999), "eps": 1e-8}
    function(*lists, [Shard(key=0)], **settings, rounding="master", seed=0, plan=StepPlan())


CALLS = {name: partial(differentiate, operator) for name, operator in OPERATORS.items()}
CALLS |= {"adamw_step": partial(step, adamw_step, 2), "weight_step": partial(step, weight_step, 0)}
CALLS |= {"adamw_8bit_step": partial(plan_model._step_of_eight_bits, "master")}


class Launches(list[_launch.Call]):
    """Recorded launches, and the files on the stack of each, relative to `ops`, from the launch up."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[list[str]] = []

    def append(self, call: _launch.Call) -> None:
        super().append(call)
        self.files.append(list(dict.fromkeys(files_on_stack(sys._getframe(1)))))


def files_on_stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(OPS) and file.name not in MACHINERY:
            yield str(file.relative_to(OPS))
        frame = frame.f_back


@contextmanager
def recording() -> Iterator[Launches]:
    launches = Launches()
    token = _launch._calls.set(launches)
    try:
        yield launches
    finally:
        _launch._calls.reset(token)


def home(function: str) -> str:
    """The module of a public function; its package, if that is one of operators that share kernels."""
    module: str = getattr(strata_kernels, function).__module__
    package = sys.modules[module].__package__
    return module if package == ops.__name__ else package


def is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_launches_its_own_kernels_from_two_files(name) -> None:
    function = name.split()[0]
    with recording() as launches:
        CALLS[name]()
    own = [home(name) for name in KERNELS_OF.get(function, (function,))]
    # Losses share how a gradient is multiplied.
    shared = f"{ops.__name__}.cross_entropy.reduction"
    kernels = {call.kernel.fn.__module__ for call in launches} - {shared}
    assert launches and all(any(is_within(module, place) for place in own) for module in kernels)
    most = FILES.get(function, 2)
    assert max(map(len, launches.files)) <= most, launches.files
    modules = {f"{ops.__name__}.{file}".replace("/", ".") for files in launches.files for file in files}
    homes = [*own, shared, home(function), home(OPERATORS_OF.get(function, function)), *[ENGINE] * (function in FUSED)]
    assert all(any(is_within(module, place) for place in homes) for module in modules)


def test_every_public_operator_is_called() -> None:
    public = {name: getattr(strata_kernels, name) for name in strata_kernels.__all__}
    functions = {
        name
        for name, value in public.items()
        if inspect.isfunction(value) and is_within(value.__module__, ops.__name__)
    }
    # They only join and split bits, in plain PyTorch.
    assert functions - {"join_weight", "split_weight"} == {name.split()[0] for name in CALLS}
