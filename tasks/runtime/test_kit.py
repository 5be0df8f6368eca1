"""Checks of your own objectives, formats and callbacks, for your tests. docs/extending.md has examples.

Each check takes the name that a spec would give, imports it as a run does, and raises AssertionError with a sentence.
They need no GPU and no network, and take a second each.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from strata_kernels import patch_model
from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Callback as CallbackSettings
from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.objectives import Custom as CustomSettings
from tasks.runtime.data import prepare, recipe_of
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch
from tasks.runtime.data.formats.own_format import is_own_chat, own_columns, own_messages, own_segments
from tasks.runtime.data.reading.rows import Row, RowError
from tasks.runtime.extensions import Callback, RunInfo, TokenObjective
from tasks.runtime.extensions.callback_runner import CallbackRunner
from tasks.runtime.extensions.import_object import load_class
from tasks.runtime.objectives import Custom, head_sums
from tasks.runtime.objectives.custom import load_objective

_VOCABULARY, _ROWS, _LENGTH = 29, 4, 12
# What two orders of the same sums may differ by where an objective computes in fp32.
_RELATIVE = 1e-5


def check_objective(name: str, arguments: Mapping[str, Any] | None = None, *, numerical_gradient: bool = True) -> None:
    """Check an objective by a tiny Llama in fp64, as training runs it.

    - Loss, metrics and gradients are finite, and some weight learns.
    - Micro-batches of one row, and chunks of one token, give the loss and the gradients of the whole batch.
    - The same input gives the same loss, and neither the batch nor the model's weights change.
    - `numerical_gradient`: the gradient of `token_losses` is that of finite differences. Turn it off for a loss that
      leaves terms out of its gradient on purpose.
    """
    settings = CustomSettings(object=name, arguments=dict(arguments or {}))
    objective = load_objective(settings)
    batch = _batch()
    whole = _run(settings, [batch])
    values = {"the loss": whole.loss, **{f"metric {each!r}": value for each, value in whole.metrics.items()}}
    for what, value in values.items():
        assert value.ndim == 0, f"{name}: {what} has the shape {tuple(value.shape)}; it must be a scalar"
        assert bool(torch.isfinite(value)), f"{name}: {what} is {float(value)}"
    for parameter, gradient in whole.gradients.items():
        assert bool(torch.isfinite(gradient).all()), f"{name}: the gradient of {parameter} is not finite"
    assert any(bool(gradient.any()) for gradient in whole.gradients.values()), f"{name}: all gradients are zero"
    _require_equal(name, "a second pass over the same batch", whole, _run(settings, [batch]))
    rows = [{column: values[index : index + 1] for column, values in batch.items()} for index in range(_ROWS)]
    _require_equal(name, "micro-batches of one row", whole, _run(settings, rows))
    if isinstance(objective, TokenObjective):
        with mock.patch.object(head_sums, "CHUNK_BYTES", 1):
            _require_equal(name, "chunks of one token", whole, _run(settings, [batch], fused=True))
        if numerical_gradient:
            _check_gradient(name, objective)


class _Found:
    def __init__(self, loss: Tensor, metrics: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        self.loss, self.metrics, self.gradients = loss, metrics, gradients


def _run(settings: CustomSettings, batches: list[Batch], *, fused: bool = False) -> _Found:
    """A step of these micro-batches."""
    objective = Custom(settings, fused=fused)
    model = _model()
    if fused:
        patch_model(model, exclude=("rms_norm", "rope", "swiglu"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    given = copy.deepcopy(batches)
    items = torch.stack([objective.count(batch) for batch in batches]).sum()
    shares = [objective.micro_batch_loss(model, batch, items) for batch in batches]
    for share in shares:
        assert share.loss.requires_grad, f"{settings.object}: the loss has no gradient; it was detached from the model"
        share.loss.backward()
    for batch, kept in zip(batches, given, strict=True):
        for column, values in kept.items():
            assert torch.equal(batch[column], values), f"{settings.object}: it changed {column!r} of the batch"
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{settings.object}: it changed the weight {key!r} of the model"
    names = shares[0].metrics
    return _Found(
        torch.stack([share.loss.detach().double() for share in shares]).sum(),
        {each: torch.stack([share.metrics[each].double() for share in shares]).sum() for each in names},
        {each: p.grad for each, p in model.named_parameters() if p.grad is not None},
    )


def _require_equal(name: str, what: str, expected: _Found, found: _Found) -> None:
    advice = "a step's loss must be a sum over items, divided by their number"
    assert torch.allclose(found.loss, expected.loss, rtol=_RELATIVE), (
        f"{name}: {what} give the loss {float(found.loss)}, the whole batch {float(expected.loss)}; {advice}"
    )
    for key, value in expected.metrics.items():
        # Metrics are recorded in fp32.
        assert torch.allclose(found.metrics[key], value, rtol=_RELATIVE), (
            f"{name}: {what} give the metric {key!r} {float(found.metrics[key])}, the whole batch {float(value)}"
        )
    for key, gradient in expected.gradients.items():
        assert torch.allclose(found.gradients[key], gradient, rtol=_RELATIVE, atol=1e-7), (
            f"{name}: {what} give another gradient of {key} than the whole batch; {advice}"
        )


def _check_gradient(name: str, objective: TokenObjective) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 4, 2])
    try:
        torch.autograd.gradcheck(lambda z: objective.token_losses(z, labels).sum(), logits)
    except RuntimeError as error:
        raise AssertionError(
            f"{name}: the gradient of token_losses is not that of finite differences: {error}"
        ) from None


def _model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=_LENGTH,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).double()


def _batch() -> Batch:
    """Rows with different numbers of target tokens; the last row has one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        ids = torch.randint(_VOCABULARY, (_ROWS, _LENGTH))
    labels = ids.clone()
    for row, first in enumerate((1, 4, 8, _LENGTH - 1)):
        labels[row, :first] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(_LENGTH).repeat(_ROWS, 1)}


