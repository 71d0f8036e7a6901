"""The orders of writes of FORMAT.md, each cut at every write, in every survivor image that the fault model allows.

A step is a set of unflushed 4 KiB writes; the flush between two steps is a completed one. A crash within a step leaves
each of its blocks lost, whole, or torn at a 512-byte boundary (the first or the last sectors arrived).

Invariants checked: the superblock found is always the old one or the new one; format leaves a card that can be formatted
again; a table file is the old one, the new one, or incomplete.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Final

import pytest

from tests.card import samples
from tests.card.samples import CARD, OTHER_CARD, SUPERBLOCK
from xkv_gateway.card.format_errors import FormatError, NoSuperblock
from xkv_gateway.card.structure import Stamp
from xkv_gateway.card.superblock import Blank, Chosen, Stranger, choose, encode
from xkv_gateway.card.table_file import FileKind, TableWriter
from xkv_gateway.card.table_read import TableReader, decode_ends
from xkv_gateway.card.tables import OBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_gateway.card.superblock import Superblock

SECTOR: Final = 512
BLOCK: Final = 4096
ZERO: Final = bytes(BLOCK)
Blocks = dict[int, bytes]
CUTS: Final = (SECTOR, 4 * SECTOR, 7 * SECTOR)


def survivors(before: bytes, after: bytes) -> list[bytes]:
    """What one unflushed block may look like after a crash."""
    heads = [after[:cut] + before[cut:] for cut in CUTS]
    tails = [before[:cut] + after[cut:] for cut in CUTS]
    return list(dict.fromkeys([before, after, *heads, *tails]))


def crashes(before: Blocks, steps: list[Blocks]) -> Iterator[tuple[int, Blocks]]:
    """Every image that a crash within every step can leave, with the number of completed steps."""
    for done, step in enumerate(steps):
        choices = [survivors(before[at], data) for at, data in step.items()]
        for combination in product(*choices):
            yield done, before | dict(zip(step, combination, strict=True))
        before = before | step
    yield len(steps), before


def outcome(image: Blocks) -> object:
    try:
        return choose((image[0], image[1]))
    except NoSuperblock as error:
        return error


def both(superblock: Superblock) -> Blocks:
    return {0: encode(superblock, 0), 1: encode(superblock, 1)}


def update(new: Superblock, first: int) -> list[Blocks]:
    return [{first: encode(new, first)}, {1 - first: encode(new, 1 - first)}]


NEW: Final = replace(
    SUPERBLOCK,
    sequence=6,
    clean=False,
    stamp=replace(SUPERBLOCK.stamp, epoch=3, run_id=b"n" * 16),
    owner_host_nqn="nqn.2014-08.org.example:" + "n" * 150,
    owner_pid=7,
)
"""Of another host: it differs in both of the sectors that are in use."""


@pytest.mark.parametrize("first", [0, 1])
def test_opening_and_clean_stop_leave_the_old_superblock_or_the_new_one(first: int) -> None:
    images = 0
    for done, image in crashes(both(SUPERBLOCK), update(NEW, first)):
        found = outcome(image)
        assert isinstance(found, Chosen)
        assert not found.contested
        assert found.superblock == NEW if done else found.superblock in {SUPERBLOCK, NEW}
        images += 1
    assert images > 5


@pytest.mark.parametrize("bad", [0, 1])
def test_the_copy_that_is_not_the_newest_is_written_first_so_that_one_is_always_whole(bad: int) -> None:
    start = both(SUPERBLOCK)
    start[bad] = start[bad][:600] + b"\xff" + start[bad][601:]
    for _, image in crashes(start, update(NEW, bad)):
        found = outcome(image)
        assert isinstance(found, Chosen)
        assert found.superblock in {SUPERBLOCK, NEW}
    wrong_order = [outcome(image) for _, image in crashes(start, update(NEW, 1 - bad))]
    assert any(isinstance(found, NoSuperblock) for found in wrong_order), "the rule is there for a reason"


def test_a_single_copy_would_not_be_enough() -> None:
    images = [outcome(image) for _, image in crashes(both(SUPERBLOCK), [both(NEW)])]
    assert any(isinstance(found, NoSuperblock) for found in images), "without the flush between the copies"


@pytest.mark.parametrize("before", ["blank", "ours", "strangers"])
def test_a_format_that_was_cut_leaves_the_old_card_or_one_that_can_be_formatted_or_the_new_one(
    before: str,
) -> None:
    fresh = replace(NEW, stamp=Stamp(OTHER_CARD, 1, b"f" * 16), sequence=6)
    start = {
        "blank": {0: ZERO, 1: ZERO},
        "ours": both(SUPERBLOCK),
        "strangers": {0: b"\x55\xaa" * 2048, 1: ZERO},
    }[before]
    steps: list[Blocks] = [{0: ZERO, 1: ZERO}, {1: encode(fresh, 1)}, {0: encode(fresh, 0)}]
    for done, image in crashes(start, steps):
        found = outcome(image)
        if isinstance(found, Chosen):
            assert found.superblock == fresh if done else found.superblock == SUPERBLOCK
        else:
            assert isinstance(found, Blank | Stranger | NoSuperblock)
            assert done <= 1, "the flush of the first copy is the commit point"
        if before == "blank":
            assert not isinstance(found, Stranger) or done == 1


def test_a_late_superblock_of_the_run_before_a_format_loses() -> None:
    fresh = replace(NEW, stamp=Stamp(OTHER_CARD, 1, b"f" * 16), sequence=6)
    for copy in (0, 1):
        image = both(fresh) | {copy: encode(SUPERBLOCK, copy)}
        found = outcome(image)
        assert isinstance(found, Chosen)
        assert found.superblock == fresh


def test_a_checkpoint_that_was_cut_is_the_old_one_or_incomplete_until_it_is_closed() -> None:
    region_bytes = samples.REGION_BYTES
    last = region_bytes - BLOCK

    def pieces(sequence: int, seed: int) -> list[Blocks]:
        writer = TableWriter(region_bytes, samples.identity(sequence))
        header, zeroed = writer.open_pieces()
        values = samples.columns(OBJECTS, 40, seed)
        (chunk,) = writer.chunks(OBJECTS, values)
        return [
            {0: bytes(header.data), last: bytes(zeroed.data)},
            {BLOCK: bytes(chunk.data)},
            {last: bytes(writer.close(20).data)},
        ]

    old = {0: ZERO, last: ZERO, BLOCK: ZERO}
    for step in pieces(4, 1):
        old |= step
    for done, image in crashes(old, pieces(6, 2)):
        found = content(image, last, region_bytes)
        if done == 3:
            assert found == 6
        else:
            assert found in {None, 4} | ({6} if done == 2 else set())
            assert found != 4 or done == 0


def content(image: Blocks, last: int, region_bytes: int) -> int | None:
    """The sequence of the file that can be read in full."""
    try:
        facts = decode_ends(
            image[0], image[last], region_bytes=region_bytes, card_uuid=CARD, kind=FileKind.CHECKPOINT
        )
        assert facts is not None
        reader = TableReader(region_bytes, facts)
        assert reader.decode(image[BLOCK]) is not None
        reader.finish()
    except FormatError:
        return None
    return facts.identity.sequence
