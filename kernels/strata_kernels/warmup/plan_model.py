"""The plan of a model of transformers: from its configuration alone, without weights and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..ops.adamw import adamw_step, weight_step
from ..ops.adamw.shard import Shard
from ..ops.adamw.step_plan import Rounding
from ..patch import patch_model
from ..row_buckets import rounded_counts
from .plan import Plan, record

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PRESETS = Path(__file__).parent / "models"


def presets() -> tuple[str, ...]:
    """Names of the configurations that come with this package."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def load_config(source: str) -> PretrainedConfig:
    """A model's configuration: a preset, a folder with a config.json, or such a file. Nothing is downloaded.

    Raises:
        ImportError: transformers is not installed.
        ValueError: there is no such model.
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

    The strategy is in `dtype`, that in which layers compute (under FSDP not that of the weights); how weights are split
    and what is recomputed launch nothing else.

    Args:
        config: from `load_config`, or of any causal model of transformers that `patch_model` knows.
        dtype: that of weights and hidden states while layers compute: bf16 | fp16 | fp32.
        batch: rows of a micro-batch.
        length: tokens of a row.
        adapter: whether the linear layers alone learn, as under LoRA, and not norms, embeddings and head.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `patch_model` does not know the model.
    """
    with torch.device("meta"):
        # Attention is not this package's, and this one runs on meta tensors.
        model = _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    patch_model(model)
    model.train()
    if adapter:
        _train_linear_layers(model)
    plan = record_training(model, torch.zeros(batch, length, dtype=torch.int64, device="meta"))
    return plan + plan_optimizer() if dtype == torch.bfloat16 else plan


def plan_optimizer(rounding: Rounding = "master", *, weights_alone: bool = False, columns: bool = False) -> Plan:
    """Every kernel that `adamw_step` launches on aligned bf16 tensors, whatever their number and shapes.

    weights_alone: those of `weight_step` as well, which adds updates that another optimizer has computed.
    columns: also for shards of rows that are cut, as tensor parallelism has them.
    """
    tensor, step = torch.zeros(16, dtype=torch.bfloat16, device="meta"), torch.zeros((), device="meta")
    remainders = [torch.zeros(16, dtype=torch.int16, device="meta")] if rounding == "master" else None
    settings: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.1, "rounding": rounding, "seed": 0}
    moments: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "found_inf": step}
    one, shards = [tensor], [Shard(0)]
    plan = record(lambda: adamw_step(one, one, one, one, remainders, [step], shards, **settings, **moments))
    if columns:
        cut = [Shard(0, row=8, whole_row=16)]
        plan += record(lambda: adamw_step(one, one, one, one, remainders, [step], cut, **settings, **moments))
    if weights_alone:
        plan += record(lambda: weight_step(one, one, remainders, shards, **settings, steps=[step]))
    return plan


def record_training(model: PreTrainedModel, tokens: torch.Tensor) -> Plan:
    """What the model's forward pass, its loss and its backward pass launch.

    model: on the meta device, patched, in training mode.
    tokens: [rows, length], int64, on the meta device.
    """
    rows, length = tokens.shape
    # Given whole, because transformers makes the mask of packed rows by looking at their values, and here are none.
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="meta")
    targets = torch.zeros((), dtype=torch.int64, device="meta")

    def step(max_targets: int | None) -> None:
        output: Any = model(
            input_ids=tokens, labels=tokens, position_ids=tokens, attention_mask=mask, num_items_in_batch=targets,
            max_targets=max_targets,
        )  # fmt: skip
        output.loss.backward()

    return record_counts(model, rows * length, step)


def record_counts(model: PreTrainedModel, positions: int, step: Callable[[int | None], object]) -> Plan:
    """What `step` launches with every `max_targets` that `rounded_targets` may give it.

    model: on the meta device; the layers in `model.base_model` run in the first step alone, and the others are given
        what came out.
    positions: of the batch of a step.
    step: forward and backward pass with so many targets at most.
    """
    plan = record(lambda: step(None))
    with _remembered(model):
        for count in rounded_counts(positions):
            plan += record(lambda count=count: step(count))  # type: ignore[misc]
    return plan


@contextmanager
def _remembered(model: PreTrainedModel) -> Iterator[None]:
    """The layers of `model` give the outcome of their first pass again, as if it were new."""
    layers = model.base_model
    original = layers.forward
    found: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(original(*args, **kwargs))
        output = copy(found[0])
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
            # An adapter in its place is called as well, not fused with what is before it.
            module.register_forward_hook(lambda *_: None)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "the plan of a model is taken from transformers, which strata-kernels itself does not need: "
            "pip install 'transformers>=5.17,<5.24', or give a saved plan"
        ) from error
    return transformers
