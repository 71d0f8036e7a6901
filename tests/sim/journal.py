"""A journal beside the simulated card: takes its time, keeps a prefix, and knows what is durable.

As a journal on the card does: payloads are flushed for whoever asks, before there is a record that names them; a batch
takes a drawn time; one batch at a time, whatever was submitted meanwhile joins the next one. After a power failure the batch
that was being written is there or is not, in whole batches and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from tests.sim.replay import RecordFault, Replay
from xkv_nvmeof.blockdev import DeviceError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.sim.device import SimDevice
    from xkv_gateway.core.records import Record
    from xkv_gateway.core.types import Lsn

    Batch = tuple[Sequence[Record], Lsn, Callable[[Lsn], None]]

RETRY_S: Final = 0.01


class SimJournal:
    """Implements `xkv_gateway.card.journal.Journal`. `blame` hears of records that do not fit together."""

    flushes = True

    def __init__(
        self, device: SimDevice, rng: random.Random, blame: Callable[[str], None], delay_ns_max: int
    ) -> None:
        self.durable = Replay()
        """What survives a power failure for certain."""
        self.latest = Replay()
        """What was submitted."""
        self._device = device
        self._rng = rng
        self._blame = blame
        self._delay_ns_max = delay_ns_max
        self._queue: list[Batch] = []
        self._covers: list[Callable[[], None]] = []
        self._being_written: list[Batch] = []
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._work(), name="journal")

    def submit(self, records: Sequence[Record], last_lsn: Lsn, durable: Callable[[Lsn], None]) -> None:
        """See `Journal.submit`."""
        try:
            self.latest.apply(records)
        except RecordFault as fault:
            self._blame(f"the records: {fault}")
        self._queue.append((records, last_lsn, durable))
        self._wake.set()

    def cover(self, done: Callable[[], None]) -> None:
        """See `Journal.cover`."""
        if self.flushes:
            self._covers.append(done)
            self._wake.set()
        else:
            done()

    def draw_survivor(self, rng: random.Random) -> Replay:
        """What a recovery would read after a power failure now."""
        survivor = self.durable.fork()
        for records, _, _ in self._being_written[: rng.randrange(len(self._being_written) + 1)]:
            survivor.apply(records)
        return survivor

    async def aclose(self) -> None:
        """Stop at once; what is not durable is lost."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            covers, self._covers = self._covers, []
            if covers:
                await self._flush()
            for done in covers:
                done()
            batches, self._queue = self._queue, []
            if not batches:
                continue
            self._being_written = batches
            await asyncio.sleep(self._rng.randrange(self._delay_ns_max + 1) / 1e9)
            self._being_written = []
            for records, _, _ in batches:
                # A record that does not fit was blamed when it was submitted.
                with contextlib.suppress(RecordFault):
                    self.durable.apply(records)
            _, last_lsn, durable = batches[-1]
            durable(last_lsn)

    async def _flush(self) -> None:
        while True:
            try:
                await self._device.flush()
            except DeviceError:
                await asyncio.sleep(RETRY_S)
            else:
                return
