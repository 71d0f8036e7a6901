"""Whole seeds: a fixed set in every run, and a few that nobody has played before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.world import play

STEPS = 300
FIXED_SEEDS = range(40)
GROUP = 8
FRESH_SEEDS = 4


@pytest.mark.parametrize("first", range(FIXED_SEEDS.start, FIXED_SEEDS.stop, GROUP))
def test_known_seeds_hold_every_invariant(first: int) -> None:
    reports = [play(seed, STEPS) for seed in range(first, first + GROUP)]
    assert sum(report.payloads_checked for report in reports) > GROUP
    assert sum(report.commands for report in reports) > 10 * GROUP


def test_fresh_seeds_hold_every_invariant() -> None:
    for _ in range(FRESH_SEEDS):
        seed = int.from_bytes(os.urandom(4), "big")
        sys.stdout.write(f"fresh seed {seed}\n")  # shown when it fails; the failure itself names it as well
        play(seed, STEPS)


def test_one_seed_is_one_run_also_in_another_process() -> None:
    command = [sys.executable, "-m", "tests.sim", "--seed", "40", "--steps", "200", "--count", "2"]
    told = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, check=True, text=True
        ).stdout
        for salt in ("1", "2")
    }
    assert len(told) == 1
    assert all(repr(play(seed, 200)) in told.copy().pop() for seed in (40, 41))
