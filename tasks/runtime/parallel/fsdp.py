"""FSDP2: parameters, gradients and optimizer state are sharded over the ranks and gathered layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.parallel import Fsdp as Settings
from tasks.runtime.checkpoint.state import MODEL, model_tensors
from tasks.runtime.models.activations.activation_checkpointing import transformer_layers
from tasks.runtime.models.adapters.quantization import PackedLayers, quantize_weight, set_packed_shapes
from tasks.runtime.models.build import materialize, move_to_meta
from tasks.runtime.models.config import compute_dtype, model_dtype
from tasks.runtime.parallel.base import BaseStrategy
from tasks.runtime.parallel.context import apply_context_parallel
from tasks.runtime.parallel.expert import apply_expert_parallel, shard_dimension
from tasks.runtime.parallel.float8_gather import gather_in_float8
from tasks.runtime.parallel.tensor import apply_tensor_parallel
from tasks.runtime.parallel.whole_model import WholeCopy, WholeModel
from tasks.runtime.process.ranks import Processes

_REDUCE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Fsdp(BaseStrategy):
    """Shards the model over all ranks, or each of `parallel.replicas` replicas over its part of the ranks."""

    def __init__(self, spec: RunSpec, processes: Processes) -> None:
        assert isinstance(spec.parallel, Settings)
        self._settings, self._processes = spec.parallel, processes
        replicas, ways = self._settings.replicas, self._settings.tensor_parallel
        sizes = {"replicate": replicas, "shard": processes.dp_cp_size // replicas, "tensor": ways}
        # With one replica the mesh has no replicate dimension, and PyTorch skips the all-reduce between replicas.
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        mesh = init_device_mesh(processes.device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
        self._tensor_mesh = mesh["tensor"] if ways > 1 else None
        self._mesh = mesh[tuple(name for name in names if name != "tensor")] if ways > 1 else mesh
        self._context_mesh = None
        if processes.cp_size > 1:
            shape, device = (processes.dp_size, processes.cp_size, ways), processes.device.type
            self._context_mesh = init_device_mesh(device, shape, mesh_dim_names=("reader", "context", "same"))[
                "context"
            ]
        self._experts_mesh = self._build_experts_mesh()
        self._fused_loss, self._quantized = spec.fused_loss, spec.is_quantized
        # Compiled layers round gradients to the dtype that was gathered; shards on the host are replaced when pinned.
        self._gathers_in_float8 = not spec.training.compile and not self._settings.cpu_offload
        # Without a conversion to make, versions before 2.15 would still convert packed 4-bit weights.
        dtype = compute_dtype(spec.model, spec.parallel)
        converts = not self._quantized or dtype != model_dtype(spec.model)
        self._dtypes = MixedPrecisionPolicy(
            param_dtype=dtype if converts else None, reduce_dtype=_REDUCE[self._settings.reduce_dtype]
        )

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """Shard the model's parameters in place."""
        layers = transformer_layers(model, "parallel.type", "'ddp'")
        require_one_dtype(model)
        # Taken before sharding: rank 0 broadcasts its weights to the shards below.
        whole = move_to_meta(model)
        packed = set_packed_shapes(model) if self._quantized else {}
        if self._context_mesh is not None:
            method = self._settings.context_parallel_method
            apply_context_parallel(model, self._context_mesh, self._processes, method)
        if self._tensor_mesh is not None:
            apply_tensor_parallel(model, self._tensor_mesh, whole_logits=not self._fused_loss)
        split = []
        if self._experts_mesh is not None:
            split = apply_expert_parallel(model, self._experts_mesh["expert"])
            for experts in split:
                self._shard_experts(experts, self._experts_mesh)
        for layer in layers:
            self._shard(layer, reshard_after_forward=self._settings.reshard_after_forward)
        # Embeddings, last norm and head belong to no layer. They share the root group, because the fused loss reads the
        # head's weight without calling the head. They stay gathered until the backward pass, which follows at once.
        self._shard(model, reshard_after_forward=False)
        device = self._processes.device
        materialize(model, torch.device("cpu") if self._settings.cpu_offload else device, buffers_on=device)
        if not weights_loaded_later:
            self._broadcast_weights(model, whole, packed)
            for experts in split:
                experts.keep_scales()
        if self._gathers_in_float8:
            gather_in_float8(model, self._mesh["shard"], self._dtypes.param_dtype or model.dtype)
        return model

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Reduce-scatter gradients after every backward pass: unsharded gradients would not fit in memory until the
        last.
        """
        return nullcontext()

    def whole_model(self, model: PreTrainedModel) -> WholeModel:
        """A copy in the dtype of forward passes."""
        dtype = self._dtypes.param_dtype
        return WholeCopy(model, self._processes.device, dtype, self._gather, reshard=partial(_reshard, model))

    @contextmanager
    def evaluation(self, wrapped: nn.Module) -> Iterator[nn.Module]:
        """Free the weights afterwards that stay gathered until a backward pass, which does not follow."""
        try:
            yield wrapped
        finally:
            _reshard(wrapped)

    def _gather(self, parameter: nn.Parameter) -> Tensor:
        """All of a sharded parameter, on the device, in the dtype of forward passes. A collective."""
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().to(self._processes.device, self._dtypes.param_dtype)
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return whole.full_tensor()

    def _build_experts_mesh(self) -> DeviceMesh | None:
        """The ranks as experts are spread over them: those of a replica, adjacent ones with different experts."""
        ways, replicas = self._settings.expert_parallel, self._settings.replicas
        if ways == 1:
            return None
        sizes = {"replicate": replicas, "expert_shard": self._processes.dp_cp_size // replicas // ways, "expert": ways}
        names = tuple(name for name, size in sizes.items() if size > 1 or name != "replicate")
        device = self._processes.device.type
        mesh = init_device_mesh(device, tuple(sizes[name] for name in names), mesh_dim_names=names)
        # PyTorch then reduces a norm over both in one collective.
        mesh["expert_shard", "expert"]._flatten("experts")
        return mesh

    def _shard(self, module: nn.Module, *, reshard_after_forward: bool) -> None:
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=self._dtypes,
            offload_policy=self._offload,
        )

    def _shard_experts(self, experts: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a module of experts over the ranks that have the same ones."""
        ways, shards = mesh["expert"].size(), mesh["expert_shard"].size()
        fully_shard(
            experts,
            mesh=mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "expert")],
            reshard_after_forward=self._settings.reshard_after_forward,
            shard_placement_fn=lambda weight: Shard(shard_dimension(weight, ways, shards)),
            # The layer has cast its inputs; weights of the router stay as exact as it makes them.
            mp_policy=replace(self._dtypes, cast_forward_inputs=False),
            offload_policy=self._offload,
        )

    @property
    def _offload(self) -> OffloadPolicy:
        if not self._settings.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self._mesh.device_type == "cuda")

    def _broadcast_weights(self, model: PreTrainedModel, whole: dict[str, Tensor], packed: PackedLayers) -> None:
        """Broadcast the weights of rank 0, one tensor at a time; each rank keeps its shard. A collective."""
        for name, tensor in model_tensors(model).items():
            layer, like = packed.get(name.removeprefix(MODEL), (None, tensor))
            sent = whole[name] if self._processes.is_main else torch.empty(like.shape, dtype=like.dtype)
            sent = sent.to(self._processes.device)
            dist.broadcast(sent, src=0)
            if layer is not None:
                sent = quantize_weight(layer, sent)
            if isinstance(tensor, DTensor):
                for chunk in tensor.__create_chunk_list__():
                    begins = zip(chunk.offsets, chunk.sizes, strict=True)
                    tensor.to_local().copy_(sent[tuple(slice(begin, begin + size) for begin, size in begins)])
            else:
                tensor.copy_(sent)


def _reshard(model: nn.Module) -> None:
    """Free the weights that are gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def require_one_dtype(model: PreTrainedModel) -> None:
    """Raises ValueError if trainable weights differ in dtype, because a layer's gradients are reduced together."""
    learned = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    others = [name for name, dtype in learned.items() if dtype != model.dtype]
    if others:
        raise ValueError(
            f"parallel.type 'fsdp' needs all trainable weights in one dtype, but {others[0]!r} is not "
            f"{str(model.dtype)[6:]} like the rest; set model.dtype to 'float32', and parallel.compute_dtype to "
            "'bfloat16' to compute in bfloat16"
        )
