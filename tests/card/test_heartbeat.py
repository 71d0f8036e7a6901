"""The heartbeat block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.card.samples import CARD, HEARTBEAT, OTHER_CARD, RUN
from xkv_gateway.card.format_errors import BadChecksum, BadMagic, ForeignCard
from xkv_gateway.card.heartbeat import decode, encode, moved


def test_a_beat_comes_back_as_it_was() -> None:
    assert decode(encode(HEARTBEAT), CARD) == HEARTBEAT


def test_no_beat_since_the_format_is_none_and_garbage_is_not() -> None:
    assert decode(bytes(4096), CARD) is None
    with pytest.raises(BadMagic):
        decode(b"\x01" * 4096, CARD)


def test_a_beat_of_another_card_is_foreign() -> None:
    with pytest.raises(ForeignCard):
        decode(encode(HEARTBEAT), OTHER_CARD)


def test_a_torn_beat_is_damaged_or_one_of_the_two() -> None:
    old, new = encode(HEARTBEAT), encode(replace(HEARTBEAT, beat=10))
    for cut in range(512, 4096, 512):
        torn = new[:cut] + old[cut:]
        try:
            assert decode(torn, CARD) in {HEARTBEAT, replace(HEARTBEAT, beat=10)}
        except BadChecksum:
            assert torn not in {old, new}


def test_a_heart_moves_when_its_beat_or_its_run_changes() -> None:
    assert not moved(HEARTBEAT, HEARTBEAT)
    assert not moved(None, None)
    assert not moved(HEARTBEAT, None)
    assert moved(None, HEARTBEAT)
    assert moved(HEARTBEAT, replace(HEARTBEAT, beat=10))
    assert moved(HEARTBEAT, replace(HEARTBEAT, stamp=replace(RUN, epoch=3)))
