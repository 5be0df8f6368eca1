"""Plan the kernels of a transformers model from its configuration, without weights and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..ops.adamw import adamw_step, weight_step
from ..ops.adamw.eight_bits import adamw_8bit_step
from ..ops.adamw.shard import Shard
from ..ops.adamw.step_plan import Rounding
from ..patch import patch_model
from ..row_buckets import row_buckets
from .plan import Plan, record

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PRESETS = Path(__file__).parent / "models"


def presets() -> tuple[str, ...]:
    """The names of the model configurations in this package."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def load_config(source: str) -> PretrainedConfig:
    """Load a model's configuration from a preset, a folder with a config.json, or a file. Downloads nothing.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the model does not exist.
    """
    path = _PRESETS / f"{source}.json" if source in presets() else Path(source)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ValueError(
            f"model {source!r} is neither a preset ({', '.join(presets())}) nor the path of a config.json or its folder"
        )
    config: PretrainedConfig = _transformers().AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    return config


def plan_model(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.bfloat16, batch: int, length: int, adapter: bool = False
) -> Plan:
    """Every kernel that a training step of the patched model launches: forward, loss, backward, optimizer step.

    The plan is valid for all parallel strategies, with or without activation checkpointing, because these launch no
    other kernels.

    Args:
        config: from `load_config`, or of any causal model of transformers.
        dtype: the dtype of weights and hidden states in the layers (with FSDP, of the gathered weights): bf16 | fp16 |
            fp32.
        batch: sequences per micro-batch.
        length: tokens per sequence.
        adapter: LoRA adapters on the linear layers are trained; norms, embeddings and head are frozen.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no such model.
    """
    with torch.device("meta"):
        # Attention launches no kernels of this package; transformers' default, sdpa or eager, runs on meta tensors.
        model = _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    patch_model(model)
    model.train()
    if adapter:
        _train_linear_layers(model)
    plan = record_training(model, torch.zeros(batch, length, dtype=torch.int64, device="meta"))
    return plan + plan_optimizer() if dtype == torch.bfloat16 else plan


def plan_optimizer(
    rounding: Rounding = "master", *, weights_alone: bool = False, columns: bool = False, eight_bits: bool = False
) -> Plan:
    """Every kernel that `adamw_step` launches on aligned bf16 tensors of any number and shapes.

    Args:
        rounding: as in `adamw_step`.
        weights_alone: also the kernels of `weight_step`, which applies updates of another optimizer.
        columns: also for shards with incomplete rows, as in tensor parallelism.
        eight_bits: also the kernel of `adamw_8bit_step`.
    """
    tensor, step = torch.zeros(16, dtype=torch.bfloat16, device="meta"), torch.zeros((), device="meta")
    remainders = [torch.zeros(16, dtype=torch.int16, device="meta")] if rounding == "master" else None
    settings: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.1, "rounding": rounding, "seed": 0}
    moments: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "found_inf": step}
    one, shards = [tensor], [Shard(0)]
    plan = record(lambda: adamw_step(one, one, one, one, remainders, [step], shards, **settings, **moments))
    if columns:
        sharded_rows = [Shard(0, row=8, whole_row=16)]
        plan += record(lambda: adamw_step(one, one, one, one, remainders, [step], sharded_rows, **settings, **moments))
    if weights_alone:
        plan += record(lambda: weight_step(one, one, remainders, shards, **settings, steps=[step]))
    if eight_bits:
        plan += record(lambda: _step_of_eight_bits(rounding))
    return plan


def _step_of_eight_bits(rounding: Rounding) -> None:
    """A step of `adamw_8bit_step` on meta tensors with a multiple of 16 blocks, the common case."""
    weight, codes = (torch.zeros(4096, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.uint8))
    scales = torch.zeros(16, device="meta")
    remainder = torch.zeros(4096, dtype=torch.int16, device="meta") if rounding == "master" else None
    adamw_8bit_step(
        weight, weight, codes, scales, codes, scales, remainder, 1, Shard(0),
        lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, rounding=rounding, seed=0,
    )  # fmt: skip


def record_training(model: PreTrainedModel, tokens: torch.Tensor) -> Plan:
    """Plan the model's forward pass, its loss and its backward pass.

    Args:
        model: on the meta device, patched, in training mode.
        tokens: [rows, length], int64, on the meta device.
    """
    rows, length = tokens.shape
    # An explicit mask, because transformers computes that of packed sequences from values, which meta tensors lack.
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="meta")
    targets = torch.zeros((), dtype=torch.int64, device="meta")

    def step(max_targets: int | None) -> None:
        output: Any = model(
            input_ids=tokens, labels=tokens, position_ids=tokens, attention_mask=mask, num_items_in_batch=targets,
            max_targets=max_targets,
        )  # fmt: skip
        output.loss.backward()

    return record_row_buckets(model, rows * length, step)


def record_row_buckets(model: PreTrainedModel, positions: int, step: Callable[[int | None], object]) -> Plan:
    """Plan `step` with every `max_targets` that `row_bucket` may return.

    Args:
        model: on the meta device. The layers in `model.base_model` run in the first step only; later steps reuse their
            output.
        positions: number of positions in a batch.
        step: called with `max_targets`; runs forward and backward pass.
    """
    plan = record(lambda: step(None))
    with _layers_run_once(model):
        for bucket in row_buckets(positions):
            plan += record(lambda bucket=bucket: step(bucket))  # type: ignore[misc]
    return plan


@contextmanager
def _layers_run_once(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the layers of `model` run once; later passes return the detached first output."""
    layers = model.base_model
    original = layers.forward
    outputs: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(original(*args, **kwargs))
        output = copy(outputs[0])
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden.detach().requires_grad_(hidden.requires_grad)
        return output

    layers.forward = forward
    try:
        yield
    finally:
        del layers.forward


def _train_linear_layers(model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.weight.requires_grad_()
            # A hook, because a layer with an adapter is called, not fused with the activation before it.
            module.register_forward_hook(lambda *_: None)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "planning a model needs transformers, which strata-kernels does not install: "
            "pip install 'transformers>=5.17,<5.25', or use a saved plan"
        ) from error
    return transformers
