"""What is wrong with a laptop, an image, a node or a cluster, in words and with the way out."""

from strata_platform.doctor.finding import Finding, Verdict, examine
from strata_platform.doctor.targets import PLACES, checks_of

__all__ = ["PLACES", "Finding", "Verdict", "checks_of", "examine"]
