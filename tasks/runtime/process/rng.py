"""Every generator of random numbers that training may draw from, as tensors."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int, rank: int, step: int) -> None:
    """Start this process's generators anew: other numbers for every process and every step to start from."""
    mixed = int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def random_states() -> dict[str, Tensor]:
    """The states of this process's generators: of Python, NumPy, torch, and its GPU if it has one."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, numpy_gauss = np.random.get_state()
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.append(keys, position).astype(np.int64)),
        # Normal deviates come in pairs; the second one waits here.
        "gauss": torch.tensor([math.nan if gauss is None else gauss, has_gauss, numpy_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Continue where `random_states` was called."""
    gauss, has_gauss, numpy_gauss = states["gauss"].tolist()
    version, _, _ = random.getstate()
    random.setstate((version, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), numpy_gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
