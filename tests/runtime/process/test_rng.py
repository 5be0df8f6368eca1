"""Random numbers go on where they were."""

import random

import numpy as np
import torch

from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.rng import random_states, restore_random_states, seed_generators
from tasks.runtime.training.resume_point import same_rank_layout


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


def test_states_are_of_use_to_ranks_that_compute_what_they_did():
    four = Processes(0, 0, 4), Processes(0, 0, 4, tp_size=2)
    facts = [{"world_size": own.world_size, "copies": own.tp_size} for own in four]
    assert [[same_rank_layout(there, own) for own in four] for there in facts] == [[True, False], [False, True]]
    assert not same_rank_layout(facts[0], Processes(0, 0, 2))
    # Of a checkpoint that does not tell.
    assert all(same_rank_layout({"world_size": 4}, own) for own in four)
