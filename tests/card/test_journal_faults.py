"""Any damage to a ring: nothing but what was written is ever read, and nothing is ever missing in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.card.samples import CARD, RUN, JournalImage
from tests.card.test_journal import scan
from xkv_gateway.card.journal_format import BATCH
from xkv_gateway.card.journal_scan import End, Gap, Need, ScannedBatch, Scanner
from xkv_gateway.card.structure import Stamp, crc_of

if TYPE_CHECKING:
    from xkv_gateway.card.journal_format import Placed

RING_BYTES = 64 << 10
SECTORS = RING_BYTES // 512
FAULT = st.tuples(st.integers(0, SECTORS - 1), st.sampled_from(["flip", "zero", "ones", "before", "swap"]))


def lapped(seed: int) -> tuple[JournalImage, int, bytes]:
    """A ring in its third lap, several runs: the image, which batch is needed first, and the image one lap ago."""
    image, epoch = JournalImage(RING_BYTES), RUN.epoch
    earlier = bytes(image.data)
    while image.point.position < 3 * RING_BYTES - 9000:
        image.needed_from = image.point.position
        if image.point.position // RING_BYTES == 1:
            earlier = bytes(image.data)
        if (image.point.number + seed) % 7 == 0:
            epoch += 1
            image.start_run(Stamp(CARD, epoch, epoch.to_bytes(16, "little")))
        image.append(1 + (image.point.number * 37 + seed) % 300)
    total, first = 0, len(image.placed)
    while total < RING_BYTES - 40_000:
        first -= 1
        total = image.point.position - image.placed[first].position
    return image, first, earlier


def damaged(data: bytes | bytearray, earlier: bytes, faults: list[tuple[int, str]]) -> bytearray:
    result = bytearray(data)
    for sector, kind in faults:
        at = sector * 512
        other = (sector * 31 + 5) % SECTORS * 512
        result[at : at + 512] = {
            "flip": bytes([result[at] ^ 4]) + result[at + 1 : at + 512],
            "zero": bytes(512),
            "ones": b"\xff" * 512,
            "before": earlier[at : at + 512],
            "swap": data[other : other + 512],
        }[kind]
    return result


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(0, 20), st.lists(FAULT, max_size=12))
def test_whatever_is_damaged_what_is_read_was_written_and_what_is_missing_is_reported(
    seed: int, faults: list[tuple[int, str]]
) -> None:
    image, first, earlier = lapped(seed)
    needed = image.placed[first:]
    data = damaged(image.data, earlier, faults)
    seen, end = scan(data, image.placed[first - 1].after)
    written = {placed.position: placed for placed in needed}
    expected = first
    for event in seen:
        if isinstance(event, Gap):
            lost = [p for p in needed if event.from_position <= p.position < event.to_position]
            assert lost, "a gap is where something was"
            expected = image.placed.index(written[event.to_position])
            continue
        placed = written[event.header.position]
        assert image.placed.index(placed) == expected, "in order, and none left out"
        assert bytes(event.body) == placed.buffers[1]
        expected += 1
    unread = image.placed[expected:]
    assert end.point == image.placed[expected - 1].after
    assert not any(intact(data, image.data, placed) for placed in unread), (
        "a whole batch is never taken for the tail"
    )
    if not unread:
        assert end.point == image.point


def intact(data: bytes | bytearray, original: bytes | bytearray, placed: Placed) -> bool:
    at, size = placed.offset_bytes, placed.total_bytes
    return data[at : at + size] == original[at : at + size]


@pytest.mark.parametrize("kind", ["zero", "before"])
def test_every_combination_of_lost_sectors_of_the_last_batch_is_a_tail_and_no_damage(kind: str) -> None:
    image, first, _ = lapped(3)
    start = image.placed[first - 1].after
    image.needed_from = start.position
    before_append = bytes(image.data)
    last = image.append(30)  # three sectors and padding
    used = 4
    source = bytes(RING_BYTES) if kind == "zero" else before_append
    for mask in range(1 << used):
        data = bytearray(image.data)
        for sector in range(used):
            if mask >> sector & 1:
                at = last.offset_bytes + sector * 512
                data[at : at + 512] = source[at : at + 512]
        seen, end = scan(data, start)
        assert all(isinstance(event, ScannedBatch) for event in seen)
        complete = data == image.data
        assert end.point == (image.point if complete else image.placed[-2].after)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("number", 1),
        ("number", -1),
        ("first_lsn", 1),
        ("first_lsn", -1),
        ("previous_chain", 1),
        ("epoch", 1),
        ("run_id", 1),
    ],
)
def test_a_whole_batch_with_one_wrong_link_never_passes_for_the_next_one(field: str, change: int) -> None:
    """A faulty program wrote it: it is later than what was read and does not continue it, which is damage."""
    image = JournalImage(RING_BYTES)
    image.append()
    placed = image.append(2)
    header = bytearray(placed.buffers[0])
    for name in (field, "last_lsn") if field == "first_lsn" else (field,):
        place = next(one for one in BATCH.fields if one.name == name)
        end = place.offset + place.size
        value = int.from_bytes(header[place.offset : end], "little") + change
        header[place.offset : end] = value.to_bytes(place.size, "little")
    header[12:16] = crc_of(header).to_bytes(4, "little")
    image.data[placed.offset_bytes : placed.offset_bytes + len(header)] = header
    seen, end_of_journal = scan(image.data)
    kinds = [type(event) for event in seen]
    if field == "run_id":
        assert kinds == [ScannedBatch] * 2
        assert end_of_journal.point == image.placed[1].after
    else:
        assert kinds == [ScannedBatch, ScannedBatch, Gap, ScannedBatch]


def test_a_batch_that_wrapped_although_it_fitted_is_not_taken_for_the_next_one() -> None:
    image = JournalImage(RING_BYTES)
    for _ in range(3):
        image.needed_from = image.point.position
        image.append()
    start = image.point
    image.point = replace(start, position=image.ring.lap_start(start.position))
    image.needed_from = image.point.position
    image.append()
    seen, _ = scan(image.data, start)
    assert [type(event) for event in seen] == [Gap, ScannedBatch]


def test_a_batch_with_other_records_of_the_same_numbers_breaks_the_chain_behind_it() -> None:
    image, other = JournalImage(RING_BYTES), JournalImage(RING_BYTES)
    for written, objects in ((image, 1), (other, 2)):
        written.append()
        written.append(objects=objects)
        written.append()
    swapped = other.placed[2]
    image.data[swapped.offset_bytes : swapped.offset_bytes + swapped.total_bytes] = b"".join(swapped.buffers)
    seen, _ = scan(image.data)
    assert [type(event) for event in seen] == [ScannedBatch, ScannedBatch, ScannedBatch, Gap, ScannedBatch]
    (gap,) = [event for event in seen if isinstance(event, Gap)]
    assert (gap.first_lsn, gap.last_lsn) == (2, 2)


def test_without_a_search_the_tail_costs_one_read_and_damage_is_the_end() -> None:
    image = JournalImage(16 << 20)
    for _ in range(5):
        image.append()
    reads = []
    for search in (True, False):
        scanner = Scanner(len(image.data), CARD, image.placed[0].after, search=search)
        reads.append(0)
        while not isinstance(event := scanner.next_event(), End):
            if isinstance(event, Need):
                reads[-1] += 1
                scanner.feed(image.data[event.offset_bytes : event.offset_bytes + event.length_bytes])
        assert event.point == image.point
    assert reads[0] >= 16
    assert reads[1] <= 3
    image.data[image.placed[3].offset_bytes + 200] ^= 1
    scanner = Scanner(len(image.data), CARD, image.placed[2].after, search=False)
    need = scanner.next_event()
    assert isinstance(need, Need)
    scanner.feed(image.data[need.offset_bytes : need.offset_bytes + need.length_bytes])
    while isinstance(event := scanner.next_event(), Need):
        scanner.feed(image.data[event.offset_bytes : event.offset_bytes + event.length_bytes])
    assert isinstance(event, End)
    assert event.point == image.placed[2].after
