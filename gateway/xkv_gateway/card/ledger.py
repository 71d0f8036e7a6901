"""The ledgers: tenants and wipes, whole, alternately in A and B, so that damage never takes a quota away or brings wiped data back.

A ledger is a small table file. It is written anew for each group of changes, into the region that does not hold the newest one, when
the records of these changes are durable in the journal; only then is a change acknowledged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.ledger_format import TenantTable, WipeRow, tenant_columns, wipe_columns, wipes_of
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.table_file import FileIdentity, FileKind, TableWriter
from xkv_gateway.card.table_read import TableReader, by_age, decode_ends
from xkv_gateway.card.tables import QUOTAS, WIPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.journal_format import ChainPoint
    from xkv_gateway.card.layout import Layout, Region
    from xkv_gateway.card.structure import Stamp
    from xkv_gateway.card.table_read import FileFacts
    from xkv_gateway.core.tenancy import TenantRow, TtlRow

log = logging.getLogger(__name__)

BENIGN = frozenset({"incomplete", "foreign_card"})
"""What a run that ended while it wrote a ledger leaves behind, or what was there before the card was formatted."""


@dataclass(slots=True)
class LedgerReading:
    """What the ledgers of a card say."""

    tenants: TenantTable = field(default_factory=TenantTable)
    wipes: dict[int, WipeRow] = field(default_factory=dict)
    """By LSN."""
    newest_in: int = 1
    """Region of the newest closed one (0: A, 1: B): the next one goes to the other."""
    sequence_max: int = 0
    epoch_max: int = 0
    certain: bool = True
    """Whether the newest ledger that was ever closed was read, and was whole: then nothing that was acknowledged is missing."""
    damage: list[str] = field(default_factory=list)
    """One sentence for each thing that was damaged, for the operator."""


def regions_of(layout: Layout) -> tuple[Region, Region]:
    """Return A and B."""
    return layout.ledger_a, layout.ledger_b


async def read_ledgers(blocks: CardBlocks, layout: Layout, card_uuid: bytes) -> LedgerReading:
    """Read the newest ledger; where it is damaged, what is left of it and the older one together.

    Raises:
        DeviceError: the card could not be read; nothing is known then.
    """
    reading = LedgerReading()
    files: list[FileFacts | None] = []
    for name, region in zip("AB", regions_of(layout), strict=True):
        try:
            files.append(await _ends(blocks, region, card_uuid))
        except FormatError as error:
            log.info("ledger %s is not usable: %s", name, error)
            if error.code not in BENIGN:
                # Whether it was the newest one nobody can tell any more.
                reading.certain = False
                reading.damage.append(f"ledger {name}: {error}")
            files.append(None)
    known = [facts.identity for facts in files if facts is not None]
    reading.sequence_max = max((identity.sequence for identity in known), default=0)
    reading.epoch_max = max((identity.stamp.epoch for identity in known), default=0)
    for age, place in enumerate(by_age(files)):
        facts = files[place]
        assert facts is not None
        if age == 0:
            reading.newest_in = place
        elif reading.certain:
            break
        if not await _read(blocks, regions_of(layout)[place], facts, reading, "AB"[place]):
            reading.certain = False
    return reading


async def _ends(blocks: CardBlocks, region: Region, card_uuid: bytes) -> FileFacts | None:
    header = await blocks.read(region.offset_bytes, BLOCK_BYTES)
    closing = await blocks.read(region.end_bytes - BLOCK_BYTES, BLOCK_BYTES)
    return decode_ends(
        header, closing, region_bytes=region.length_bytes, card_uuid=card_uuid, kind=FileKind.LEDGER
    )


async def _read(
    blocks: CardBlocks, region: Region, facts: FileFacts, reading: LedgerReading, name: str
) -> bool:
    """Add one ledger to the reading; tell whether it was whole."""
    reader = TableReader(region.length_bytes, facts)
    refused = 0
    for offset_bytes, length_bytes in reader.ranges():
        length = min(length_bytes, region.length_bytes - offset_bytes)
        chunk = reader.decode(await blocks.read(region.offset_bytes + offset_bytes, length))
        if chunk is not None and chunk.table is QUOTAS:
            before = reading.tenants.refused
            reading.tenants.add(chunk.columns)
            refused += reading.tenants.refused - before
        elif chunk is not None and chunk.table is WIPES:
            wipes, strange = wipes_of(chunk.columns)
            refused += strange
            for wipe in wipes:
                reading.wipes.setdefault(wipe.lsn, wipe)
    try:
        reader.finish()
    except FormatError as error:
        reading.damage.append(f"ledger {name}: {error}")
        log.warning("ledger %s is damaged: %s", name, error)
        return False
    if refused:
        reading.damage.append(f"ledger {name}: {refused} rows that cannot be")
    return not refused


class LedgerWriter:
    """Writes the ledgers of one run, one at a time.

    Args:
        blocks: access to the card.
        layout: of the card.
        stamp: of this run.
        reading: what was found.
    """

    def __init__(self, blocks: CardBlocks, layout: Layout, stamp: Stamp, reading: LedgerReading) -> None:
        self._blocks = blocks
        self._regions = regions_of(layout)
        self._stamp = stamp
        self._sequence = reading.sequence_max
        self._newest_in = reading.newest_in
        self.written = 0

    async def write(
        self,
        start: ChainPoint,
        end_lsn: int,
        tenants: Sequence[TenantRow],
        wipes: Sequence[WipeRow],
        ttls: Sequence[TtlRow],
        *,
        known: bool,
        known_lsn: int,
    ) -> None:
        """Write a ledger; durable when this returns.

        Args:
            start: the end of the journal.
            end_lsn: the last record that any row may show; durable.
            tenants: all rows, those of tenants that were taken out included.
            wipes: all that must not be forgotten.
            ttls: all rules on lifetimes, those that were taken away included.
            known: whether the tenants are known to be complete.
            known_lsn: the record that says so; 0: none ever did.

        Raises:
            NoRoom: too many rows. The caller counted them.
            CardFailed: the controller refuses.
        """
        place = 1 - self._newest_in
        region = self._regions[place]
        self._sequence += 1
        writer = TableWriter(
            region.length_bytes, FileIdentity(self._stamp, FileKind.LEDGER, self._sequence, start)
        )
        draft = self._blocks.draft()
        for piece in writer.open_pieces():
            await draft.write(region.offset_bytes + piece.offset_bytes, piece.data)
        await draft.flush()
        columns = tenant_columns(tenants, ttls, known=known, known_lsn=known_lsn)
        for piece in (*writer.chunks(WIPES, wipe_columns(wipes)), *writer.chunks(QUOTAS, columns)):
            await draft.write(region.offset_bytes + piece.offset_bytes, piece.data)
        await draft.flush()
        closing = writer.close(end_lsn)
        await self._blocks.write(region.offset_bytes + closing.offset_bytes, [closing.data], flush=True)
        self._newest_in = place
        self.written += 1
