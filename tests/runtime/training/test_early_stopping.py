"""Training stops where Hugging Face's callback would stop it, also when it was interrupted in between."""

import json
import math
import random

import pytest
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

from strata_platform.spec.run_spec import Evaluation
from tasks.runtime.training.early_stopping import EarlyStopping, stopped_early


class _Metric:
    """The part of Hugging Face's Trainer that decides which metric is the best."""

    def __init__(self, args):
        self.args, self.state = args, TrainerState()


def steps_of_huggingface(losses, patience, threshold, folder):
    """After which evaluation it stops, and the lowest loss that it has seen."""
    args = TrainingArguments(str(folder), metric_for_best_model="loss", greater_is_better=False, report_to="none")
    callback, control, trainer = EarlyStoppingCallback(patience, threshold), TrainerControl(), _Metric(args)
    for number, loss in enumerate(losses, start=1):
        callback.on_evaluate(args, trainer.state, control, {"eval_loss": loss})
        Trainer._determine_best_metric(trainer, {"eval_loss": loss}, trial=None)
        if control.should_training_stop:
            return number, trainer.state.best_metric
    return None, trainer.state.best_metric


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_the_decision_is_that_of_huggingface(patience, threshold, tmp_path):
    settings = Evaluation(every=1, early_stopping_patience=patience, early_stopping_threshold=threshold)
    draw, stopped = random.Random(f"{patience} {threshold}"), []
    for run in range(40):
        # Half of the runs learn steadily.
        losses = [8.0 - (0.1, 0.6)[run % 2] * number + draw.gauss(0, 0.2) for number in range(12)]
        early, number = EarlyStopping(settings, {}), 0
        while number < len(losses) and not early.is_over:
            # As after a restart: through the manifest of a checkpoint.
            early = EarlyStopping(settings, json.loads(json.dumps(early.metadata())))
            early.add(number + 1, losses[number])
            number += 1
        found = (number if early.is_over else None, early.best_loss)
        assert found == steps_of_huggingface(losses, patience, threshold, tmp_path)
        assert losses[early.best_step - 1] == early.best_loss
        assert stopped_early(early.metadata(), settings) == early.is_over
        stopped.append(early.is_over)
    assert any(stopped) and not all(stopped)


def test_a_loss_that_is_not_a_number_is_no_progress():
    early = EarlyStopping(Evaluation(every=1, early_stopping_patience=2), {})
    assert [early.add(step, loss) for step, loss in ((1, math.nan), (2, 3.0), (3, math.nan))] == [False, True, False]
    assert (early.best_step, early.best_loss, early.waited, early.is_over) == (2, 3.0, 1, False)
    early.add(4, math.inf)
    assert early.is_over


def test_more_patience_continues_a_run_that_has_stopped():
    early = EarlyStopping(Evaluation(every=1, early_stopping_patience=1), {})
    early.add(1, 2.0)
    early.add(2, 2.5)
    assert early.is_over
    assert not stopped_early(early.metadata(), Evaluation(every=1, early_stopping_patience=2))
    assert not stopped_early(early.metadata(), Evaluation(every=1))
