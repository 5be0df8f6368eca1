"""Generation inside a run: answers of the model that is being trained, from its own weights.

`Generator` is the interface of engines; `EmbeddedGenerator` is the one that needs nothing more than the model.
"""

from __future__ import annotations

from tasks.runtime.generation.embedded import EmbeddedGenerator
from tasks.runtime.generation.generator import Generator, Request, Sample, Sampling

__all__ = ["EmbeddedGenerator", "Generator", "Request", "Sample", "Sampling"]
