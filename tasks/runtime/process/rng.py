"""States of all random number generators that training may draw from, as tensors."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int, rank: int, step: int) -> None:
    """Seed the generators of Python, NumPy and torch, differently for each rank and each step to start from."""
    combined = int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])
    random.seed(combined)
    np.random.seed(combined)
    torch.manual_seed(combined)


def random_states() -> dict[str, Tensor]:
    """States of this process's generators: Python, NumPy, torch, and the GPU if it has one."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, numpy_gauss = np.random.get_state()
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.append(keys, position).astype(np.int64)),
        # Python and NumPy draw normal deviates in pairs; this is the second one of a pair.
        "gauss": torch.tensor([math.nan if gauss is None else gauss, has_gauss, numpy_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Set the generators to the states that `random_states` returned."""
    gauss, has_gauss, numpy_gauss = states["gauss"].tolist()
    version, _, _ = random.getstate()
    random.setstate((version, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), numpy_gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
