"""Run by test_vocabulary_parallel.py: two processes on the CPU that hold half of the vocabulary each.

python vocabulary_parallel_processes.py RENDEZVOUS_FILE
"""

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from strata_kernels import (
    linear_cross_entropy,
    linear_cross_entropy_with_predictions,
    linear_distillation,
    linear_grpo,
    linear_jsd,
    linear_kl_div,
    linear_kto,
    linear_logprobs_with_entropy,
    linear_preference,
)
from strata_kernels.ops.head import memory

ROWS, HIDDEN, CLASSES = 40, 16, 200
HEAD = "weight", "bias"


def problem(dtype: torch.dtype = torch.float32, classes: int = CLASSES) -> tuple[dict[str, Tensor], Tensor]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (ROWS, HIDDEN), "weight": (classes, HIDDEN), "bias": (classes,)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    target = torch.randint(classes, (ROWS,), generator=generator)
    target[1::4] = -100
    return tensors, target


def gradients(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    loss = function(**leaves)
    found = torch.autograd.grad((loss * torch.arange(1.0, loss.numel() + 1).view(loss.shape)).sum(), leaves.values())
    return {"loss": loss.detach(), **dict(zip(leaves, found, strict=True))}


def close(x: Tensor, y: Tensor, what: str) -> None:
    """Up to the order in which fp32 sums add up."""
    assert_close(x, y, rtol=1e-5, atol=1e-5 * float(y.abs().max()), msg=lambda difference: f"{what}: {difference}")


def mine(rank: int, x: Tensor) -> Tensor:
    return x.chunk(2)[rank]


def test_group_gives_what_one_process_gives(rank: int) -> None:
    class_weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1))
    row_weight = torch.rand(ROWS, generator=torch.Generator().manual_seed(2))
    for options in (
        {}, {"chunk_bytes": 4096}, {"reduction": "none", "label_smoothing": 0.1, "class_weight": class_weight},
        {"reduction": "sum", "z_loss": 0.01, "softcap": 3.0, "row_weight": row_weight, "chunk_bytes": 3000},
        {"num_items": torch.tensor(7), "max_targets": 30}, {"class_weight": class_weight, "max_targets": 35},
    ):  # fmt: skip
        tensors, target = problem()
        expected = gradients(lambda **t: linear_cross_entropy(target=target, **t, **options), tensors)  # noqa: B023
        parts = {name: mine(rank, x) if name in HEAD else x for name, x in tensors.items()}

        def run(**t: Tensor) -> Tensor:
            return linear_cross_entropy(target=target, group=dist.group.WORLD, **t, **options)  # noqa: B023

        found, again = gradients(run, parts), gradients(run, parts)
        for name, x in found.items():
            assert torch.equal(x, again[name]), name
            close(x, mine(rank, expected[name]) if name in HEAD else expected[name], f"{name} {list(options)}")
        everyone = [torch.empty_like(found["x"]) for _ in "ab"]
        dist.all_gather(everyone, found["x"])
        assert torch.equal(*everyone)


def test_log_probabilities_and_entropies(rank: int) -> None:
    for options in ({}, {"chunk_bytes": 4096, "temperature": 0.7, "softcap": 3.0}, {"max_targets": 32}):
        tensors, target = problem()

        def both(options: dict = options, **t: Tensor) -> Tensor:
            return torch.cat(linear_logprobs_with_entropy(target=target, **t, **options))  # noqa: B023

        expected = gradients(both, tensors)
        parts = {name: mine(rank, x) if name in HEAD else x for name, x in tensors.items()}
        found = gradients(lambda **t: both(group=dist.group.WORLD, **t), parts)
        for name, x in found.items():
            close(x, mine(rank, expected[name]) if name in HEAD else expected[name], f"{name} {list(options)}")
    mesh = init_device_mesh("cpu", (2,))
    tensors, target = problem(classes=13)
    expected = gradients(
        lambda **t: torch.stack(linear_logprobs_with_entropy(target=target, **t)),
        {name: x.double() for name, x in tensors.items()},
    )
    for place in (Shard(0), Replicate()):
        places = {"x": place, "weight": Shard(0), "bias": Shard(0)}
        cut = {name: distribute_tensor(x, mesh, [places[name]]) for name, x in tensors.items()}
        targets = distribute_tensor(target, mesh, [place])

        def stacked(targets: Tensor = targets, **t: Tensor) -> Tensor:
            return torch.stack(linear_logprobs_with_entropy(target=targets, **t)).full_tensor()

        for name, x in gradients(stacked, cut).items():
            whole = x.full_tensor() if isinstance(x, DTensor) else x
            close(whole, expected[name].float(), f"{name} of DTensors, x {place}")


