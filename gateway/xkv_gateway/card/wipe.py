"""Wipes on a running card: what they have done and have yet to do, and the work of erasing itself.

begun     invisible, in the engine
durable   its record is in the journal, its row in a ledger
done      all of it is erased and read back, the freed records are durable, and the ledger says so
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.administration import Verification, WipeProgress, WipeStage
from xkv_gateway.card.eraser import EraseFailed, Method
from xkv_gateway.card.ledger_format import RowStage, WipeRow
from xkv_gateway.card.store import CardOffline
from xkv_gateway.core.tenancy import WipeCounts
from xkv_gateway.core.wiping import RESUMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.eraser import Eraser
    from xkv_gateway.card.register import Register
    from xkv_gateway.card.store import CardStore

log = logging.getLogger(__name__)

OBJECTS_PER_STEP: Final = 512
BYTES_PER_STEP: Final = 32 << 20
"""Erased together, at most (but one object in any case)."""
FAILED_DELAY_S: Final = 1.0
JOBS_REMEMBERED: Final = 64


class WipeJob:
    """One wipe. Implements `administration.Wipe`.

    Args:
        row: what the ledger says of it.
        counts: what the engine says of it; those of resumed wipes are shared.
        au_bytes: of a unit.
        began_ns: monotonic.
        resumed: begun by an earlier run.
    """

    def __init__(
        self, row: WipeRow, counts: WipeCounts, au_bytes: int, began_ns: int, *, resumed: bool
    ) -> None:
        self.ident = row.lsn
        self.stage = WipeStage.DURABLE if resumed else WipeStage.BEGUN
        self.counts = counts
        self.verification = Verification.NOTHING
        self.ended_ns: int | None = None
        self._row = row
        self._au_bytes = au_bytes
        self._began_ns = began_ns
        self._resumed = resumed
        self._changed = asyncio.Condition()

    @property
    def progress(self) -> WipeProgress:
        """See `administration.Wipe`."""
        counts, au_bytes = self.counts, self._au_bytes
        return WipeProgress(
            ident=self.ident,
            namespace=self._row.namespace,
            scope=self._row.scope,
            stage=self.stage,
            objects=counts.objects,
            payload_bytes=counts.payload_bytes,
            erased_bytes=counts.erased_au * au_bytes,
            left_bytes=counts.left_au * au_bytes,
            waiting_bytes=(counts.left_au - counts.ready_au) * au_bytes,
            verification=self.verification,
            resumed=self._resumed,
            began_ns=self._began_ns,
            ended_ns=self.ended_ns,
        )

    @property
    def ended(self) -> bool:
        """Whether nothing more happens."""
        return self.stage in {WipeStage.DONE, WipeStage.FAILED}

    async def enter(self, stage: WipeStage) -> None:
        """Note how far it is."""
        async with self._changed:
            if not self.ended:
                self.stage = stage
            self._changed.notify_all()

    async def durable(self) -> None:
        """See `administration.Wipe`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.stage is not WipeStage.BEGUN)
        if self.stage is WipeStage.FAILED:
            raise CardOffline

    async def run(self) -> WipeProgress:
        """See `administration.Wipe`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended)
        return self.progress


class Wiper:
    """Carries out the wipes of one run.

    Args:
        store: the running card.
        register: its ledgers.
        eraser: of its device.
        clock: monotonic ns.
    """

    def __init__(
        self, store: CardStore, register: Register, eraser: Eraser, clock: Callable[[], int]
    ) -> None:
        self._store = store
        self._register = register
        self._eraser = eraser
        self._clock = clock
        self._work = asyncio.Event()
        self._rested = asyncio.Event()
        self._resting = False
        self.jobs: dict[int, WipeJob] = {}
        """By id, oldest first."""
        self._resume()
        store.on_wipe = self._look

    def _look(self) -> None:
        self._store.engine.wiping.news = False
        self._work.set()

    def _resume(self) -> None:
        from_before = self._store.engine.wiping.wipes.get(RESUMED)
        for row in self._register.wipes.values():
            if row.stage is RowStage.DURABLE:
                counts = from_before or self._nothing(row)
                self.jobs[row.lsn] = self._job(row, counts, resumed=True)
        if self.jobs:
            log.info("%d wipes of an earlier run go on", len(self.jobs))
        self._work.set()

    @staticmethod
    def _nothing(row: WipeRow) -> WipeCounts:
        return WipeCounts(RESUMED, row.namespace, row.scope, erase=True, scanned=True)

    def _job(self, row: WipeRow, counts: WipeCounts, *, resumed: bool) -> WipeJob:
        return WipeJob(row, counts, self._store.engine.inspection.au_bytes, self._clock(), resumed=resumed)

    def begin(self, namespace: str, scope: bytes | None) -> WipeJob:
        """Begin a wipe: invisible when this returns.

        Raises:
            TooManyTenants: there is no room for it in the ledger.
        """
        self._register.room_for_wipe()
        now_ns = self._clock()
        outcome = self._store.engine.wipe(namespace, scope, now_ns, erase=True)
        counts = outcome.counts
        row = WipeRow(counts.ident, namespace, scope, RowStage.DURABLE)
        job = self._job(row, counts, resumed=False)
        self._register.begin_wipe(counts.ident, namespace, scope)
        self._forget_some()
        self.jobs[job.ident] = job
        self._store.changed()
        return job

    def _forget_some(self) -> None:
        ended = [ident for ident, job in self.jobs.items() if job.ended]
        for ident in ended[: max(0, len(ended) - JOBS_REMEMBERED + 1)]:
            del self.jobs[ident]

    # --- the work -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry wipes out, for ever. Raises CardFailed."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                await self._make_durable()
                while not self._resting and await self._erase_some():
                    await self._make_durable()
                await self._finish()
                self._rested.set()
        finally:
            for job in self.jobs.values():
                await job.enter(WipeStage.FAILED)

    async def rest(self) -> None:
        """Begin nothing more; return when nothing of it is under way on the device."""
        self._resting = True
        self._rested.clear()
        self._work.set()
        await self._rested.wait()

    async def _make_durable(self) -> None:
        begun = [job for job in self.jobs.values() if job.stage is WipeStage.BEGUN]
        if begun:
            await self._register.saved()
            for job in begun:
                await job.enter(WipeStage.DURABLE)

    async def _erase_some(self) -> bool:
        """Erase some objects; tell whether there were any."""
        wiping = self._store.engine.wiping
        units = BYTES_PER_STEP // self._store.engine.inspection.au_bytes
        plans = wiping.take_erasable(OBJECTS_PER_STEP, max(1, units))
        if not plans:
            return False
        try:
            await self._eraser.erase(plans)
        except EraseFailed as error:
            log.warning("%s: %d wiped objects stay out of use, and it is tried again", error, len(plans))
            wiping.not_erased(plans)
            await asyncio.sleep(FAILED_DELAY_S)
            return True
        except asyncio.CancelledError:
            wiping.not_erased(plans)
            raise
        verification = (
            Verification.DEALLOCATED if self._eraser.method is Method.DEALLOCATE else Verification.ZEROED
        )
        wiping.erased(plans)
        for job in self.jobs.values():
            if not job.ended and any(plan.wipe == job.counts.ident for plan in plans):
                job.verification = verification
        self._store.space_may_be_free()
        return True

    async def _finish(self) -> None:
        """Close what is done: freed records durable, then the ledger."""
        done = [job for job in self.jobs.values() if job.counts.done and job.stage is WipeStage.DURABLE]
        if not done:
            return
        for job in done:
            self._register.end_wipe(job.ident)
        await self._register.saved()
        for job in done:
            job.ended_ns = self._clock()
            await job.enter(WipeStage.DONE)
            log.info(
                "a wipe is done: %d objects, %d bytes erased",
                job.progress.objects,
                job.progress.erased_bytes,
            )
