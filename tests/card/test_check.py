from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.card.runs import MIB, SIZE_BYTES, Bench, limits_of
from xkv_gateway.card import fsck
from xkv_gateway.card import superblock as superblock_format
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.check import Checker
from xkv_gateway.card.fsck import CODES, FINDINGS_MAX, NOTES, Report, Rows, judge_rows
from xkv_gateway.card.layout import HEARTBEAT_OFFSET, superblock_1_offset
from xkv_gateway.card.readonly import ReadOnly
from xkv_gateway.card.sight import Kind, look, objects_in_checkpoint, owner_lives
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from xkv_gateway.card.superblock import Superblock

LAST = superblock_1_offset(SIZE_BYTES)
OBJECTS = 12


async def used(bench: Bench, *, clean: bool = True) -> Superblock:
    """A card that holds OBJECTS objects, of which one was deleted; returns its superblock."""
    run = await bench.open_owned()
    for number in range(OBJECTS):
        assert await run.save(b"key %d" % number, b"%d" % number * 30_000) == "stored"
    if clean:
        assert await run.stop()
    else:
        await run.kill()
    found: Superblock = await bench.superblock()
    return found


async def checked(bench: Bench, *, payload: bool = True) -> Report:
    """Check the card; nothing may be written."""
    before = (dict(bench.medium.durable), dict(bench.medium.cache))
    device = ReadOnly(bench.device())
    checker = Checker(
        device, CardBlocks(device, bench.loop.clock), limits_of, bench.loop.clock, lambda *_: None
    )
    await checker.run(payload=payload)
    assert (bench.medium.durable, bench.medium.cache) == before
    return checker.report


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def notes(report: Report) -> set[str]:
    return {note.code for note in report.notes}


def flip(bench: Bench, offset_bytes: int) -> None:
    """Flip a bit."""
    sector = offset_bytes // 512 * 512
    data = bytearray(bench.medium.read(sector, 512))
    data[offset_bytes - sector] ^= 1
    bench.overwrite(sector, bytes(data))


def test_a_card_that_was_closed_in_order_has_no_findings_and_no_notes() -> None:
    async def work(bench: Bench) -> None:
        await used(bench)
        report = await checked(bench)
        assert (report.findings, report.notes) == ([], [])
        assert report.counts["objects"] == report.counts["payloads"] == OBJECTS
        assert report.counts["payload_bytes"] == sum(len(b"%d" % n) * 30_000 for n in range(OBJECTS))
        assert report.to_json()["result"] == "clean"

    Bench().play(work)


def test_a_kill_leaves_notes_but_no_findings() -> None:
    async def work(bench: Bench) -> None:
        await used(bench, clean=False)
        report = await checked(bench)
        assert codes(report) == set()
        assert "unclean" in notes(report)
        assert report.counts["objects"] == OBJECTS

    Bench().play(work)


def test_a_fresh_card_is_clean() -> None:
    async def work(bench: Bench) -> None:
        await (await bench.open()).kill()
        report = await checked(bench)
        assert (codes(report), notes(report)) == (set(), set())

    Bench().play(work)


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_copy_of_the_superblock_is_a_finding_and_an_unwritten_one_a_note(copy: int) -> None:
    async def work(bench: Bench) -> None:
        await used(bench)
        flip(bench, (0, LAST)[copy] + 400)
        report = await checked(bench)
        assert [(f.code, f.where) for f in report.findings] == [
            ("superblock_damaged", f"superblock copy {copy}")
        ]
        bench.overwrite((0, LAST)[copy], bytes(4096))
        report = await checked(bench)
        assert (codes(report), notes(report)) == (set(), {"superblock_unwritten"})

    Bench().play(work)


def test_an_older_copy_of_the_superblock_is_a_note() -> None:
    async def work(bench: Bench) -> None:
        superblock = await used(bench)
        older = replace(superblock, sequence=superblock.sequence - 1)
        bench.overwrite(LAST, superblock_format.encode(older, 1))
        report = await checked(bench)
        assert (codes(report), notes(report)) == (set(), {"superblock_older"})

    Bench().play(work)


