"""The test kit finds the mistakes that plug-ins have."""

import sys

import pytest

from tasks.runtime.test_kit import check_callback, check_format, check_objective

MISTAKES = """
import random

import torch
from torch.nn.functional import cross_entropy

from tasks.runtime.extensions import BatchObjective, Callback, ChatFormat, LossSums
from tasks.runtime.extensions import TextFormat, TextSegment, TokenObjective


def entropy(logits, labels):
    return cross_entropy(logits, labels, reduction="none")


class MeanOfBatch(TokenObjective):
    def token_losses(self, logits, labels):
        return entropy(logits, labels) / labels.float().mean()


class NotFinite(TokenObjective):
    def token_losses(self, logits, labels):
        return (entropy(logits, labels) - 100).log()


class Detached(TokenObjective):
    def token_losses(self, logits, labels):
        return entropy(logits.detach(), labels)


class HalfDetached(TokenObjective):
    def token_losses(self, logits, labels):
        return entropy(logits, labels) * entropy(logits, labels).detach()


class Summed(TokenObjective):
    def token_losses(self, logits, labels):
        return entropy(logits, labels).sum()


class Averaged(BatchObjective):
    def loss_sums(self, model, batch):
        kept = batch.labels != -100
        return LossSums(cross_entropy(model(**batch.inputs).logits[kept], batch.labels[kept]))


class ChangesInputs(BatchObjective):
    def loss_sums(self, model, batch):
        batch.inputs["input_ids"].zero_()
        return LossSums(entropy(model(**batch.inputs).logits.flatten(0, 1), batch.labels.flatten()).sum())


class RandomMetric(TokenObjective):
    def token_losses(self, logits, labels):
        return entropy(logits, labels)

    def token_metrics(self, logits, labels):
        return {"noise": torch.rand(labels.shape)}


class Nothing(TextFormat):
    def segments(self, row):
        return [TextSegment(row["text"], False)]


class Random(TextFormat):
    def segments(self, row):
        return [TextSegment(f"{row['text']} {random.random()}", True)]


class Changing(TextFormat):
    def segments(self, row):
        row["list"].append(1)
        return [TextSegment(row["text"], True)]


class NeedsMore(TextFormat):
    columns = ("txt",)

    def segments(self, row):
        return [TextSegment(row["txt"], True)]


class NoRole(ChatFormat):
    def messages(self, row):
        return [{"content": row["text"]}]


class Raises(ChatFormat):
    def messages(self, row):
        return row["nothing"]


class Half(TextFormat):
    def segments(self, row):
        return [TextSegment(row["text"], True)] if row["text"] != "b" else []


class Misspelled(Callback):
    def on_step_ended(self, step):
        pass


class Fails(Callback):
    def on_checkpoint_saved(self, step, folder):
        raise KeyError("nothing")


class Counts(Callback):
    def on_step_end(self, step):
        pass

    def on_train_end(self, record):
        pass
"""


@pytest.fixture(scope="module", autouse=True)
def mistakes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "plugin_mistakes.py").write_text(MISTAKES)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    del sys.modules["plugin_mistakes"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MeanOfBatch", "micro-batches of one row give the loss"),
        ("NotFinite", "the loss is nan"),
        ("Detached", "has no gradient|does not require grad|not have been used in the graph"),
        ("HalfDetached", "is not that of finite differences"),
        ("Summed", r"return a value for each of the 48 tokens, but one has the shape \(\)"),
        ("Averaged", "micro-batches of one row give the loss"),
        ("ChangesInputs", "it changed 'input_ids' of the batch"),
        ("RandomMetric", "give the metric 'noise'"),
    ],
)
def test_mistakes_of_objectives(name, message):
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=message):
        check_objective(f"plugin_mistakes:{name}")


def test_a_gradient_that_leaves_terms_out_on_purpose_can_be_allowed():
    check_objective("plugin_mistakes:HalfDetached", numerical_gradient=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "no row gives a text that carries loss"),
        ("Random", "the second time"),
        ("Changing", "it changed row 0"),
        ("NeedsMore", "needs the column 'txt', but the data has 'text', 'list'; did you mean 'text'?"),
        ("NoRole", "row 0: message 1 has no role"),
        ("Raises", "messages raised KeyError: 'nothing' for row 0, in line"),
    ],
)
def test_mistakes_of_formats(name, message):
    with pytest.raises((AssertionError, ValueError)) as caught:
        check_format(f"plugin_mistakes:{name}", [{"text": "a", "list": []}, {"text": "b", "list": []}])
    assert message in str(caught.value)


def test_rows_that_are_skipped_are_no_mistake():
    assert check_format("plugin_mistakes:Half", [{"text": "a"}, {"text": "b"}]) == [("a", "a")]


def test_mistakes_of_callbacks():
    with pytest.raises(AssertionError, match="on_step_ended is no hook and is never called; hooks are on_train_start"):
        check_callback("plugin_mistakes:Misspelled")
    with pytest.raises(ValueError, match="'plugin_mistakes:Fails': on_checkpoint_saved raised KeyError: 'nothing', in"):
        check_callback("plugin_mistakes:Fails")
    assert check_callback("plugin_mistakes:Counts") == ["on_step_end"] * 4 + ["on_train_end"]
