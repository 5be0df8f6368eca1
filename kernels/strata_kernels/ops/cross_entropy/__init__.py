"""Cross entropy of logits."""

from .operator import LossAndPredictions as LossAndPredictions
from .operator import cross_entropy as cross_entropy
from .operator import cross_entropy_with_predictions as cross_entropy_with_predictions
