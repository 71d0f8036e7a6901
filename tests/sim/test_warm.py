"""Whole seeds on a real card session: what comes back after a crash, a death or an orderly end."""

from __future__ import annotations

import os
import sys

import pytest

from tests.sim.warm import play_warm

STEPS = 200
FIXED_SEEDS = range(18)
GROUP = 6
FRESH_SEEDS = 2


@pytest.mark.parametrize("first", range(FIXED_SEEDS.start, FIXED_SEEDS.stop, GROUP))
def test_known_seeds_come_back_warm(first: int) -> None:
    reports = [play_warm(seed, STEPS) for seed in range(first, first + GROUP)]
    assert sum(report.crashes_checked for report in reports) > 0


def test_after_an_orderly_end_nothing_of_the_run_lands_any_more() -> None:
    for seed in (61, *range(400, 410)):
        play_warm(seed, STEPS, reopens_at_once=True)


def test_fresh_seeds_come_back_warm() -> None:
    for _ in range(FRESH_SEEDS):
        seed = int.from_bytes(os.urandom(4), "big")
        sys.stdout.write(f"fresh seed {seed}\n")
        play_warm(seed, STEPS)