def test_losses_of_answers_are_those_of_the_whole_head_in_fp64(rank: int) -> None:
    """Among them an answer of one token."""
    tensors, target = problem()
    target, reference, kl = target.view(4, 10), torch.linspace(-60.0, -50.0, 4), torch.tensor(0.3)
    target[2, 1:] = -100
    good, advantages = torch.tensor([True, False, True, True]), torch.tensor([1.0, 0.5, -0.5, -0.25])
    losses: tuple[tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]], ...] = (
        *((linear_preference, (reference,), {"loss": name}) for name in ("sigmoid", "ipo")),
        *((linear_preference, (), {"loss": name, "beta": 0.5}) for name in ("cpo", "simpo", "orpo")),
        (linear_kto, (reference, good, kl), {}),
        *((linear_grpo, (advantages,), {"loss": name}) for name in ("grpo", "gspo")),
    )
    parts = {name: mine(rank, x) if name in HEAD else x for name, x in tensors.items()}
    for function, beside, options in losses:

        def run(x: Tensor, weight: Tensor, bias: Tensor, group: Any = None) -> Tensor:
            rows = x.view(4, 10, HIDDEN)
            return function(rows, weight, target, *beside, bias=bias, group=group, **options).loss  # noqa: B023

        # Operators of fp64 are plain PyTorch.
        expected = gradients(run, {name: x.double() for name, x in tensors.items()})
        found = gradients(partial(run, group=dist.group.WORLD), parts)
        for name, x in found.items():
            whole = expected[name].float()
            close(x, mine(rank, whole) if name in HEAD else whole, f"{name} of {function.__name__} {options}")


def distances(x: Tensor, head: tuple[Tensor, ...], teacher: tuple[Tensor, ...], **options: float) -> tuple[Tensor, ...]:
    """Cross entropy and, at `beta`, divergence of PyTorch's logits, each summed over the rows that count."""
    target, beta, temperature = options["target"], options["beta"], options["temperature"]
    z, t = (torch.nn.functional.linear(*tensors) for tensors in ((x, *head), teacher))
    z, t = (cap * torch.tanh(y / cap) if cap else y for y, cap in ((z, options["softcap"]), (t, 5.0)))
    entropy = torch.nn.functional.cross_entropy(z, target, reduction="sum")
    both = min(z.shape[1], t.shape[1])
    p, q = ((y[:, :both] / temperature).softmax(-1) for y in (z, t))
    m = (1 - beta) * p + beta * q
    kl = {0.0: q * (q / p).log(), 1.0: p * (p / q).log()}
    terms = kl.get(beta, beta * q * (q / m).log() + (1 - beta) * p * (p / m).log())
    return entropy, terms.sum(-1)[target != -100].sum()


