"""The card alone loses its power at every command of every operation, and comes back; the gateway goes on, and keeps what it says."""

from __future__ import annotations

import pytest

from tests.crash.explore import cut_by_outage
from tests.crash.scenarios import SCENARIOS, Scenario

NAMES = [scenario.name for scenario in SCENARIOS]
IMAGES_SLOW = 5


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_whatever_is_acknowledged_after_an_outage_of_the_card_is_there(scenario: Scenario) -> None:
    found = cut_by_outage(scenario)
    assert found.cuts >= 4
    assert found.images


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_whatever_the_card_has_kept_in_an_outage(scenario: Scenario) -> None:
    cut_by_outage(scenario, IMAGES_SLOW)
