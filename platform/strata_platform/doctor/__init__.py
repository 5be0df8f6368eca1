"""`strata doctor`: finds what is wrong with a laptop, an image, a node or a cluster, and gives advice."""

from strata_platform.doctor.finding import Finding, Status, examine
from strata_platform.doctor.targets import TARGETS, checks_of

__all__ = ["TARGETS", "Finding", "Status", "checks_of", "examine"]
