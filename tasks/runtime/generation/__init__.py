"""Generation inside a run: answers of the model that is being trained, from its own weights.

`Generator` is the interface of engines, and `start_engine` the one place that decides between them.
"""

from __future__ import annotations

from tasks.runtime.generation.embedded import EmbeddedGenerator
from tasks.runtime.generation.engines import require_engine, require_shared_cache, start_engine
from tasks.runtime.generation.generator import Generator, Request, Sample, Sampling

__all__ = [
    "EmbeddedGenerator",
    "Generator",
    "Request",
    "Sample",
    "Sampling",
    "require_engine",
    "require_shared_cache",
    "start_engine",
]
