"""The simulation can fail: with one rule of the product switched off it does, within a bounded number of seeds."""

from __future__ import annotations

import itertools

import pytest

from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.world import Violation, play

STEPS = 300
SEEDS_MAX = 100


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_simulation_finds(mutation: Mutation) -> None:
    for seed in itertools.islice(itertools.chain((mutation.seed,), range(SEEDS_MAX)), SEEDS_MAX):
        with mutation.applied() as parts:
            try:
                play(seed, STEPS, parts)
            except Violation:
                return
    pytest.fail(f"{SEEDS_MAX} seeds did not find: {mutation.name}")
