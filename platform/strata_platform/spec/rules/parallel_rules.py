"""Rules for how a run is split over processes and GPUs; part of `contradictions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Parallel, RunSpec, Topology

# How the resources of MIG slices begin.
_MIG = "nvidia.com/mig-"


def parallel_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule about processes, GPUs and `parallel`, broken or not."""
    yield from _processes(spec)
    yield from _fsdp(spec.parallel, spec.topology)
    yield from _tensor_parallel(spec)
    yield from _context_parallel(spec)


def _processes(spec: RunSpec) -> Iterator[Contradiction]:
    training, topology = spec.training, spec.topology
    yield Contradiction(
        spec.parallel.type == "single" and topology.world_size > 1,
        ("parallel.type", "topology.nproc_per_node", "topology.nnodes"),
        f"'single' contradicts a topology of {topology.world_size} processes; set parallel.type to 'ddp', "
        "'fsdp' or 'deepspeed', or topology.nnodes and topology.nproc_per_node to 1",
    )
    yield Contradiction(
        spec.parallel.type in ("fsdp", "deepspeed") and topology.world_size == 1,
        ("parallel.type", "topology.nproc_per_node", "topology.nnodes"),
        f"'{spec.parallel.type}' shards the model over processes, but topology.nproc_per_node x topology.nnodes is "
        "1; raise one of them, or set parallel.type to 'single'",
    )
    yield Contradiction(
        spec.parallel.type == "deepspeed" and spec.parallel.offload_param != "none" and spec.parallel.stage < 3,
        ("parallel.offload_param", "parallel.stage"),
        "set, but only parallel.stage 3 shards the weights; set parallel.stage to 3, or leave "
        "parallel.offload_param out",
    )
    yield Contradiction(
        spec.parallel.type == "deepspeed" and spec.parallel.stage == 3 and training.compile,
        ("training.compile", "parallel.stage"),
        "compiles each layer as a graph, but parallel.stage 3 gathers and frees weights inside layers; set "
        "training.compile to false, parallel.stage to 2, or parallel.type to 'fsdp'",
    )
    gpus = spec.resources.gpu
    yield Contradiction(
        gpus not in (0, topology.nproc_per_node),
        ("resources.gpu", "topology.nproc_per_node"),
        f"{gpus} is {'less' if gpus < topology.nproc_per_node else 'more'} than topology.nproc_per_node "
        f"{topology.nproc_per_node}; each process takes one GPU: set both to the same number",
    )
    yield Contradiction(
        spec.resources.gpu_type is not None and spec.resources.gpu == 0,
        ("resources.gpu_type", "resources.gpu"),
        "set, but resources.gpu is 0; set resources.gpu, or leave resources.gpu_type out",
    )
    resource = spec.resources.gpu_resource
    yield Contradiction(
        resource is not None and gpus == 0,
        ("resources.gpu_resource", "resources.gpu"),
        "set, but resources.gpu is 0; set resources.gpu, or leave resources.gpu_resource out",
    )
    yield Contradiction(
        resource is not None and resource.startswith(_MIG) and topology.world_size > 1,
        ("resources.gpu_resource", "topology.nproc_per_node", "topology.nnodes"),
        f"{resource} is a slice of a GPU, and CUDA shows a process only one, but topology has {topology.world_size} "
        "processes; set topology.nproc_per_node and topology.nnodes to 1, or take whole GPUs",
    )


def _fsdp(parallel: Parallel, topology: Topology) -> Iterator[Contradiction]:
    if parallel.type != "fsdp":
        return
    replicas, processes = parallel.replicas, topology.world_size
    tensor, context = parallel.tensor_parallel, parallel.context_parallel
    shared = tensor * context
    shape = ("topology.nproc_per_node", "topology.nnodes")
    sharing = ("parallel.tensor_parallel", "parallel.context_parallel")
    yield Contradiction(
        processes % shared != 0,
        (*sharing, *shape),
        f"{tensor} x parallel.context_parallel {context} does not divide the {processes} "
        "processes of topology.nproc_per_node x topology.nnodes; set them to divisors, or start more processes",
    )
    yield Contradiction(
        processes % shared == 0 and processes // shared % replicas != 0,
        ("parallel.replicas", *sharing, *shape),
        f"{replicas} does not divide the {processes} processes of topology.nproc_per_node x topology.nnodes; set "
        "parallel.replicas to a divisor, such as topology.nnodes"
        if shared == 1
        else f"{replicas} does not divide the {processes // shared} groups of {shared} processes that "
        "parallel.tensor_parallel and parallel.context_parallel make; set parallel.replicas to a divisor",
    )
    yield Contradiction(
        replicas == processes > 1,
        ("parallel.replicas", *shape),
        f"{replicas} replicas give each process of topology.nproc_per_node x topology.nnodes a whole model; "
        "lower parallel.replicas, or set parallel.type to 'ddp'",
    )


def _tensor_parallel(spec: RunSpec) -> Iterator[Contradiction]:
    if spec.parallel.tensor_parallel == 1:
        return
    field, ways = "parallel.tensor_parallel", spec.parallel.tensor_parallel
    yield Contradiction(
        spec.adapter.type != "none",
        (field, "adapter.type"),
        f"{ways} shards the model's own matrices, but not those of adapter.type '{spec.adapter.type}'; set "
        "parallel.tensor_parallel to 1, where fsdp shards frozen weights as well, or adapter.type to 'none'",
    )
    yield Contradiction(
        spec.optimizer.type == "muon",
        (field, "optimizer.type"),
        f"{ways} shards matrices in both dimensions, but optimizer.type 'muon' needs whole ones; set "
        "parallel.tensor_parallel to 1, or optimizer.type to 'adamw'",
    )
    yield Contradiction(
        spec.objective.type == "custom",
        (field, "objective.type"),
        f"{ways} shards the output head, but objective.type 'custom' may compute logits, which need the whole one; set "
        "parallel.tensor_parallel to 1, or choose another objective.type",
    )
    if spec.objective.type == "distill":
        yield Contradiction(
            spec.objective.teacher is None,
            (field, "objective.teacher"),
            f"{ways} shards the output head, but without objective.teacher the likeliest tokens of the data need the "
            "whole one; set parallel.tensor_parallel to 1, or objective.teacher",
        )


def _context_parallel(spec: RunSpec) -> Iterator[Contradiction]:
    method = getattr(spec.parallel, "context_parallel_method", "auto")
    yield Contradiction(
        spec.parallel.context_parallel == 1 and method != "auto",
        ("parallel.context_parallel_method", "parallel.context_parallel"),
        f"'{method}' says how rows are shared, but parallel.context_parallel is 1; set parallel.context_parallel, or "
        "leave parallel.context_parallel_method out",
    )
    if spec.parallel.context_parallel == 1:
        return
    field, parts = "parallel.context_parallel", spec.parallel.context_parallel
    yield Contradiction(
        spec.objective.type not in ("pretrain", "sft"),
        (field, "objective.type"),
        f"{parts} splits documents over processes, but objective.type '{spec.objective.type}' compares whole ones; set "
        "parallel.context_parallel to 1, or objective.type to 'pretrain' or 'sft'",
    )
    yield Contradiction(
        spec.model.attention not in ("auto", "sdpa"),
        (field, "model.attention"),
        f"{parts} uses its own attention, which is built on PyTorch's sdpa; set model.attention to 'auto', or "
        "parallel.context_parallel to 1",
    )
