"""With any one rule of the card switched off, something here fails. Else it could not fail at all."""

from __future__ import annotations

import pytest

from tests.crash.mutations import MUTATIONS, Mutation
from tests.crash.scenarios import SCENARIOS


def finds(mutation: Mutation) -> bool:
    for scenario in SCENARIOS:
        scenario.base()  # what is there before is made by the whole product
    with mutation.applied():
        try:
            mutation.look()
        except Exception:  # noqa: BLE001 - whatever it is, it is found
            return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_card_without_one_of_its_rules_is_found_out(mutation: Mutation) -> None:
    assert finds(mutation)


def test_there_are_enough_of_them() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 8
