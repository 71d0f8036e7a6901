"""Reads the index back: the newest whole checkpoint, then the journal from its start on. Nothing is written.

both checkpoints' ends  ->  newest closed one, chunk by chunk  ->  (damaged: the older one)  ->  journal, batch by batch
                        ->  what is left goes into a new engine
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.journal_format import ChainPoint, beginning
from xkv_gateway.card.journal_scan import End, Gap, Need, ScannedBatch, Scanner
from xkv_gateway.card.ledger import LedgerReading, read_ledgers
from xkv_gateway.card.ledger_format import TenantTable
from xkv_gateway.card.record_codec import decode_records
from xkv_gateway.card.structure import BLOCK_BYTES, Stamp
from xkv_gateway.card.table_file import FileKind
from xkv_gateway.card.table_read import FileFacts, TableReader, by_age, decode_ends
from xkv_gateway.card.tables import CLOCK, EXTENTS, LIVES, NAMESPACES, OBJECTS, QUOTAS, SCOPES, unpack_names
from xkv_gateway.core.lifetimes import NS_PER_S, resumed_s
from xkv_gateway.core.records import PutBatch
from xkv_gateway.core.restore import Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.layout import Region
    from xkv_gateway.card.ledger_format import WipeRow
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.card.table_read import Chunk
    from xkv_gateway.card.tables import Columns
    from xkv_gateway.core.types import EngineLimits

log = logging.getLogger(__name__)

_T = TypeVar("_T")

OBJECTS_AT_ONCE: Final = 200_000
"""An index of fewer objects is made in a turn of the loop."""
CLOCKS_DIFFER_S: Final = 60
"""By so much two clocks may disagree unnoticed."""


@dataclass(slots=True)
class Recovery:
    """What was found, and what goes on from here."""

    restored: Restored
    point: ChainPoint
    """The end of the journal."""
    needed_from: int
    """Position from which on the journal must be kept: the start of the older valid checkpoint."""
    newest_in: int = 1
    """Region of the newest valid checkpoint (0: A, 1: B): the next one goes to the other."""
    sequence_max: int = 0
    """Of all checkpoints, valid or not."""
    starts: list[ChainPoint | None] = field(default_factory=lambda: [None, None])
    """Where in the journal each valid checkpoint begins."""
    epoch_max: int = 0
    checkpoint_objects: int = 0
    journal_batches: int = 0
    journal_bytes: int = 0
    damage: list[str] = field(default_factory=list)
    """One sentence for each thing that was damaged, for the operator."""
    must_reach_lsn: int = 0
    """The last record that a row of the checkpoint may show."""
    ledger: LedgerReading = field(default_factory=LedgerReading)
    lost_wipes: list[WipeRow] = field(default_factory=list)
    """Wipes that the ledger knows, and the journal cannot be trusted to have told."""
    tenants_in_doubt: bool = False
    """Tenants may be missing: neither a ledger nor the index is whole."""
    objects: int = 0
    duration_ns: int = 0

    def lose(self, first_lsn: int, last_lsn: int, reason: str) -> None:
        """Note that records are lost."""
        self.restored.note_damage()
        self.damage.append(f"journal: records {first_lsn} to {last_lsn} are lost: {reason}")
        self._wipe(wipe for lsn, wipe in self.ledger.wipes.items() if first_lsn <= lsn <= last_lsn)

    def finish(self, reached_lsn: int) -> None:
        """Tell where the journal ends: what only the ledger knows comes on top of it."""
        self.restored.end(reached_lsn)
        self._wipe(wipe for lsn, wipe in self.ledger.wipes.items() if lsn > reached_lsn)
        tenants = self.ledger.tenants
        for row in tenants.rows.values():
            self.restored.add_tenant(row)
        for ttl in tenants.ttls.values():
            self.restored.times.add_ttl(ttl)
        if tenants.known_lsn:
            self.restored.note_tenants_known(tenants.known_lsn, known=tenants.known)
        self.tenants_in_doubt = self.restored.damaged and not self.ledger.certain

    @property
    def rows_beyond(self) -> bool:
        """Whether the journal may lack what the ledger says of tenants."""
        tenants = self.ledger.tenants
        lsns = [row.lsn for row in tenants.rows.values()] + [row.lsn for row in tenants.ttls.values()]
        newest = max([*lsns, self.ledger.tenants.known_lsn], default=0)
        return bool(lsns) and (self.restored.damaged or newest > self.restored.last_lsn)

    def resumed_s(self, wall_ns: int) -> int:
        """Return the card time with which the next run begins, on a host whose clock says this."""
        before_s, wall_s = self.restored.times.time_s, wall_ns // NS_PER_S
        time_s = resumed_s(before_s, wall_s)
        if before_s and abs(time_s - wall_s) > CLOCKS_DIFFER_S:
            away_s, counted_s = wall_s - before_s, time_s - before_s
            log.warning(
                "by this host's clock the card was away for %d s: for lifetimes %d s are counted",
                away_s,
                counted_s,
            )
        return time_s

    def _wipe(self, wipes: Iterable[WipeRow]) -> None:
        for wipe in wipes:
            if wipe not in self.lost_wipes:
                self.lost_wipes.append(wipe)
                self.restored.wipe(wipe.namespace, wipe.scope)


class Recoverer:
    """Recovers the index of one card."""

    def __init__(
        self, blocks: CardBlocks, superblock: Superblock, limits: EngineLimits, clock: Callable[[], int]
    ) -> None:
        self._blocks = blocks
        self._superblock = superblock
        self._layout = superblock.layout
        self._limits = limits
        self._clock = clock
        self._ledger = LedgerReading()

    async def run(self, *, search: bool) -> Recovery:
        """Read everything.

        Args:
            search: whether to look for damage behind the end of the journal; not needed after a clean stop.

        Raises:
            DeviceError: the card could not be read; nothing is known then.
        """
        began_ns = self._clock()
        self._ledger = await read_ledgers(self._blocks, self._layout, self._superblock.stamp.card_uuid)
        files, damage = await self._files()
        known = [facts.identity for facts in files if facts is not None]
        epoch = max((identity.stamp.epoch for identity in known), default=0)
        epoch = max(epoch, self._ledger.epoch_max)
        sequence = max((identity.sequence for identity in known), default=0)
        recovery = await self._newest_whole(files, damage)
        recovery.damage = [*self._ledger.damage, *damage]
        recovery.ledger = self._ledger
        recovery.epoch_max, recovery.sequence_max = max(self._superblock.stamp.epoch, epoch), sequence
        self._note_files(recovery, files)
        await self._replay(recovery, search=search)
        if search:
            recovery.restored.times.note_uses_lost()
        recovery.objects = recovery.restored.live_objects
        recovery.duration_ns = self._clock() - began_ns
        return recovery

    async def _newest_whole(self, files: list[FileFacts | None], damage: list[str]) -> Recovery:
        """Load the newest whole checkpoint; damaged ones are taken out of `files`."""
        ages = by_age(files)
        newest = files[ages[0]] if ages else None
        for place in ages:
            facts = files[place]
            assert facts is not None
            recovery, whole = await self._from_checkpoint(place, facts, damage)
            if whole:
                return recovery
            files[place] = None
        if newest is not None:
            recovery, _ = await self._from_checkpoint(ages[0], newest, [])
        else:
            point = beginning(self._formatted_by())
            recovery = Recovery(Restored(self._limits, self._clock()), point, point.position)
        if damage:
            # Rows are lost, or the journal may no longer reach back to the beginning. What there is, is still true.
            recovery.restored.note_damage()
        return recovery

    def _formatted_by(self) -> Stamp:
        stamp = self._superblock.stamp
        return Stamp(stamp.card_uuid, 0, bytes(len(stamp.run_id)))

    # --- checkpoints ----------------------------------------------------------------------------------------

    def _regions(self) -> tuple[Region, Region]:
        return self._layout.checkpoint_a, self._layout.checkpoint_b

    async def _files(self) -> tuple[list[FileFacts | None], list[str]]:
        files: list[FileFacts | None] = []
        damage: list[str] = []
        for name, region in zip("AB", self._regions(), strict=True):
            header = await self._blocks.read(region.offset_bytes, BLOCK_BYTES)
            closing = await self._blocks.read(region.end_bytes - BLOCK_BYTES, BLOCK_BYTES)
            try:
                facts = decode_ends(
                    header,
                    closing,
                    region_bytes=region.length_bytes,
                    card_uuid=self._superblock.stamp.card_uuid,
                    kind=FileKind.CHECKPOINT,
                )
            except FormatError as error:
                # Also the ordinary trace of a run that ended while it wrote a checkpoint.
                log.info("checkpoint %s is not usable: %s", name, error)
                if error.code not in {"incomplete", "foreign_card"}:
                    damage.append(f"checkpoint {name}: {error}")
                facts = None
            files.append(facts)
        return files, damage

    async def _from_checkpoint(
        self, place: int, facts: FileFacts, damage: list[str]
    ) -> tuple[Recovery, bool]:
        """Read a checkpoint; tell whether it was whole."""
        region = self._regions()[place]
        reader = TableReader(region.length_bytes, facts)
        restored = Restored(self._limits, self._clock())
        start, totals = facts.identity.start, facts.totals
        restored.begin(start.next_lsn, totals.used_stamp_max, totals.generation_max)
        for offset_bytes, length_bytes in reader.ranges():
            length = min(length_bytes, region.length_bytes - offset_bytes)
            chunk = reader.decode(await self._blocks.read(region.offset_bytes + offset_bytes, length))
            if chunk is not None:
                _add(restored, chunk)
        recovery = Recovery(restored, start, start.position, checkpoint_objects=restored.live_objects)
        recovery.must_reach_lsn = totals.end_lsn
        try:
            reader.finish()
        except FormatError as error:
            damage.append(f"checkpoint {'AB'[place]}: {error}")
            log.warning("checkpoint %s is damaged: %s", "AB"[place], error)
            return recovery, False
        return recovery, True

    @staticmethod
    def _note_files(recovery: Recovery, files: list[FileFacts | None]) -> None:
        """Keep what is valid valid: the journal is needed from the start of the older checkpoint on."""
        ages = by_age(files)
        for place in ages:
            facts = files[place]
            assert facts is not None
            recovery.starts[place] = facts.identity.start
        if ages:
            recovery.newest_in = ages[0]
        known = [start.position for start in recovery.starts if start is not None]
        recovery.needed_from = min([recovery.needed_from, *known])

    # --- journal --------------------------------------------------------------------------------------------

    async def _replay(self, recovery: Recovery, *, search: bool) -> None:
        region, card_uuid = self._layout.journal, self._superblock.stamp.card_uuid
        scanner = Scanner(region.length_bytes, card_uuid, recovery.point, search=search)
        while not isinstance(event := scanner.next_event(), End):
            match event:
                case Need(offset_bytes, length_bytes):
                    scanner.feed(await self._blocks.read(region.offset_bytes + offset_bytes, length_bytes))
                case ScannedBatch():
                    self._apply(recovery, event)
                case Gap():
                    recovery.lose(event.first_lsn, event.last_lsn, str(event.reason))
        recovery.point = event.point
        reached_lsn = recovery.point.next_lsn - 1
        if reached_lsn < recovery.must_reach_lsn:
            recovery.lose(
                reached_lsn + 1, recovery.must_reach_lsn, "the journal ends before the checkpoint does"
            )
        recovery.finish(reached_lsn)

    def _apply(self, recovery: Recovery, batch: ScannedBatch) -> None:
        header = batch.header
        recovery.epoch_max = max(recovery.epoch_max, header.stamp.epoch)
        recovery.journal_batches += 1
        recovery.journal_bytes += header.total_bytes
        try:
            records = decode_records(batch.body, header.first_lsn, header.record_count)
        except FormatError as error:
            recovery.lose(header.first_lsn, header.last_lsn, str(error))
            return
        for record in records:
            if isinstance(record, PutBatch) and int(record.slots.max(initial=0)) >= self._limits.max_objects:
                recovery.lose(record.lsn, record.lsn, "objects beyond the object limit")
            else:
                recovery.restored.apply(record)


async def made_of(recovery: Recovery, make: Callable[[], _T]) -> _T:
    """Return what `make` makes of all that was read. Millions of objects take seconds: a thread does it, and the card stays attached."""
    if recovery.objects < OBJECTS_AT_ONCE:
        return make()
    return await asyncio.to_thread(make)


def _add(restored: Restored, chunk: Chunk) -> None:
    columns = chunk.columns
    if chunk.table is OBJECTS:
        restored.add_objects(columns)
    elif chunk.table is EXTENTS:
        restored.add_extents(columns)
    elif chunk.table is LIVES:
        restored.times.add_lives(columns)
    elif chunk.table is CLOCK:
        restored.times.add_clock(columns)
    elif chunk.table is QUOTAS:
        _add_tenants(restored, columns)
    elif chunk.table in {NAMESPACES, SCOPES}:
        names = unpack_names(columns["name"], columns["name_bytes"])
        named = dict(zip(columns["ident"].tolist(), names, strict=True))
        if chunk.table is SCOPES:
            restored.add_names({}, named)
        else:
            restored.add_names(_decoded(named), {})


def _add_tenants(restored: Restored, columns: Columns) -> None:
    table = TenantTable()
    table.add(columns)
    for row in table.rows.values():
        restored.add_tenant(row)
    for ttl in table.ttls.values():
        restored.times.add_ttl(ttl)
    if table.known_lsn:
        restored.note_tenants_known(table.known_lsn, known=table.known)
    if table.refused:
        restored.note_damage()


def _decoded(names: dict[int, bytes]) -> dict[int, str]:
    """Return the names that are UTF-8; objects under another one are dropped with it."""
    decoded: dict[int, str] = {}
    for ident, name in names.items():
        with contextlib.suppress(UnicodeDecodeError):
            decoded[ident] = name.decode()
    return decoded
