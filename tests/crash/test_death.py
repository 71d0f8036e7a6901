"""The process dies with each of its writes on the way, and the card executes that one never, at once, late or in part."""

from __future__ import annotations

import pytest

from tests.crash.explore import LANDINGS, cut_by_death
from tests.crash.scenarios import SCENARIOS, Scenario

NAMES = [scenario.name for scenario in SCENARIOS]
PART = 7
"""Of the writes, one in so many; another one for each operation."""


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=NAMES)
def test_the_next_run_is_right_whenever_the_last_write_of_the_dead_one_lands(number: int) -> None:
    found = cut_by_death(SCENARIOS[number], every=PART, offset=number % 5)
    assert found.images == found.cuts * len(LANDINGS)
    assert found.cuts


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_the_next_run_is_right_whichever_write_lands_late(scenario: Scenario) -> None:
    cut_by_death(scenario)
