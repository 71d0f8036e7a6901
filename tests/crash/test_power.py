"""The power fails at every command of every operation; what survives is opened with the product's own code."""

from __future__ import annotations

import pytest

from tests.crash.explore import cut_by_power
from tests.crash.scenarios import SCENARIOS, Scenario

NAMES = [scenario.name for scenario in SCENARIOS]
IMAGES_MAX = 4
IMAGES_MAX_SLOW = 60


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_whatever_survives_a_loss_of_power_is_right(scenario: Scenario) -> None:
    found = cut_by_power(scenario, IMAGES_MAX)
    assert found.cuts >= 8
    assert found.images >= found.cuts // 2


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_many_more_of_the_images_that_survive_are_right(scenario: Scenario) -> None:
    cut_by_power(scenario, IMAGES_MAX_SLOW)
