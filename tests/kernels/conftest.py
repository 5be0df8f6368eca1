"""What the kernel layer's tests share: the path under test, the error bar, and memory that is never clean.

Three paths run the same tests. `reference` is plain PyTorch on the CPU. `gpu` is the kernels on a GPU, where there is
one. `interpreter` is the kernels through Triton's interpreter; Triton decides at import, so TRITON_INTERPRET=1 must be
set before, and `test_interpreter.py` starts these files again in processes of their own where there is no GPU.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from strata_kernels.compat import liger
from strata_kernels.ops import _launch_cache
from tests.kernels.helpers.error_bound import hold_to_bar

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.kernels.helpers.fast_interpreter import speed_up

    speed_up()
PATHS = ["interpreter"] if INTERPRETED else ["reference"] + ["gpu"] * torch.cuda.is_available()

Bar = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


@pytest.fixture
def liger_kernel() -> Iterator[None]:
    """`import liger_kernel` finds Strata during one test."""
    liger.install()
    try:
        yield
    finally:
        liger.uninstall()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def device(path: str) -> torch.device:
    return torch.device("cuda" if path == "gpu" else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def empty_launch_cache() -> None:
    """On a GPU, a test that changes tile sizes must not replay the launches of an earlier test."""
    _launch_cache._cache.clear()


@pytest.fixture(autouse=True)
def no_memory_kept() -> Iterator[None]:
    """Several processes test on one GPU: between tests none keeps what another may need."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def within_bar(path: str) -> Bar:
    """`within_bar(ours, torchs, exact)`: never more than twice as far from fp64 as PyTorch at the same dtype."""

    def check(
        ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, roundings: int = 1, terms: int = 1
    ) -> None:
        truncated = path == "interpreter" and ours.dtype == torch.bfloat16
        hold_to_bar(ours, torchs, exact, truncated=truncated, roundings=roundings, terms=terms)

    return check


@pytest.fixture
def compare(within_bar: Bar) -> Callable[..., list[torch.Tensor]]:
    """`compare(ours, torchs, inputs, exact=torchs)` holds results and all gradients to the bar and returns ours.

    `exact` is called with the inputs in fp64. The incoming gradients are random. The inputs must come out untouched.
    """

    def run(
        ours: Function, torchs: Function, inputs: list[torch.Tensor], exact: Function | None = None
    ) -> list[torch.Tensor]:
        before = [x.clone() for x in inputs]
        mine, theirs = gradients(ours, inputs), gradients(torchs, inputs)
        truth = gradients(exact or torchs, [x.double() for x in inputs])
        for results in zip(mine, theirs, truth, strict=True):
            within_bar(*results)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
        return mine

    return run


def gradients(function: Function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of `function` and the gradients of its inputs, for the same random incoming gradients every time."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    # Values that bf16 and fp16 hold exactly, so that runs in two dtypes get the same.
    incoming = [torch.randn(y.shape, generator=generator).bfloat16().to(y.device, y.dtype) for y in results]
    return [*(y.detach() for y in results), *torch.autograd.grad(results, leaves, incoming)]


@pytest.fixture(name="gradients")
def gradients_fixture() -> Callable[..., list[torch.Tensor]]:
    return gradients


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that an operator allocates holds NaN, or the largest integer, until it is written."""

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture
def far(device: torch.device) -> Callable[..., torch.Tensor]:
    """`far(3, ...)`: bf16 noise whose third row starts beyond 2^31 elements, where offsets in 32 bits fail.

    On a CPU the memory between the rows is never touched: it costs addresses alone.
    """

    def make(*shape: int) -> torch.Tensor:
        noise = torch.randn(shape).bfloat16()
        memory = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device=device)
        return memory.as_strided(shape, (2**30 + 16, *noise.stride()[1:])).copy_(noise)

    return make


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server of its own, and a bucket in it."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="kernels")
        yield "s3://kernels/strata"
    server.stop()