@pytest.mark.parametrize("copy", [0, 1])
def test_an_older_copy_of_another_card_is_told_as_that_and_written_anew(copy: int) -> None:
    async def work(bench: Bench) -> None:
        superblock = await used(bench)
        stamp = replace(superblock.stamp, card_uuid=bytes(range(16)))
        foreign = replace(superblock, sequence=superblock.sequence - 1, stamp=stamp)
        bench.overwrite((0, LAST)[copy], superblock_format.encode(foreign, copy))
        report = await checked(bench)
        assert (codes(report), notes(report)) == (set(), {"superblock_foreign"})
        assert "00010203-0405-0607-0809-0a0b0c0d0e0f" in report.notes[0].detail
        run = await bench.open_owned()
        assert await run.stop()
        report = await checked(bench)
        assert (report.notes, report.counts["objects"]) == ([], OBJECTS)

    Bench().play(work)


def test_what_is_no_card_of_ours_is_one_finding_that_says_what_it_is() -> None:
    async def work(bench: Bench) -> None:
        assert codes(await checked(bench)) == {"blank"}
        superblock = await used(bench)
        later = replace(superblock, incompatible_features=1 << 63)
        bench.overwrite(0, superblock_format.encode(later, 0))
        assert codes(await checked(bench)) == {"unknown_feature"}
        flip(bench, 400)
        flip(bench, LAST + 400)
        assert codes(await checked(bench)) == {"no_superblock"}
        bench.overwrite(0, b"XFSB" + bytes(4092))
        bench.overwrite(LAST, bytes(4096))
        report = await checked(bench)
        assert [(f.code, f.detail) for f in report.findings] == [("stranger", "an XFS file system")]

    Bench().play(work)


def test_a_copied_card_is_a_finding_and_is_checked_all_the_same() -> None:
    async def work(bench: Bench) -> None:
        superblock = await used(bench)
        other = replace(superblock, nguid=b"\x07" * 16)
        for copy, offset in enumerate((0, LAST)):
            bench.overwrite(offset, superblock_format.encode(other, copy))
        report = await checked(bench)
        assert codes(report) == {"wrong_namespace"}
        assert report.counts["payloads"] == OBJECTS

    Bench().play(work)


def test_a_card_that_grew_is_a_note_and_one_that_shrank_a_finding() -> None:
    async def work(bench: Bench) -> None:
        await used(bench)
        bench.medium.size_bytes += MIB
        report = await checked(bench)
        assert (codes(report), notes(report)) == (set(), {"grown"})
        bench.medium.size_bytes -= 2 * MIB
        assert codes(await checked(bench)) == {"geometry_changed"}

    Bench().play(work)


def test_every_flipped_bit_of_a_checkpoint_or_of_the_journal_is_found() -> None:
    async def work(bench: Bench) -> None:
        layout = (await used(bench)).layout
        regions = layout.regions
        written = [
            r
            for r in (regions["checkpoint_a"], regions["checkpoint_b"])
            if any(bench.medium.read(r.offset_bytes, 4096))
        ]
        assert written
        for region in written:
            for at, code in (
                (region.offset_bytes + 60, "table_damaged"),
                (region.end_bytes - 4096 + 60, "table_damaged"),
                (region.offset_bytes + 4096 + 60, "chunk_damaged"),
                (region.offset_bytes + 4096 + 140, "chunk_damaged"),
            ):
                flip(bench, at)
                assert code in codes(await checked(bench, payload=False)), at
                flip(bench, at)
        assert codes(await checked(bench, payload=False)) == set()

    Bench().play(work)


def test_a_broken_batch_with_later_ones_behind_it_is_a_gap_and_a_broken_last_one_a_note() -> None:
    async def work(bench: Bench) -> None:
        layout = (await used(bench, clean=False)).layout
        offset = layout.journal.offset_bytes
        flip(bench, offset + 3 * 4096 + 200)
        assert codes(await checked(bench, payload=False)) == {"journal_gap"}
        flip(bench, offset + 3 * 4096 + 200)
        end = next(at for at in range(offset, offset + MIB, 4096) if not any(bench.medium.read(at, 4096)))
        flip(bench, end - 4096 + 130)
        report = await checked(bench, payload=False)
        assert (codes(report), notes(report)) == (set(), {"unclean", "journal_torn"})

    Bench().play(work)


def test_a_flipped_bit_of_a_payload_is_found_with_payloads_and_only_then() -> None:
    async def work(bench: Bench) -> None:
        layout = (await used(bench)).layout
        flip(bench, layout.data.offset_bytes + 70_000)
        assert codes(await checked(bench, payload=False)) == set()
        report = await checked(bench)
        assert [f.code for f in report.findings] == ["payload_damaged"]
        assert "offset" in report.findings[0].detail

    Bench().play(work)


