"""Stores: room reserved, payloads written and flushed, then committed; acknowledged once the record is durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_gateway.card.checksum import checksums
from xkv_gateway.card.transfer import settles_at_ns
from xkv_gateway.core.types import NO_LSN, BeginStore, StoreOutcome, StoreStatus, WritePlan
from xkv_nvmeof.blockdev import ReservationConflict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.card.store import CardStore

DURABLE_WAIT_NS = 15_000_000_000
"""How long an acknowledgement may wait for the journal, beyond the time that a short absence of the card takes."""
WRITES_MAX = 4
"""So often payloads are written, where the target may have lost its power each time before they were flushed."""
CANCELLED_WRITE_HOLD_NS = 60_000_000_000
"""How long the space of a write that was given up in the middle stays out of use (longer than any association lives on)."""


class Save:
    """One admitted store. Admission is synchronous, so that what arrives later takes effect later.

    Args:
        store: the card store.
        request: keys and sizes.
        payloads: one buffer a key, of exactly its size. They belong to the store until `run` ends.
        deadline_ns: what found no room by then is `no_space`.

    Raises:
        CardOffline, CardRecovering: nothing was reserved.
    """

    def __init__(
        self, store: CardStore, request: BeginStore, payloads: Sequence[memoryview], deadline_ns: int
    ) -> None:
        store.require_writable()
        self._store = store
        self._request = request
        self._payloads = payloads
        self._deadline_ns = deadline_ns
        self._results: list[StoreStatus | None] = [None] * len(payloads)
        self._written: list[WritePlan] = []
        """What of this batch has been stored: the rest of it must not evict that."""
        self._outcome = self._admit(request)
        store.save_begins()

    async def run(self) -> list[StoreStatus]:
        """Write and commit. Returns one status a key; never raises but when cancelled."""
        try:
            return await self._run()
        finally:
            self._store.save_ended()

    async def _run(self) -> list[StoreStatus]:
        left = list(range(len(self._payloads)))
        while True:
            plans: dict[int, WritePlan] = {}
            waiting: list[int] = []
            for index, entry in zip(left, self._outcome.entries, strict=True):
                if isinstance(entry, WritePlan):
                    plans[index] = entry
                elif entry is None:
                    waiting.append(index)
                else:
                    self._results[index] = entry
            if plans:
                await self._write(plans)
            if not waiting:
                break
            left = waiting
            if not await self._await_room():
                for index in left:
                    self._results[index] = StoreStatus.NO_SPACE
                break
            self._admit_again(left)
        return [StoreStatus.IO_ERROR if status is None else status for status in self._results]

    def give_up(self) -> None:
        """Give the reservations back without writing, instead of `run`."""
        self._store.save_ended()
        plans = [entry for entry in self._outcome.entries if isinstance(entry, WritePlan)]
        if plans:
            self._store.engine.abort_store(plans, self._store.clock(), None)
            self._store.space_may_be_free()

    def _admit(self, request: BeginStore) -> StoreOutcome:
        if self._store.pressed:
            # The journal needs a checkpoint first: as good as no room yet.
            return StoreOutcome([None] * len(request.keys), NO_LSN)
        outcome = self._store.engine.begin_store(request, self._store.clock())
        self._store.changed()  # what was evicted for it is recorded, even if nothing else happens
        return outcome

    async def _await_room(self) -> bool:
        if not self._store.writable:
            return False
        lsn = self._outcome.wait_lsn
        if lsn == NO_LSN:
            return await self._store.room(self._deadline_ns)
        return await self._store.durable(lsn, self._deadline_ns)

    def _admit_again(self, left: Sequence[int]) -> None:
        request = BeginStore(
            self._request.namespace,
            self._request.scope,
            [self._request.keys[index] for index in left],
            [self._request.sizes_bytes[index] for index in left],
            self._written,
        )
        self._outcome = self._admit(request)

    async def _write(self, plans: dict[int, WritePlan]) -> None:
        engine = self._store.engine
        unsettled = dict(plans)
        try:
            sums = dict(zip(plans, await checksums([self._payloads[index] for index in plans]), strict=True))
            if not self._store.writable:
                # The card was away meanwhile: it may belong to another one by now. Nothing was written.
                engine.abort_store(list(unsettled.values()), self._store.clock(), None)
                unsettled.clear()
                return
            if not await self._write_durably(unsettled):
                # All writes have returned: nothing can land any more.
                engine.abort_store(list(unsettled.values()), self._store.clock(), None)
                unsettled.clear()
                return
            written = list(unsettled)
            outcome = await self._store.commits.add(
                [plans[index] for index in written], [sums[index] for index in written]
            )
            unsettled.clear()
            self._written += [plans[index] for index in written]
        finally:
            if unsettled:
                now_ns = self._store.clock()
                engine.abort_store(list(unsettled.values()), now_ns, now_ns + CANCELLED_WRITE_HOLD_NS)
            self._store.space_may_be_free()
        # Beyond the deadline it is unknown whether the records will be durable: never reported as stored.
        known = await self._store.durable(outcome.lsn, self._store.clock() + DURABLE_WAIT_NS)
        for index, status in zip(written, outcome.statuses, strict=True):
            self._results[index] = status if known else StoreStatus.IO_ERROR

    async def _write_durably(self, unsettled: dict[int, WritePlan]) -> bool:
        """Write payloads until they are durable; what fails is taken out of `unsettled` and has its result.

        A target that loses its power after a write has lost what it wrote, and the flush that comes after that covers nothing of it. So a
        flush counts for the writes of its own incarnation alone.

        Returns:
            Whether those that are left are durable.
        """
        store, device = self._store, self._store.device
        deadline_ns = store.clock() + DURABLE_WAIT_NS
        for _ in range(WRITES_MAX):
            incarnation = device.incarnation
            failures = await store.transfer.write(
                [(index, plan.extents, self._payloads[index]) for index, plan in unsettled.items()]
            )
            if any(isinstance(error, ReservationConflict) for error in failures.values()):
                store.conflicted()
            for index, error in failures.items():
                store.engine.abort_store([unsettled.pop(index)], store.clock(), settles_at_ns(error))
                self._results[index] = StoreStatus.IO_ERROR
            if not unsettled:
                return True
            if not await store.covered(deadline_ns):
                return False
            if device.incarnation == incarnation:
                return True
            if not await store.writable_by(deadline_ns):
                return False
        return False
