"""The card store: the pure engine joined to a block device and a journal.

Every mutation of the engine happens synchronously inside one turn of the loop. What it recorded goes to the journal
as one batch at the end of that turn (group commit), and what waits for it is called when the batch is durable:

    admit (sync)  ->  I/O (async)  ->  finish (sync)  ->  end of turn: one journal batch  ->  durable: replies
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from xkv_gateway.card.transfer import Transfer
from xkv_gateway.core.types import NO_LSN, LookupMode, LookupOutcome
from xkv_nvmeof.blockdev import DeviceState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from xkv_gateway.card.journal import Journal
    from xkv_gateway.card.runs import DataArea
    from xkv_gateway.core.engine import Engine
    from xkv_gateway.core.types import BeginLoad, Delete, DeleteOutcome, LeaseId, Lookup, Lsn, ReadPlan
    from xkv_nvmeof.blockdev import BlockDevice

TICK_DELAY_MIN_NS = 1_000_000
SUSPEND_POLL_NS = 100_000_000


class CardOffline(Exception):  # noqa: N818
    """The card cannot be reached, or is not certainly ours."""


class CardRecovering(Exception):  # noqa: N818
    """Lookups and loads are served; nothing may be written yet."""


class JournalFull(Exception):  # noqa: N818
    """The journal must be relieved by a checkpoint first; that is under way."""


class Ownership(Protocol):
    """What the run that owns the card knows of it (`session.CardSession`)."""

    @property
    def readable(self) -> bool:
        """Whether lookups and loads may be answered from the index now."""
        ...

    @property
    def writable(self) -> bool:
        """Whether anything may be written."""
        ...

    @property
    def pressed(self) -> bool:
        """Whether the journal has no room for more to begin."""
        ...


class Unguarded:
    """Ownership of a card that nobody else can have, and whose journal is never full."""

    readable = True
    writable = True
    pressed = False


class CardStore:
    """Lookups, pins, leases and durability over one card. All methods are called from the loop.

    Args:
        engine: the index.
        device: the card.
        area: its data area.
        journal: where records go; None: they wait in the engine until `start_journal`.
        clock: monotonic ns.
        ownership: who knows whether the card is ours.
    """

    def __init__(
        self,
        engine: Engine,
        device: BlockDevice,
        area: DataArea,
        journal: Journal | None,
        clock: Callable[[], int],
        ownership: Ownership | None = None,
    ) -> None:
        self.engine = engine
        self.device = device
        self.transfer = Transfer(device, area)
        self.clock = clock
        self._journal = journal
        self._ownership = ownership or Unguarded()
        self._suspended = False
        self._loads = 0
        self._durable_lsn = NO_LSN
        self._waiting: list[tuple[Lsn, Callable[[], None]]] = []
        self._room: list[asyncio.Future[None]] = []
        self._turn_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        self._loop = asyncio.get_running_loop()

    # --- requests that need no I/O ------------------------------------------------------------------------

    @property
    def online(self) -> bool:
        """Whether the card can be reached now, and is certainly ours."""
        return self.device.state is DeviceState.ONLINE and self._ownership.readable and not self._suspended

    @property
    def writable(self) -> bool:
        """Whether it may also be written to."""
        return self._ownership.writable and self.online

    @property
    def pressed(self) -> bool:
        """Whether new stores must wait for the journal."""
        return self._ownership.pressed

    def lookup(self, request: Lookup) -> LookupOutcome:
        """Answer a lookup. While the card is offline everything is a miss, at once (R10)."""
        if not self.online:
            each = request.mode is LookupMode.EACH
            return LookupOutcome(0, [None] * len(request.keys) if each else [], None, 0)
        outcome = self.engine.lookup(request, self.clock())
        if outcome.lease is not None:
            self._arm_timer()
        return outcome

    def delete(self, request: Delete) -> DeleteOutcome:
        """Forget the keys: lookups miss from now on. It survives a restart once the outcome's `lsn` is durable.

        Raises:
            CardOffline, CardRecovering, JournalFull: nothing was changed.
        """
        self.require_writable()
        if self.pressed:
            raise JournalFull
        outcome = self.engine.delete(request, self.clock())
        self.changed()
        return outcome

    def renew(self, lease: LeaseId, ttl_ns: int) -> int:
        """Extend a lease; returns the granted time in ns. Raises UnknownLease."""
        granted_ns = self.engine.renew(lease, ttl_ns, self.clock())
        self._arm_timer()
        return granted_ns

    def release(self, lease: LeaseId) -> None:
        """End a lease. Raises UnknownLease."""
        self.engine.release(lease, self.clock())
        self.changed()

    def begin_load(self, request: BeginLoad) -> list[ReadPlan | None]:
        """Pin what the load will read; everything is a miss while the card is offline."""
        if not self.online:
            return [None] * len(request.keys)
        return self.engine.begin_load(request, self.clock())

    def require_writable(self) -> None:
        """Raise CardOffline or CardRecovering unless the card may be written to."""
        if not self.online:
            raise CardOffline
        if not self._ownership.writable:
            raise CardRecovering

    # --- the run's part -------------------------------------------------------------------------------------

    def start_journal(self, journal: Journal) -> None:
        """Records go there from now on."""
        self._journal = journal
        self.changed()

    def load_begins(self) -> None:
        """Count a load whose objects are pinned."""
        self._loads += 1

    def load_ended(self) -> None:
        """Count it off."""
        self._loads -= 1
        self.space_may_be_free()

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Let everything be a miss, wait for the loads under way; inside, the engine may be replaced."""
        self._suspended = True
        try:
            while self._loads:
                await self.room(self.clock() + SUSPEND_POLL_NS)
            yield
        finally:
            self._suspended = False

    # --- durability and time ------------------------------------------------------------------------------

    def when_durable(self, lsn: Lsn, done: Callable[[], None]) -> None:
        """Call `done` from the loop once `lsn` is durable; at once if it is (NO_LSN always is)."""
        if lsn <= self._durable_lsn:
            done()
            return
        self._waiting.append((lsn, done))
        self.changed()

    async def durable(self, lsn: Lsn, deadline_ns: int) -> bool:
        """Wait until `lsn` is durable. False when the deadline passed first: then that is unknown."""
        if lsn <= self._durable_lsn:
            return True
        future: asyncio.Future[None] = self._loop.create_future()
        self.when_durable(lsn, lambda: None if future.done() else future.set_result(None))
        delay_s = max(0, deadline_ns - self.clock()) / 1e9
        done, _ = await asyncio.wait((future,), timeout=delay_s)
        return bool(done)

    async def room(self, deadline_ns: int) -> bool:
        """Wait until space may have become free. False when the deadline passed first."""
        delay_s = (deadline_ns - self.clock()) / 1e9
        if delay_s <= 0:
            return False
        future: asyncio.Future[None] = self._loop.create_future()
        self._room.append(future)
        self.changed()
        done, _ = await asyncio.wait((future,), timeout=delay_s)
        if not done:
            self._room.remove(future)
        return bool(done)

    def changed(self) -> None:
        """Note that the engine was changed: what it recorded is submitted at the end of this turn."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_scheduled = False
        records = self.engine.take_records() if self._journal is not None else []
        if records:
            assert self._journal is not None
            self._journal.submit(records, self.engine.last_lsn, self._durable_up_to)
        self._arm_timer()

    def _durable_up_to(self, lsn: Lsn) -> None:
        self._durable_lsn = lsn
        self.engine.persisted(lsn, self.clock())
        ready = [done for waits_for, done in self._waiting if waits_for <= lsn]
        self._waiting = [entry for entry in self._waiting if entry[0] > lsn]
        for done in ready:
            done()
        self._wake_room()
        self.changed()  # freed extents are records too

    def _wake_room(self) -> None:
        waiting, self._room = self._room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def space_may_be_free(self) -> None:
        """Let stores that wait for room look again (an I/O or a lease ended)."""
        if self._room:
            self._wake_room()
        self.changed()

    def _arm_timer(self) -> None:
        deadline_ns = self.engine.next_deadline()
        if deadline_ns is None:
            return
        if self._timer is not None:
            if self._timer_at_ns <= deadline_ns:
                return
            self._timer.cancel()
        # The floor keeps a deadline that stays in the past (nothing evictable now) from spinning the loop.
        delay_s = max(TICK_DELAY_MIN_NS, deadline_ns - self.clock()) / 1e9
        self._timer_at_ns = deadline_ns
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self.pressed:
            self.engine.tick(self.clock())
            self._wake_room()
        self.changed()

    def close(self) -> None:
        """Stop the timer. Waiters are left to their own deadlines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