@pytest.mark.parametrize("blocks_bytes", [512 << 10, 4 << 20])
def test_data_in_the_middle_alone_is_somebodys(blocks_bytes: int) -> None:
    async def work(bench: Bench) -> None:
        size_bytes = bench.medium.size_bytes
        first = size_bytes // 3 // BLOCK_BYTES * BLOCK_BYTES
        other = bench.device()
        await other.write_from(first, [memoryview(b"data" * (blocks_bytes // 4))])
        device = ReadOnly(bench.device())
        seen = await look(device, CardBlocks(device, bench.loop.clock))
        assert seen.kind is Kind.STRANGER
        assert seen.marks
        with pytest.raises(CardUnavailableError, match="there is data on the card"):
            await bench.open_owned("me")

    Bench().play(work)


def test_a_look_tells_whose_card_it_is_how_many_objects_it_has_and_whether_somebody_has_it() -> None:
    async def work(bench: Bench) -> None:
        device = ReadOnly(bench.device())
        blocks = CardBlocks(device, bench.loop.clock)
        assert (await look(device, blocks)).kind is Kind.BLANK
        run = await bench.open_owned("me")
        seen = await look(device, blocks)
        assert seen.kind is Kind.OURS
        assert seen.superblock is not None
        assert seen.superblock.owner == "me"
        assert await owner_lives(blocks, seen)
        await run.save(b"key", b"bytes")
        await run.stop()
        seen = await look(device, blocks)
        assert seen.clean
        assert seen.superblock is not None
        assert not await owner_lives(blocks, seen)
        assert await objects_in_checkpoint(blocks, seen.superblock) == 1
        bench.overwrite(HEARTBEAT_OFFSET, b"\x01" * 4096)
        assert notes(await checked(bench)) == {"heartbeat_unreadable"}

    Bench().play(work)


def rows(*objects: tuple[int, int, list[tuple[int, int]]]) -> Rows:
    """Rows of (slot, units needed, extents)."""
    extents = [(slot, start, count) for slot, _, each in objects for start, count in each]
    columns = np.array(extents, np.int64).reshape(-1, 3)
    return Rows(
        np.array([slot for slot, _, _ in objects], np.int64),
        np.array([needed for _, needed, _ in objects], np.int64),
        columns[:, 0],
        columns[:, 1],
        columns[:, 2],
    )


@pytest.mark.parametrize(
    ("objects", "expected", "bad"),
    [
        ([], [], set()),
        ([(3, 2, [(0, 2)]), (1, 3, [(2, 1), (8, 2)]), (7, 0, [])], [], set()),
        ([(3, 2, [(9, 2)])], ["extent_beyond"], {3}),
        ([(3, 2, [(0, 1)])], ["extent_short"], {3}),
        ([(3, 1, [])], ["extent_short"], {3}),
        ([(3, 1, [(0, 2)])], ["extent_short"], {3}),
        (
            [(3, 4, [(0, 4)]), (5, 1, [(1, 1)]), (6, 1, [(3, 1)])],
            ["extent_shared", "extent_shared"],
            {3, 5, 6},
        ),
        ([(3, 1, [(0, 1)]), (5, 1, [(0, 1)])], ["extent_shared"], {3, 5}),
    ],
)
def test_extents_lie_in_the_data_area_are_as_long_as_they_must_be_and_share_nothing(
    objects: list[tuple[int, int, list[tuple[int, int]]]], expected: list[str], bad: set[int]
) -> None:
    report = Report()
    assert judge_rows(report, rows(*objects), capacity_au=10) == bad
    assert [finding.code for finding in report.findings] == expected


def test_findings_without_end_are_counted_beyond_a_bound() -> None:
    report = Report()
    for number in range(FINDINGS_MAX + 5):
        report.find("blank", str(number), "")
    assert len(report.findings) == FINDINGS_MAX
    assert report.to_json()["omitted"] == 5


def test_the_page_for_operators_names_every_code() -> None:
    page = (Path(fsck.__file__).parents[3] / "docs/card.md").read_text()
    assert not [code for code in (*CODES, *NOTES) if not re.search(rf"`{code}`", page)]
