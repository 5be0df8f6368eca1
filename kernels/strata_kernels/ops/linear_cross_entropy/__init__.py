"""Cross entropy of a linear layer."""

from .operator import linear_cross_entropy as linear_cross_entropy
from .operator import linear_cross_entropy_with_predictions as linear_cross_entropy_with_predictions
