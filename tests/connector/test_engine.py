"""The whole connector on a mini engine that notices every wrong byte."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.connector.mini_parts import MiniRequest
from tests.connector.rig import MODELS, Rig, connector, gateway

_NUMBERS = itertools.count()


def prompt(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def request(text: bytes, salt: str | None = None, **more: Any) -> MiniRequest:
    return MiniRequest(f"r{next(_NUMBERS)}", text, cache_salt=salt, **more)


def end_in_order(rig: Rig) -> None:
    assert rig.blocks_in_use() == 0
    assert rig.stores.backlog_bytes == 0
    assert not rig.side.pending


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_comes_back_after_a_restart_as_it_was_computed(
    model: str, ranks: int, *, regions: bool
) -> None:
    with gateway(regions=regions) as (service, served):
        with connector(service, served, MODELS[model], ranks=ranks) as first:
            first.engine.run(request(prompt(101), "a"))
            end_in_order(first)
        with connector(service, served, MODELS[model], ranks=ranks) as second:
            again, stranger = request(prompt(101), "a"), request(prompt(101), "b")
            second.engine.run(again, stranger)
            end_in_order(second)
            assert (again.external, stranger.external) == (96, 0)
            assert second.count("loads_failed") == 0
            assert second.count("hit_tokens") == 96
