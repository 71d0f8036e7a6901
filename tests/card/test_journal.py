"""The journal: framing, the ring's arithmetic, and reading it back over torn tails, damage, laps and runs.

Invariants checked: what is scanned is a prefix of what was written, or a `Gap` says what is missing; a stale, foreign or
torn batch is never replayed; damage is never taken for a torn tail, nor the other way round.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.card.samples import CARD, FORMATTED, OTHER_CARD, RUN, JournalImage, deletes, plain, records
from xkv_gateway.card import journal_format
from xkv_gateway.card.format_errors import BadChecksum, ChainBroken, ForeignCard, NoRoom
from xkv_gateway.card.journal_format import BatchKind, ChainPoint, Ring
from xkv_gateway.card.journal_scan import End, Gap, Need, ScannedBatch, Scanner, Tail
from xkv_gateway.card.record_codec import decode_records, encode_batches
from xkv_gateway.card.structure import Stamp

if TYPE_CHECKING:
    from collections.abc import Sequence

NEXT_RUN = Stamp(CARD, 3, b"second-run-id-00")
Seen = list[ScannedBatch | Gap]


def scan(
    data: bytes | bytearray, start: ChainPoint | None = None, card: bytes = CARD
) -> tuple[list[ScannedBatch | Gap], End]:
    scanner = Scanner(len(data), card, start or journal_format.beginning(FORMATTED))
    seen: Seen = []
    for _ in range(100_000):
        event = scanner.next_event()
        match event:
            case Need(offset, length):
                assert scanner.next_event() is event, "the same is asked for until it is fed"
                assert 0 <= offset < offset + length <= len(data)
                assert offset % 4096 == length % 4096 == 0
                scanner.feed(bytes(data[offset : offset + length]))
            case End():
                assert scanner.next_event() is event
                return seen, event
            case _:
                seen.append(event)
    raise AssertionError("the scan does not end")


def numbers(seen: Sequence[ScannedBatch | Gap]) -> list[int | str]:
    return ["gap" if isinstance(event, Gap) else event.header.number for event in seen]


def gap_of(seen: Seen) -> Gap:
    (gap,) = [event for event in seen if isinstance(event, Gap)]
    return gap


def flip(data: bytearray, offset: int) -> None:
    data[offset] ^= 0x10


def filled(count: int = 5, ring_bytes: int = 256 << 10) -> JournalImage:
    image = JournalImage(ring_bytes)
    for _ in range(count):
        image.append()
    return image


def test_batches_come_back_in_order_with_their_records() -> None:
    image = JournalImage()
    (body,) = encode_batches(records(1), image.ring.body_bytes_max)
    image.put(journal_format.encode_batch(image.ring, image.point, RUN, 0, body))
    image.append(count=3)
    seen, end = scan(image.data)
    assert numbers(seen) == [0, 1, 2]
    start, first, second = (event for event in seen if isinstance(event, ScannedBatch))
    assert start.header.kind is BatchKind.RUN_START
    assert not start.body
    found = decode_records(first.body, first.header.first_lsn, first.header.record_count)
    assert list(map(plain, found)) == list(map(plain, records(1)))
    assert (second.header.first_lsn, second.header.last_lsn) == (14, 16)
    assert [start.header.after, first.header.after] == [placed.after for placed in image.placed[:2]]
    assert end.point == image.point
    assert end.tail is Tail.EMPTY


def test_a_batch_is_one_transfer_of_whole_blocks_whose_padding_is_covered() -> None:
    image = filled(1)
    placed = image.placed[-1]
    assert placed.total_bytes % 4096 == 0
    flip(image.data, placed.offset_bytes + placed.total_bytes - 1)
    seen, end = scan(image.data)
    assert numbers(seen) == [0]
    assert end.tail is Tail.TORN


def test_an_empty_ring_is_an_empty_tail_at_the_beginning() -> None:
    seen, end = scan(bytes(64 << 10))
    assert not seen
    assert end.point == journal_format.beginning(FORMATTED)
    assert end.tail is Tail.EMPTY


def test_reading_begins_where_a_checkpoint_says() -> None:
    image = filled(6)
    seen, end = scan(image.data, image.placed[2].after)
    assert numbers(seen) == [3, 4, 5, 6]
    assert end.point == image.point


@pytest.mark.parametrize("survivors", [(), (0,), (1,), (0, 2, 5), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_a_torn_last_batch_ends_the_journal_and_is_no_damage(survivors: tuple[int, ...]) -> None:
    image = filled(3)
    before = bytes(image.data)
    end_before = image.point
    placed = image.append(count=60)  # several sectors of body
    after = bytes(image.data)
    data = bytearray(before)
    for sector in survivors:
        at = placed.offset_bytes + sector * 512
        data[at : at + 512] = after[at : at + 512]
    seen, end = scan(data)
    if data == after:
        assert numbers(seen) == [0, 1, 2, 3, 4]
    else:
        assert numbers(seen) == [0, 1, 2, 3]
        assert end.point == end_before
        assert (end.tail is Tail.TORN) is (0 in survivors)


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("offset", [0, 8, 12, 60, 100, 130, 4095])
def test_a_broken_batch_with_a_whole_one_behind_it_is_damage_and_says_what_is_lost(
    victim: int, offset: int
) -> None:
    image = filled(5)
    placed = image.placed[victim]
    flip(image.data, placed.offset_bytes + offset)
    seen, end = scan(image.data)
    assert numbers(seen) == [*range(victim), "gap", *range(victim + 1, 6)]
    gap = gap_of(seen)
    lost = range(gap.first_lsn, gap.last_lsn + 1)
    assert list(lost) == ([] if victim == 0 else [victim])  # the run start has no record
    assert (gap.from_position, gap.to_position) == (placed.position, image.placed[victim + 1].position)
    assert end.point == image.point


def test_several_damaged_places_are_several_gaps_and_neighbours_are_one() -> None:
    image = filled(9)
    for victim in (2, 5, 6):
        flip(image.data, image.placed[victim].offset_bytes + 200)
    seen, _ = scan(image.data)
    assert numbers(seen) == [0, 1, "gap", 3, 4, "gap", 7, 8, 9]
    assert [(g.first_lsn, g.last_lsn) for g in seen if isinstance(g, Gap)] == [(2, 2), (5, 6)]


def test_damage_of_the_last_batch_cannot_be_told_from_a_torn_tail() -> None:
    image = filled(3)
    flip(image.data, image.placed[-1].offset_bytes + 300)
    seen, end = scan(image.data)
    assert numbers(seen) == [0, 1, 2]
    assert end.tail is Tail.TORN
    assert isinstance(end.reason, BadChecksum)


def test_a_new_run_continues_after_the_last_good_batch_and_supersedes_a_torn_tail() -> None:
    image = filled(3)
    torn = image.append(count=80)
    flip(image.data, torn.offset_bytes + torn.total_bytes - 1)
    _, end = scan(image.data)
    image.point = end.point
    image.start_run(NEXT_RUN)
    image.append()
    seen, end = scan(image.data)
    assert numbers(seen) == [0, 1, 2, 3, 4, 5]
    assert end.point == image.point


def test_what_a_dead_run_left_behind_a_new_run_start_is_stale_and_no_damage() -> None:
    image = filled(3)
    end_of_old = image.point
    image.append()
    image.append()  # of the old run, and not seen by the new one
    image.point = end_of_old
    image.start_run(NEXT_RUN)
    seen, end = scan(image.data)
    assert numbers(seen) == [0, 1, 2, 3, 4]
    assert end.point == image.point
    image.append()
    assert numbers(scan(image.data)[0]) == [0, 1, 2, 3, 4, 5]


def test_a_late_batch_of_a_dead_run_over_the_new_runs_first_is_found_out() -> None:
    image = filled(3)
    end_of_old = image.point
    late = image.append()
    late_bytes = b"".join(late.buffers)
    image.point = end_of_old
    image.start_run(NEXT_RUN)
    image.append()
    image.data[late.offset_bytes : late.offset_bytes + len(late_bytes)] = late_bytes
    seen, _ = scan(image.data)
    # The late one continues the chain, and what follows does not continue the late one: damage, never silence.
    assert numbers(seen) == [0, 1, 2, 3, 4, "gap", 5]
    gap = gap_of(seen)
    assert (gap.first_lsn, gap.last_lsn) == (4, 4), "the record of the late batch is in doubt"


def test_a_run_of_the_same_or_a_smaller_epoch_never_follows() -> None:
    image = filled(2)
    with pytest.raises(AssertionError):
        image.start_run(replace(NEXT_RUN, epoch=RUN.epoch))
    image.point = replace(image.point, epoch=1)
    image.start_run(replace(NEXT_RUN, epoch=2))
    seen, _ = scan(image.data)
    assert numbers(seen) == [0, 1, 2]


def test_records_of_another_run_never_follow() -> None:
    image = filled(2)
    image.run = replace(RUN, run_id=b"other-run-id-000")
    image.point = replace(image.point, run_id=image.run.run_id)
    image.append()
    seen, end = scan(image.data)
    assert numbers(seen) == [0, 1, 2]
    assert end.tail is Tail.EMPTY


def test_a_ring_of_another_card_is_empty() -> None:
    image = filled(4)
    seen, end = scan(image.data, card=OTHER_CARD)
    assert not seen
    assert isinstance(end.reason, ForeignCard)


def test_a_swapped_in_older_batch_breaks_the_chain() -> None:
    image, other = filled(4), JournalImage()
    for count in (1, 2, 1, 1):
        other.append(count)
    foreign = other.placed[2]
    at = foreign.offset_bytes
    image.data[at : at + foreign.total_bytes] = b"".join(foreign.buffers)
    seen, _ = scan(image.data)
    assert numbers(seen) == [0, 1, 2, "gap", 3, 4]
    gap = gap_of(seen)
    assert isinstance(gap.reason, ChainBroken)
    assert (gap.first_lsn, gap.last_lsn) == (2, 3), "the one before the break is in doubt"


def test_the_ring_wraps_and_no_batch_crosses_its_end() -> None:
    image = JournalImage(64 << 10)
    start = image.placed[0].after
    for lap in range(40):
        if lap % 3 == 0:
            start, image.needed_from = image.point, image.point.position
        placed = image.append(count=1 + lap % 5 * 60)
        assert placed.offset_bytes + placed.total_bytes <= 64 << 10
        seen, end = scan(image.data, start)
        assert numbers(seen) == list(range(start.number, image.point.number))
        assert end.point == image.point
    assert image.point.position > 3 * (64 << 10)


def test_a_torn_batch_at_the_start_of_a_lap_is_a_torn_tail() -> None:
    image = JournalImage(64 << 10)
    while image.ring.offset_of(image.point.position) != 60 << 10:
        image.needed_from = image.point.position
        image.append()
    start, image.needed_from = image.point, image.point.position
    placed = image.append(count=250)
    assert placed.offset_bytes == 0
    flip(image.data, placed.total_bytes - 1)
    seen, end = scan(image.data, start)
    assert not seen
    assert end.tail is Tail.TORN
    assert end.point == start


def test_damage_across_the_end_of_the_ring_is_found() -> None:
    image = JournalImage(64 << 10)
    for _ in range(14):
        image.needed_from = image.point.position
        image.append()
    start, image.needed_from = image.point, image.point.position
    for _ in range(4):
        image.append()
    for placed in image.placed[-4:-2]:
        flip(image.data, placed.offset_bytes + 140)
    seen, end = scan(image.data, start)
    assert numbers(seen) == ["gap", 17, 18]
    assert end.point == image.point


def test_an_earlier_lap_is_never_taken_for_damage() -> None:
    image = JournalImage(64 << 10)
    for _ in range(30):
        image.needed_from = image.point.position
        image.append()
    for cut in range(5):
        start = image.placed[-5].after
        data = bytearray(image.data)
        for placed in image.placed[len(image.placed) - cut :]:
            data[placed.offset_bytes : placed.offset_bytes + placed.total_bytes] = bytes(placed.total_bytes)
        seen, end = scan(data, start)
        assert "gap" not in numbers(seen)
        assert len(seen) == 4 - cut if cut < 5 else not seen
        assert end.tail is Tail.EMPTY


def test_a_full_ring_refuses_until_a_checkpoint_frees_it() -> None:
    image = JournalImage(64 << 10)
    for _ in range(11):
        image.append()
    assert image.ring.free_bytes(image.point.position, 0) == 0
    with pytest.raises(NoRoom):
        image.append()
    assert numbers(scan(image.data)[0]) == list(range(12))
    image.needed_from = image.placed[4].position
    image.append()


def test_a_full_ring_has_room_for_some_more_runs_to_begin() -> None:
    image = JournalImage(64 << 10)
    for _ in range(11):
        image.append()
    for epoch in range(3, 7):
        image.start_run(Stamp(CARD, epoch, epoch.to_bytes(16, "little")))
        with pytest.raises(NoRoom):
            image.append()
    assert numbers(scan(image.data)[0]) == list(range(16))
    with pytest.raises(NoRoom):
        image.start_run(Stamp(CARD, 7, bytes(16)))


def test_nothing_that_recovery_needs_is_overwritten() -> None:
    image = JournalImage(64 << 10)
    start = image.point
    image.needed_from = start.position
    with suppress(NoRoom):
        for index in range(100):
            image.append(count=1 + index % 3 * 50)
    assert image.point.number < 100
    assert numbers(scan(image.data, start)[0]) == list(range(start.number, image.point.number))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 250), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([64 << 10, 68 << 10, 100 << 10]),
)
def test_whatever_is_written_is_read_back(batches: list[tuple[int, bool]], ring_bytes: int) -> None:
    image = JournalImage(ring_bytes)
    start, epoch = image.point, RUN.epoch
    for count, restart in batches:
        try:
            if restart:
                epoch += 1
                image.start_run(Stamp(CARD, epoch, epoch.to_bytes(16, "little")))
            image.append(count)
        except NoRoom:
            start, image.needed_from = image.point, image.point.position
    seen, end = scan(image.data, start)
    assert numbers(seen) == list(range(start.number, image.point.number))
    assert end.point == image.point


def test_a_batch_is_bounded_by_its_share_of_the_ring() -> None:
    ring = Ring(64 << 10)
    assert ring.batch_bytes_max == 16 << 10
    assert Ring(512 << 20).batch_bytes_max == journal_format.BATCH_BYTES_MAX
    point = journal_format.beginning(RUN)
    body = deletes(1, 1, objects=4000)
    with pytest.raises(AssertionError):
        journal_format.encode_batch(ring, point, RUN, 0, body)
