"""Random numbers go on where they were."""

import random

import numpy as np
import torch

from tasks.runtime.random_states import random_states, restore_random_states, seed_generators


def draw():
    # An odd number of normal deviates leaves the second of a pair behind.
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(()).item()]


def test_restored_generators_repeat_what_followed():
    seed_generators(1, 0, 0)
    draw()
    states = random_states()
    expected = [draw(), draw()]
    restore_random_states(states)
    assert [draw(), draw()] == expected


def test_processes_and_steps_start_from_other_numbers():
    drawn = []
    for seed, rank, step in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        seed_generators(seed, rank, step)
        drawn.append(tuple(draw()))
    assert len(set(drawn)) == 4
