"""Checks a card that no gateway serves: reads every structure, and every payload where that is wanted. Nothing is written.

superblocks  ->  heartbeat  ->  checkpoints and ledgers, chunk by chunk  ->  the journal from the oldest valid start on
             ->  the index that a start would have: names, identities, extents  ->  payloads, in the order in which they lie
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_gateway.card import fsck, sight
from xkv_gateway.card import heartbeat as heartbeat_format
from xkv_gateway.card.checksum import checksums
from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.journal_format import beginning
from xkv_gateway.card.journal_scan import End, Gap, Need, ScannedBatch, Scanner, Tail
from xkv_gateway.card.layout import HEARTBEAT_OFFSET
from xkv_gateway.card.record_codec import decode_records
from xkv_gateway.card.recovery import Recoverer
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.sight import Kind, look
from xkv_gateway.card.structure import BLOCK_BYTES, RUN_ID_BYTES, Stamp, is_blank
from xkv_gateway.card.table_file import FileKind
from xkv_gateway.card.table_read import FileFacts, TableReader
from xkv_gateway.card.transfer import Placed, Transfer
from xkv_gateway.core.types import Extent

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.fsck import Report
    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.recovery import Recovery
    from xkv_gateway.card.sight import Sight
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.core.slots import SlotTable
    from xkv_gateway.core.types import EngineLimits
    from xkv_nvmeof.blockdev import BlockDevice

    Progress = Callable[[str, int, int], None]
    """What is looked at, bytes or objects done, and of how many."""

PAYLOAD_BATCH_BYTES: Final = 32 << 20
"""So much payload is in memory at a time (or one object, where that is larger)."""
TABLES: Final = (
    ("checkpoint_a", FileKind.CHECKPOINT),
    ("checkpoint_b", FileKind.CHECKPOINT),
    ("ledger_a", FileKind.LEDGER),
    ("ledger_b", FileKind.LEDGER),
)


class Checker:
    """One check of one card.

    Args:
        device: the card; only read from.
        blocks: access to its structures.
        limits_of: the engine's limits on a card of this layout.
        clock: monotonic ns.
        progress: called now and then.
    """

    def __init__(
        self,
        device: BlockDevice,
        blocks: CardBlocks,
        limits_of: Callable[[Layout], EngineLimits],
        clock: Callable[[], int],
        progress: Progress,
    ) -> None:
        self._device = device
        self._blocks = blocks
        self._limits_of = limits_of
        self._clock = clock
        self._progress = progress
        self.report: Report = fsck.Report()

    async def run(self, *, payload: bool) -> Sight:
        """Check everything; the findings are in `report`. Raises DeviceError where the card cannot be read."""
        seen = await look(self._device, self._blocks)
        if not self._judge(seen):
            return seen
        superblock = seen.superblock
        assert superblock is not None
        await self._other_copy(seen)
        await self._heartbeat(superblock)
        files = [await self._table(superblock, name, kind) for name, kind in TABLES]
        await self._journal(superblock, [file for file in files[:2] if file is not None])
        recoverer = Recoverer(self._blocks, superblock, self._limits_of(superblock.layout), self._clock)
        recovery = await recoverer.run(search=True)
        self._short(recovery)
        sound = self._index(superblock, recovery)
        if payload:
            await self._payloads(superblock.layout, recovery.restored.table, sound)
        return seen

    # --- superblocks ----------------------------------------------------------------------------------------

    def _judge(self, seen: Sight) -> bool:
        """Judge what kind of card it is; tell whether there is more to look at."""
        report = self.report
        match seen.kind:
            case Kind.BLANK:
                report.find("blank", "card", fsck.CODES["blank"])
            case Kind.STRANGER:
                report.find("stranger", "card", ", ".join(seen.marks))
            case Kind.DAMAGED | Kind.UNKNOWN:
                assert seen.error is not None
                report.find(seen.error.code, "superblock", str(seen.error))
            case Kind.OURS if seen.error is not None:
                report.find(seen.error.code, "superblock", str(seen.error))
                return seen.error.code != "geometry_changed"
            case Kind.OURS:
                assert seen.matched is not None
                if seen.matched.grown_bytes:
                    report.note("grown", "card", f"by {seen.matched.grown_bytes} bytes")
                if not seen.matched.identified:
                    report.note("unidentified", "card", fsck.NOTES["unidentified"])
                return True
        return False

    async def _other_copy(self, seen: Sight) -> None:
        chosen = seen.chosen
        assert chosen is not None
        if not chosen.superblock.clean:
            self.report.note("unclean", "superblock", fsck.NOTES["unclean"])
        if chosen.contested:
            self.report.find("superblock_contested", "superblock", fsck.CODES["superblock_contested"])
            return
        for copy, fault in chosen.faults.items():
            block = await self._blocks.read(chosen.superblock.layout.superblock_offsets[copy], BLOCK_BYTES)
            fsck.judge_other_copy(self.report, copy, fault, blank=is_blank(block))

    async def _heartbeat(self, superblock: Superblock) -> None:
        try:
            heartbeat_format.decode(
                await self._blocks.read(HEARTBEAT_OFFSET, BLOCK_BYTES), superblock.stamp.card_uuid
            )
        except FormatError as error:
            self.report.note("heartbeat_unreadable", "heartbeat", str(error))

    # --- tables and journal ---------------------------------------------------------------------------------

    async def _table(self, superblock: Superblock, name: str, kind: FileKind) -> FileFacts | None:
        """Read a checkpoint or a ledger; return it if it is closed."""
        where, region = name.replace("_", " "), superblock.layout.regions[name]
        try:
            facts = await sight.checkpoint_ends(self._blocks, region, superblock.stamp.card_uuid, kind)
        except FormatError as error:
            fsck.judge_table_ends(self.report, where, error)
            return None
        if facts is None:
            return None
        self.report.count("tables")
        reader = TableReader(region.length_bytes, facts)
        for index, (offset_bytes, length_bytes) in enumerate(reader.ranges()):
            length = min(length_bytes, region.length_bytes - offset_bytes)
            reader.decode(await self._blocks.read(region.offset_bytes + offset_bytes, length))
            self.report.count("chunks")
            self._progress(where, index + 1, facts.totals.chunks)
        for damage in reader.damaged:
            self.report.find("chunk_damaged", where, str(damage))
        if not reader.damaged:
            try:
                reader.finish()
            except FormatError as error:
                self.report.find("table_damaged", where, str(error))
        return facts

    async def _journal(self, superblock: Superblock, files: list[FileFacts]) -> None:
        """Read the journal from the start of the older valid checkpoint on, which is all that is kept of it."""
        stamp, region = superblock.stamp, superblock.layout.journal
        starts = [facts.identity.start for facts in files]
        start = min(starts, key=lambda point: point.position, default=None)
        if start is None:
            start = beginning(Stamp(stamp.card_uuid, 0, bytes(RUN_ID_BYTES)))
        scanner = Scanner(region.length_bytes, stamp.card_uuid, start)
        while not isinstance(event := scanner.next_event(), End):
            match event:
                case Need(offset_bytes, length_bytes):
                    scanner.feed(await self._blocks.read(region.offset_bytes + offset_bytes, length_bytes))
                case ScannedBatch():
                    self._batch(event)
                    self._progress(
                        "journal", event.header.after.position - start.position, region.length_bytes
                    )
                case Gap():
                    lost = f"records {event.first_lsn} to {event.last_lsn}: {event.reason}"
                    self.report.find("journal_gap", "journal", lost)
        fsck.judge_tail(self.report, event.reason, torn=event.tail is Tail.TORN)

    def _batch(self, batch: ScannedBatch) -> None:
        header = batch.header
        self.report.count("batches")
        try:
            records = decode_records(batch.body, header.first_lsn, header.record_count)
        except FormatError as error:
            self.report.find("journal_record", f"records {header.first_lsn} to {header.last_lsn}", str(error))
        else:
            self.report.count("records", len(records))

    # --- the index ------------------------------------------------------------------------------------------

    def _short(self, recovery: Recovery) -> None:
        reached_lsn = recovery.point.next_lsn - 1
        if reached_lsn < recovery.must_reach_lsn:
            self.report.find(
                "journal_short",
                "journal",
                f"it ends with record {reached_lsn}, and the checkpoint shows record {recovery.must_reach_lsn}",
            )

    def _index(self, superblock: Superblock, recovery: Recovery) -> list[int]:
        """Judge the rows that a start would have; return the slots of the live ones without a finding."""
        listing, table = recovery.restored.listing(), recovery.restored.table
        self.report.count("objects", int(listing.live.sum()))
        for slot in listing.slots[~listing.named].tolist():
            self.report.find("object_without_name", f"object {slot}", fsck.CODES["object_without_name"])
        for slot in listing.slots[listing.repeated].tolist():
            self.report.find("object_repeated", f"object {slot}", fsck.CODES["object_repeated"])
        slots = listing.slots.astype(np.int64)
        has = table.count_au[slots] > 0
        kept = set(listing.slots.tolist()) if table.others else set()
        extra = [(slot, e) for slot, others in table.others.items() if slot in kept for e in others]
        rows = fsck.Rows(
            slots,
            table.units(listing.slots),
            np.concatenate((slots[has], np.array([slot for slot, _ in extra], np.int64))),
            np.concatenate((table.start_au[slots[has]], [e.start_au for _, e in extra])).astype(np.int64),
            np.concatenate((table.count_au[slots[has]], [e.count_au for _, e in extra])).astype(np.int64),
        )
        bad = fsck.judge_rows(self.report, rows, superblock.layout.capacity_au)
        good = listing.slots[listing.live & listing.named]
        return [slot for slot in good[np.argsort(table.start_au[good])].tolist() if slot not in bad]

    # --- payloads -------------------------------------------------------------------------------------------

    async def _payloads(self, layout: Layout, table: SlotTable, slots: list[int]) -> None:
        transfer = Transfer(
            self._device, DataArea(layout.data.offset_bytes, layout.au_bytes, layout.block_bytes)
        )
        total_bytes = int(table.size_bytes[slots].sum(dtype=np.int64))
        done_bytes = batch_bytes = 0
        batch: list[int] = []
        for slot in [*slots, None]:
            if slot is not None:
                batch.append(slot)
                batch_bytes += int(table.size_bytes[slot])
            if batch and (slot is None or batch_bytes >= PAYLOAD_BATCH_BYTES):
                await self._batch_of_payloads(layout, table, transfer, batch)
                done_bytes += batch_bytes
                self.report.count("payload_bytes", batch_bytes)
                self._progress("payloads", done_bytes, total_bytes)
                batch, batch_bytes = [], 0

    async def _batch_of_payloads(
        self, layout: Layout, table: SlotTable, transfer: Transfer, slots: list[int]
    ) -> None:
        placed: list[Placed] = []
        for slot in slots:
            first = Extent(int(table.start_au[slot]), int(table.count_au[slot]))
            payload = memoryview(bytearray(int(table.size_bytes[slot])))
            placed.append((slot, (first, *table.others.get(slot, ())), payload))
        failures = await transfer.read(placed)
        arrived = [entry for entry in placed if entry[0] not in failures]
        sums = await checksums([payload for _, _, payload in arrived])
        self.report.count("payloads", len(placed))
        for (slot, extents, _), found in zip(arrived, sums, strict=True):
            if found != int(table.checksum[slot]):
                at = layout.data.offset_bytes + extents[0].start_au * layout.au_bytes
                detail = f"{table.size_bytes[slot]} bytes from offset {at} on"
                self.report.find("payload_damaged", f"object {slot}", detail)
        for slot, error in failures.items():
            self.report.find("payload_unreadable", f"object {slot}", str(error))