def check_format(
    name: str, rows: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Check a format by preparing `rows` as a run does. Returns the whole text and the learned text of each used row.

    - The class takes every row, gives the same result twice, and leaves the row unchanged.
    - Rows survive the tokenizer: the tokens decode to the texts, and those with loss to what the model has to say.
    """
    data = Data(format=name, format_arguments=dict(arguments or {}))
    own_columns(data, list(dict.fromkeys(column for row in rows for column in row)))
    expected = [found for number, row in enumerate(rows) if (found := _learned(name, dict(row), number, data))]
    assert expected, f"{name}: no row gives a text that carries loss"
    with tempfile.TemporaryDirectory(prefix="strata-check-") as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
        section = {"source": str(file), "packing": False, "validation_fraction": 0, "sequence_length": 1 << 14}
        spec = RunSpec(data=data.model_dump() | section)
        prepared = prepare(recipe_of(spec), Path(folder, "data"), report=lambda line: None)
        tokenizer = prepared.tokenizer()
        texts = []
        for index in range(len(prepared.train)):
            row = prepared.train[index]
            learned = row["labels"] != IGNORE_INDEX
            texts.append(
                tuple(
                    tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
                    for ids in (row["input_ids"], row["input_ids"][learned])
                )
            )
    assert len(texts) == len(expected), f"{name}: {len(texts)} rows were prepared of {len(expected)} that have a text"
    # Rows are prepared in another order.
    left = list(texts)
    for pieces in expected:
        match = next((text for text in left if all(piece in text[1] for piece in pieces)), None)
        assert match, f"{name}: {pieces[0]!r} carries no loss; texts that do: {sorted(text[1] for text in left)[:3]}"
        left.remove(match)
    return texts


def _learned(name: str, row: dict[str, Any], number: int, data: Data) -> tuple[str, ...]:
    """The pieces of the row that carry loss; empty if it is skipped."""
    make: Callable[[Row, Data], list[Any]] = own_messages if is_own_chat(data) else own_segments
    source = Row(f"row {number}", row)
    given = copy.deepcopy(row)
    try:
        found, again = (make(source, data) for _ in range(2))
    except RowError as error:
        raise AssertionError(f"{name}: {error}") from error
    assert found == again, f"{name}: row {number} gives {again} the second time, {found} the first"
    assert row == given, f"{name}: it changed row {number}, which is {row} now"
    if is_own_chat(data):
        return tuple(
            message["content"].strip()
            for message in found
            if message["role"] == "assistant" and message.get("weight", 1) and message.get("content", "").strip()
        )
    return tuple(segment.text for segment in found if segment.learned)


def check_callback(name: str, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Call the hooks of a callback as a run of four steps does. Returns those that it overrides, in the order of calls.

    - No hook raises an exception, and no method is called like a hook without being one.
    - Random generators are afterwards as they were before, as in a run.
    """
    runner = CallbackRunner([CallbackSettings(object=name, arguments=dict(arguments or {}))])
    cls = load_class(name, (Callback,), field="runtime.callbacks", group="strata.callbacks")
    hooks = [hook for hook in vars(Callback) if hook.startswith("on_")]
    for method in dir(cls):
        assert not method.startswith("on_") or method in hooks, (
            f"{name}: {method} is no hook and is never called; hooks are {', '.join(hooks)}"
        )
    called: list[str] = []

    def spied(hook: str) -> Callable[..., None]:
        original = getattr(cls, hook)

        def call(self: Callback, *values: Any) -> None:
            called.append(hook)
            original(self, *values)

        return call

    with tempfile.TemporaryDirectory(prefix="strata-check-") as folder, ExitStack() as patched:
        for hook in hooks:
            if getattr(cls, hook) is not getattr(Callback, hook):
                patched.enter_context(mock.patch.object(cls, hook, spied(hook)))
        _four_steps(runner, Path(folder))
    return called


def _four_steps(runner: CallbackRunner, folder: Path) -> None:
    spec = RunSpec()
    runner.train_start(lambda: RunInfo(spec.name, folder, spec.model_dump(mode="json"), 0, 4))
    for step in range(1, 5):
        of_all: dict[str, Any] = {
            "attempt": 0,
            "time": 0.0,
            "tokens_per_second": 1000.0,
            "step_seconds": 1.0,
            "memory_bytes": 1 << 30,
            "data_wait_seconds": 0.0,
            "mfu": None,
        }
        point = MetricPoint(
            step=step,
            loss=5.0 - step,
            learning_rate=1e-4,
            grad_norm=1.0,
            tokens=1000 * step,
            target_tokens=900 * step,
            metrics={},
            skipped=0,
            **of_all,
        )
        runner.metrics([point])
        runner.step_end(step, [(2, folder / "checkpoints" / "checkpoint-2")] if step == 3 else [])
        if step == 2:
            runner.evaluation(step, 3.5, {})
    runner.checkpoints_saved([(4, folder / "checkpoints" / "checkpoint-4")])
    runner.train_end({"name": spec.name, "status": "complete", "steps": 4, "train_loss": 1.0})
    runner.evaluation(0, 5.0, {})
    runner.evaluation(4, 1.0, {})
