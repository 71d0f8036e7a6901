"""Checkpoints in the background: the index written as whole arrays, alternately to A and B, while the service goes on.

start point  =  end of what the journal has acknowledged: every row shows at least that
header, closing block zeroed, flush      the older checkpoint ends here
rows of SLOTS_PER_TURN slots, names      other requests run in between
flush; journal durable up to what any row may show; flush
closing block, flush                     the new checkpoint begins here
the journal is needed from the start of the older of the two on
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_gateway.card.format_errors import NoRoom
from xkv_gateway.card.ledger_format import tenant_columns
from xkv_gateway.card.table_file import FileIdentity, FileKind, TableWriter
from xkv_gateway.card.tables import (
    CLOCK,
    EXTENTS,
    LIVES,
    NAMESPACE_BYTES_MAX,
    NAMESPACES,
    OBJECTS,
    QUOTAS,
    SCOPE_BYTES_MAX,
    SCOPES,
    pack_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from xkv_gateway.card.blocks import CardBlocks, Draft
    from xkv_gateway.card.journal_format import ChainPoint
    from xkv_gateway.card.layout import Region
    from xkv_gateway.card.structure import Stamp
    from xkv_gateway.card.table_file import Piece
    from xkv_gateway.card.tables import Columns, Table
    from xkv_gateway.card.writer import JournalWriter
    from xkv_gateway.core.engine import Engine
    from xkv_gateway.core.image import NamesImage

log = logging.getLogger(__name__)

SLOTS_PER_TURN: Final = 1 << 15
"""Rows are gathered in parts of this: about two milliseconds each."""
JOURNAL_SHARE: Final = 8
"""A checkpoint begins when the journal has grown by this part (1/8) of its ring since the last one began."""
BATCHES_MAX: Final = 1 << 15
"""... or by so many batches, each of which takes time to replay, however small it is."""
ATTEMPTS_MAX: Final = 3


class Checkpointer:
    """Writes the checkpoints of one run.

    Args:
        blocks: access to the card.
        regions: A and B.
        stamp: of this run.
        engine: whose index it is.
        journal: that index's journal.
        clock: monotonic ns.
        newest: the largest sequence of any checkpoint, and the region of the newest valid one.
        starts: where in the journal each region's valid checkpoint starts, None where it has none.
    """

    def __init__(
        self,
        blocks: CardBlocks,
        regions: tuple[Region, Region],
        stamp: Stamp,
        engine: Engine,
        journal: JournalWriter,
        clock: Callable[[], int],
        newest: tuple[int, int],
        starts: tuple[ChainPoint | None, ChainPoint | None],
    ) -> None:
        self._blocks = blocks
        self._regions = regions
        self._stamp = stamp
        self._engine = engine
        self._journal = journal
        self._clock = clock
        self._sequence, self._newest_in = newest
        self._starts = list(starts)
        self._last_start = journal.acknowledged
        self._wanted = asyncio.Event()
        self._lock = asyncio.Lock()
        self.completed = 0
        self.last_objects = 0
        self.last_bytes = 0

    def look(self, *, pressed: bool) -> None:
        """Begin a checkpoint if the journal has grown enough; called when it has grown, or room was made in it.

        Args:
            pressed: what is left of the ring is too little for new stores, whichever run has filled it.
        """
        end, start = self._journal.acknowledged, self._last_start
        grown_bytes, grown_batches = end.position - start.position, end.number - start.number
        if grown_bytes >= self._journal.ring_bytes // JOURNAL_SHARE or grown_batches >= BATCHES_MAX:
            self._wanted.set()
        # Two in a row make room for certain: the journal is kept from the start of the older one on.
        if pressed and self._journal.kept_bytes:
            self._wanted.set()

    async def run(self) -> None:
        """Write a checkpoint whenever one is wanted, for ever. Raises CardFailed."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.write()

    async def write(self, *, of_what_is_durable: bool = False) -> None:
        """Write a checkpoint now.

        Args:
            of_what_is_durable: nothing runs beside it and nothing was stored since recovery (what the engine recorded
                since then, it may record again): do not wait for the journal.

        Raises:
            CardFailed: the controller refuses.
        """
        async with self._lock:
            for _ in range(ATTEMPTS_MAX):
                try:
                    await self._write(of_what_is_durable=of_what_is_durable)
                except NoRoom:
                    # So much changed while it was written that rows were seen twice too often.
                    log.info("the checkpoint outgrew its region and is written anew")
                else:
                    return
            raise AssertionError("a checkpoint that never fits: the regions are sized for any index")

    async def _write(self, *, of_what_is_durable: bool) -> None:
        start = self._journal.acknowledged
        self._last_start = start
        place = 1 - self._newest_in
        region = self._regions[place]
        self._sequence += 1
        writer = TableWriter(
            region.length_bytes, FileIdentity(self._stamp, FileKind.CHECKPOINT, self._sequence, start)
        )
        self._starts[place] = None
        draft = self._blocks.draft()
        for piece in writer.open_pieces():
            await _put(draft, region, piece)
        await draft.flush()
        objects = written = 0
        for table, columns in self._rows():
            objects += len(columns["slot"]) if table is OBJECTS else 0
            for piece in writer.chunks(table, columns):
                await _put(draft, region, piece)
                written += len(piece.data)
        written += await self._put_lives(draft, region, writer)
        image = self._engine.image
        end_lsn = start.next_lsn - 1 if of_what_is_durable else self._engine.last_lsn
        closing = writer.close(end_lsn, image.used_stamp_max, image.generation_max())
        await self._journal.reached(end_lsn)
        await draft.flush()
        await self._blocks.write(region.offset_bytes + closing.offset_bytes, [closing.data], flush=True)
        self._newest_in = place
        self._starts[place] = start
        self.completed += 1
        self.last_objects, self.last_bytes = objects, written
        await self._release(forced=of_what_is_durable)
        log.info("checkpoint %d: %d objects, %d bytes", self._sequence, objects, written)

    async def _put_lives(self, draft: Draft, region: Region, writer: TableWriter) -> int:
        """Write when objects were stored and used, as far as there is room; returns the bytes.

        The region is sized for cards on which each object has a namespace and a scope of its own, without these times. So
        only such a card lacks room: what is left out counts as stored when the next run begins.
        """
        written = 0
        for columns in self._lives():
            try:
                for piece in writer.chunks(LIVES, columns):
                    await _put(draft, region, piece)
                    written += len(piece.data)
            except NoRoom:
                log.warning("the checkpoint has no room for the times of all objects")
                break
        return written

    async def _release(self, *, forced: bool) -> None:
        """Give up the journal before the older checkpoint. While there is only one, nothing could replace it but the journal."""
        starts = [each for each in self._starts if each is not None]
        enough = forced or len(starts) == len(self._starts)
        await self._journal.release(min(start.position for start in starts) if enough else None)

    @property
    def settled_lsn(self) -> int:
        """No record before this one is ever replayed: both checkpoints begin there, or later. 0: there are not two."""
        starts = [each for each in self._starts if each is not None]
        return min(start.next_lsn for start in starts) if len(starts) == len(self._starts) else 0

    def want(self) -> None:
        """Have a checkpoint written soon."""
        self._wanted.set()

    def _rows(self) -> Iterator[tuple[Table, Columns]]:
        """Yield the rows, part by part; each is gathered when it is asked for."""
        image = self._engine.image
        yield CLOCK, image.clock()
        first = 0
        while first < image.slots_used:
            last = min(first + SLOTS_PER_TURN, image.slots_used)
            objects, extents = image.rows(first, last, self._clock())
            yield OBJECTS, objects
            yield EXTENTS, extents
            first = last
        yield from _name_tables(image.names())
        rows, known, known_lsn = image.tenants()
        yield QUOTAS, tenant_columns(rows, image.ttls(), known=known, known_lsn=known_lsn)

    def _lives(self) -> Iterator[Columns]:
        image = self._engine.image
        for first in range(0, image.slots_used, SLOTS_PER_TURN):
            yield image.lives(first, min(first + SLOTS_PER_TURN, image.slots_used))


async def _put(draft: Draft, region: Region, piece: Piece) -> None:
    await draft.write(region.offset_bytes + piece.offset_bytes, piece.data)


def _name_tables(names: NamesImage) -> Iterator[tuple[Table, Columns]]:
    texts = {ident: name.encode() for ident, name in names.namespaces.items()}
    yield NAMESPACES, _names(texts, NAMESPACE_BYTES_MAX)
    yield SCOPES, _names(names.scopes, SCOPE_BYTES_MAX)


def _names(names: dict[int, bytes], width_bytes: int) -> Columns:
    column, lengths = pack_names(list(names.values()), width_bytes)
    return {"ident": _idents(names), "name": column, "name_bytes": lengths}


def _idents(names: dict[int, bytes]) -> npt.NDArray[np.uint32]:
    return np.fromiter(names, np.uint32, len(names))