def test_divergences_are_those_of_whole_heads_in_fp64(rank: int) -> None:
    """By a group of halves, and by DTensors; also where the heads are padded to different sizes."""
    mesh = init_device_mesh("cpu", (2,))
    for beta, temperature, softcap, classes, theirs, more in (
        (0.0, 1.0, 3.0, CLASSES, CLASSES, {"chunk_bytes": 8192}), (1.0, 2.0, None, CLASSES, CLASSES, {}),
        (0.3, 0.7, 3.0, CLASSES, CLASSES, {"max_targets": 32, "chunk_bytes": 8192}),
        (0.5, 1.0, None, 13, 13, {}), (0.5, 2.0, None, 13, 17, {}), (0.0, 1.0, None, 14, 9, {"chunk_bytes": 1000}),
    ):  # fmt: skip
        tensors, target = problem(classes=classes)
        target[:7] = -100
        generator = torch.Generator().manual_seed(3)
        shapes = (ROWS, 24), (theirs, 24), (theirs,)
        teacher = tuple(torch.randn(shape, generator=generator) for shape in shapes)
        given = {"target": target, "beta": beta, "temperature": temperature, "softcap": softcap}
        whole = {name: x.double() for name, x in tensors.items()}
        n = (target != -100).sum()

        def exact(weights: tuple[float, float], given: dict = given, n: Tensor = n, teacher: tuple = teacher) -> object:
            def run(x: Tensor, **head: Tensor) -> Tensor:
                parts = distances(x, tuple(head.values()), tuple(y.double() for y in teacher), **given)  # noqa: B023
                return (weights[0] * parts[0] + weights[1] * parts[1]) / n

            return run

        options = {"temperature": temperature, "softcap": softcap, "teacher_softcap": 5.0, **more}
        halves = {name: mine(rank, x) if name in HEAD else x for name, x in tensors.items()}
        parts = {name: Shard(0) if name in HEAD else Replicate() for name in tensors}
        cut = {name: distribute_tensor(x, mesh, [parts[name]]) for name, x in tensors.items()}
        across = [
            distribute_tensor(t, mesh, [p]) for t, p in zip(teacher, (Replicate(), Shard(0), Shard(0)), strict=True)
        ]
        ways = [(cut, (across[0], *across[1:]), {}), (cut, (across[0], *teacher[1:]), {})]
        if classes == theirs == CLASSES:
            ways.append((halves, (teacher[0], *map(lambda t: mine(rank, t), teacher[1:])), {"group": dist.group.WORLD}))
        for leaves, judge, where in ways:
            inputs = {"teacher_x": judge[0], "teacher_weight": judge[1], "teacher_bias": judge[2], "target": target}
            inputs |= options | where

            def distilled(inputs: dict = inputs, beta: float = beta, **t: Tensor) -> Tensor:
                return linear_distillation(**t, **inputs, beta=beta, label_weight=0.3, divergence_weight=2.0).loss

            def alone(inputs: dict = inputs, beta: float = beta, **t: Tensor) -> Tensor:
                if beta in (0.0, 1.0):
                    return linear_kl_div(**t, **inputs, direction="reverse" if beta else "forward")
                return linear_jsd(**t, **inputs, beta=beta)

            for function, weights in ((distilled, (0.3, 2.0)), (alone, (0.0, 1.0)))[: 1 + (classes == theirs)]:
                expected, found = gradients(exact(weights), whole), gradients(function, leaves)
                for name, result in found.items():
                    value = expected[name].float()
                    value = mine(rank, value) if where and name in HEAD else value
                    result = result.full_tensor() if isinstance(result, DTensor) else result
                    close(result, value, f"{name} of {function.__name__} at {beta} {classes} {theirs} {list(where)}")
    for tensors, message in (
        ({"teacher_weight": torch.randn(7, 24)}, "the last of 2 shards of 14 classes begins at class 7"),
        ({"teacher_x": distribute_tensor(teacher[0], mesh, [Replicate()]), "x": whole["x"]}, "make them DTensors"),
    ):
        try:
            linear_distillation(
                **{
                    **cut,
                    **dict(zip(("teacher_x", "teacher_weight"), teacher, strict=False)),
                    "target": target,
                    **tensors,
                }
            )
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")


def test_divergences_may_ignore_class_0_and_refuse_other_numbers_of_classes(rank: int) -> None:
    tensors, target = problem()
    target[:7] = 0
    teacher_x, teacher_weight = torch.randn(ROWS, 24), torch.randn(CLASSES, 24)
    for x in (teacher_x, teacher_weight):
        dist.broadcast(x, 0)
    given = {"teacher_x": teacher_x, "target": target, "ignore_index": 0}
    expected = linear_jsd(tensors["x"], tensors["weight"], teacher_weight=teacher_weight, **given)
    halves = {"weight": mine(rank, tensors["weight"]), "teacher_weight": mine(rank, teacher_weight)}
    close(linear_jsd(tensors["x"], **halves, **given, group=dist.group.WORLD), expected, "loss")
    mesh = init_device_mesh("cpu", (2,))
    cut = [distribute_tensor(tensors[name], mesh, [p]) for name, p in (("x", Replicate()), ("weight", Shard(0)))]
    for classes in (CLASSES - 1, CLASSES + 1):
        try:
            linear_jsd(*cut, distribute_tensor(teacher_x, mesh, [Replicate()]), torch.zeros(classes, 24), target=target)
        except ValueError as error:
            assert f"teacher_weight [{classes}, 24] must have the classes of weight" in str(error), error
        else:
            raise AssertionError("no error")


def test_gradients_of_transposed_rows_are_summed(rank: int) -> None:
    tensors, target = problem()
    x = tensors["x"].t().contiguous().t().requires_grad_()
    # Rows a part at a time: parts of a transposed gradient would not be dense.
    loss = linear_cross_entropy(x, mine(rank, tensors["weight"]), target, group=dist.group.WORLD, chunk_bytes=4096)
    (expected,) = torch.autograd.grad(linear_cross_entropy(x, tensors["weight"], target), x)
    close(torch.autograd.grad(loss, x)[0], expected, "x")


