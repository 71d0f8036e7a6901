"""The journal of a card that keeps one: group commit, one batch at a time.

    payloads written  ->  cover: a flush that they share  ->  their records submitted
    records submitted  ->  batch  ->  flush; fencing read meanwhile: is the card still ours?  ->  durable: replies

While a group is on its way, what is submitted gathers for the next one. Payloads that were written before the flush of a batch began
are covered by that flush: so under load a group costs two round trips, one for its batch and one for a flush.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.format_errors import NoRoom
from xkv_gateway.card.journal_format import Ring, encode_batch, encode_run_start
from xkv_gateway.card.record_codec import encode_batches

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.journal_format import ChainPoint, Placed
    from xkv_gateway.card.layout import Region
    from xkv_gateway.card.record_codec import BatchBody
    from xkv_gateway.card.structure import Stamp
    from xkv_gateway.core.records import Record
    from xkv_gateway.core.types import Lsn

log = logging.getLogger(__name__)

TURNS_TO_GATHER: Final = 3
"""Turns of the loop for which a group waits for company: a busy loop has the end of more writes in them, an idle one is through in microseconds."""
TURNS_TO_COMMIT: Final = 2
"""Turns of the loop from the end of a flush until the records of the stores that waited for it have been submitted."""


class JournalWriter:
    """Implements `Journal` on the ring of a card.

    Args:
        blocks: access to the card.
        region: the ring.
        stamp: of this run.
        point: the end of the journal, as it was found.
        needed_from: position of the first batch that recovery may need.
        verify: raises when the card is not ours any more; awaited before anything is acknowledged.
        flush: whether records, and the payloads before them, must survive a loss of power (durability "power").
    """

    def __init__(
        self,
        blocks: CardBlocks,
        region: Region,
        stamp: Stamp,
        point: ChainPoint,
        needed_from: int,
        verify: Callable[[], Awaitable[None]],
        *,
        flush: bool,
    ) -> None:
        self._blocks = blocks
        self._region = region
        self._stamp = stamp
        self._ring = Ring(region.length_bytes)
        self._needed_from = needed_from
        self._verify = verify
        self._flush = flush
        self._pending: list[Record] = []
        self._pending_lsn: Lsn | None = None
        self._covers: list[Callable[[], None]] = []
        """Who waits for a flush that has not begun."""
        self._covered: list[Callable[[], None]] = []
        """Who waits for the flush that has begun."""
        self._durable: Callable[[Lsn], None] | None = None
        self._look: asyncio.Task[None] | None = None
        """The fencing read of the group that is on its way."""
        self._work = asyncio.Event()
        self._moved = asyncio.Condition()
        self._written = point
        self.acknowledged = point
        """The end of what is durable and was told to the engine: a checkpoint starts here."""
        self.batches = 0
        self.batch_bytes = 0

    # --- for the store --------------------------------------------------------------------------------------

    def submit(self, records: Sequence[Record], last_lsn: Lsn, durable: Callable[[Lsn], None]) -> None:
        """See `Journal.submit`."""
        self._pending += records
        self._pending_lsn, self._durable = last_lsn, durable
        self._work.set()

    def cover(self, done: Callable[[], None]) -> None:
        """See `Journal.cover`."""
        if self._flush:
            self._covers.append(done)
            self._work.set()
        else:
            asyncio.get_running_loop().call_soon(done)

    @property
    def free_bytes(self) -> int:
        """What can be written before a checkpoint must be completed."""
        return self._ring.free_bytes(self._written.position, self._needed_from)

    @property
    def kept_bytes(self) -> int:
        """What recovery would read."""
        return self._written.position - self._needed_from

    @property
    def ring_bytes(self) -> int:
        """Length of the ring."""
        return self._ring.ring_bytes

    # --- for the checkpointer -------------------------------------------------------------------------------

    async def release(self, needed_from: int | None) -> None:
        """A checkpoint was completed: recovery needs the journal from this position on (None: from where it did)."""
        if needed_from is not None:
            assert needed_from >= self._needed_from
            self._needed_from = needed_from
        async with self._moved:
            self._moved.notify_all()

    async def changed(self) -> None:
        """Return when the journal has grown, or room was made in it."""
        async with self._moved:
            await self._moved.wait()

    async def reached(self, lsn: int) -> None:
        """Return once all records up to `lsn` are durable."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.acknowledged.next_lsn > lsn)

    # --- the writer -----------------------------------------------------------------------------------------

    async def start_run(self) -> None:
        """Write the run start: from here on, whatever the run before left behind, or still writes there, is superseded."""
        await self._write(encode_run_start(self._ring, self._written, self._stamp, self._needed_from))
        self.acknowledged = self._written

    async def run(self) -> None:
        """Write what is submitted, for ever.

        Raises:
            CardFailed: the controller refuses.
            CardLost: the card is not ours any more.
        """
        try:
            while True:
                if not self._pending and not self._covers:
                    self._work.clear()
                    await self._work.wait()
                await _turns(TURNS_TO_GATHER)
                if self._pending:
                    await self._commit_pending()
                else:
                    self._take_covers()
                    await self._blocks.flush()
                    await self._tell_covered()
        finally:
            self._look_no_more()

    def _take_covers(self) -> None:
        """A flush begins now."""
        self._covered += self._covers
        self._covers = []

    async def _tell_covered(self) -> None:
        """A flush has ended. Who waited for it commits at once, for the next group: that is better than a flush for the others first."""
        covered, self._covered = self._covered, []
        for done in covered:
            done()
        await _turns(TURNS_TO_COMMIT if covered else 0)

    async def _commit_pending(self) -> None:
        records, self._pending = self._pending, []
        lsn, durable = self._pending_lsn, self._durable
        assert lsn is not None
        assert durable is not None
        await self._commit(records)
        self.acknowledged = self._written
        durable(lsn)
        async with self._moved:
            self._moved.notify_all()

    async def _commit(self, records: Sequence[Record]) -> None:
        for body in encode_batches(records, self._ring.body_bytes_max):
            await self._write(await self._place(body), self._batch_written)
            await self._tell_covered()
        assert self._look is not None
        await self._look
        self._look = None

    def _batch_written(self) -> None:
        """Note whose payloads the flush of the batch covers as well, and begin the fencing read.

        Whoever takes the card writes its superblocks before it reads the journal. So who reads a superblock of its own after its batch
        was written, though not flushed, knows that the batch will be found; what makes it survive a loss of power is the flush.
        """
        self._take_covers()
        self._look_no_more()
        self._look = asyncio.ensure_future(self._verify())

    def _look_no_more(self) -> None:
        look, self._look = self._look, None
        if look is not None and not look.cancel() and not look.cancelled():
            look.exception()  # whoever ends, or looks again, knows enough

    async def _place(self, body: BatchBody) -> Placed:
        """Encode a batch; while the ring is full, wait for the checkpoint that makes room."""
        while True:
            try:
                return encode_batch(self._ring, self._written, self._stamp, self._needed_from, body)
            except NoRoom:
                log.warning("the journal is full: waiting for a checkpoint")
            await self._released_beyond(self._needed_from)

    async def _released_beyond(self, position: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._needed_from > position)

    async def _write(self, placed: Placed, written: Callable[[], None] | None = None) -> None:
        buffers = [buffer for buffer in placed.buffers if buffer]
        offset_bytes = self._region.offset_bytes + placed.offset_bytes
        await self._blocks.write(offset_bytes, buffers, flush=self._flush, written=written)
        self._written = placed.after
        self.batches += 1
        self.batch_bytes += placed.total_bytes


async def _turns(count: int) -> None:
    """Let the loop go on for so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)