def test_predictions_prefer_the_first_class(rank: int) -> None:
    weight = torch.zeros(6, 3)
    weight[[1, 4], [0, 0]], weight[5, 1] = 1.0, 1.0
    target = torch.tensor([1, 5, -100])
    found = linear_cross_entropy_with_predictions(
        torch.eye(3), mine(rank, weight), target, group=dist.group.WORLD, chunk_bytes=16
    )
    assert found.predictions.tolist() == [1, 5, -1] and found.accuracy == 1.0


def test_never_less_exact_than_twice_pytorch(rank: int) -> None:
    tensors, target = problem(torch.bfloat16)
    del tensors["bias"]

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        z = x @ weight.t()
        return torch.nn.functional.cross_entropy(z.to(torch.promote_types(z.dtype, torch.float32)), target)

    exact = gradients(plain, {name: x.double() for name, x in tensors.items()})
    theirs = gradients(plain, tensors)
    tensors["weight"] = mine(rank, tensors["weight"])
    found = gradients(
        lambda x, weight: linear_cross_entropy(x, weight, target, group=dist.group.WORLD, chunk_bytes=4096), tensors
    )
    for name in ("x", "weight"):
        cut = (lambda x: mine(rank, x)) if name == "weight" else (lambda x: x)
        error = (found[name].double() - cut(exact[name])).abs().max()
        assert error <= 2 * (cut(theirs[name]).double() - cut(exact[name])).abs().max(), name


def test_dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    # An odd number of classes: the parts differ in size.
    tensors, target = problem(classes=13)
    for x_place, head_place, reduction in (
        (Replicate(), Shard(0), "mean"), (Shard(0), Shard(0), "mean"), (Shard(0), Shard(0), "none"),
        (Shard(0), Replicate(), "mean"), (Shard(0), Replicate(), "sum"), (Shard(0), Replicate(), "none"),
        (Replicate(), Replicate(), "mean"),
    ):  # fmt: skip
        options = {"reduction": reduction, "label_smoothing": 0.1}
        expected = gradients(lambda **t: linear_cross_entropy(target=target, **t, **options), tensors)  # noqa: B023
        places = {"x": x_place, "weight": head_place, "bias": head_place}
        cut = {name: distribute_tensor(x, mesh, [places[name]]) for name, x in tensors.items()}
        targets = distribute_tensor(target, mesh, [x_place])

        def run(**t: Tensor) -> Tensor:
            return linear_cross_entropy(target=targets, **t, **options).full_tensor()  # noqa: B023

        for name, x in gradients(run, cut).items():
            close(x.full_tensor() if isinstance(x, DTensor) else x, expected[name], f"{name} {reduction} {places}")


def test_dtensors_that_do_not_fit(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    (tensors, target), place = problem(), lambda x, p: distribute_tensor(x, mesh, [p])
    x, weight = tensors["x"], tensors["weight"]
    for arguments, options, message in (
        ((x, place(weight, Shard(0)), target), {}, "leave the output head in the root's group of fully_shard"),
        ((place(x, Replicate()), weight, target), {}, "make them DTensors of one mesh"),
        ((place(x, Replicate()), place(weight, Shard(1)), target), {}, r"redistribute it to Replicate\(\)"),
        ((place(x, Shard(0)), place(weight, Replicate()), target), {}, "row_weight and teacher_x must be DTensors"),
        ((place(x, Replicate()), place(weight, Shard(0)), target), {"bias": tensors["bias"]}, "bias must be a DTensor"),
        ((place(x, Replicate()), place(weight, Shard(0)), target), {"group": dist.group.WORLD}, "for plain tensors"),
        ((place(x, Replicate()), place(weight[:1], Shard(0)), target), {}, "the last would have none"),
    ):
        try:
            linear_cross_entropy(*arguments, **options)
        except ValueError as error:
            assert __import__("re").search(message, str(error)), error
        else:
            raise AssertionError(f"no error: {message}")
    partial = DTensor.from_local(x / 2, mesh, [Partial()])
    loss = linear_cross_entropy(partial, place(weight, Shard(0)), target)
    assert_close(loss.full_tensor(), linear_cross_entropy(x, weight, target))


def run(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    memory._PANEL_COLUMNS = 64
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test(rank)
    dist.destroy_process_group()


def main() -> int:
    # Forked, so that torch is imported once.
    processes = []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                run(rank, sys.argv[1])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        processes.append(process)
    return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
