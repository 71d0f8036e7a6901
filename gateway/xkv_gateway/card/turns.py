"""The turns of the loop: what the engine recorded in one turn is one journal batch; who waits for what is called in time.

engine changed (any number of times)  ->  end of turn: submit  ->  durable: `persisted`, replies, stores that wait for room
next_deadline of the engine           ->  timer: `tick`
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from xkv_gateway.core.types import NO_LSN

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.journal import Journal
    from xkv_gateway.core.engine import Engine
    from xkv_gateway.core.types import Lsn

TICK_DELAY_MIN_NS: Final = 1_000_000


class Turns:
    """Drives an engine: group commit, durability, time. All methods are called from the loop.

    Args:
        engine: the index.
        journal: where records go; None: they wait in the engine until `start_journal`.
        clock: monotonic ns.
    """

    def __init__(self, engine: Engine, journal: Journal | None, clock: Callable[[], int]) -> None:
        self.engine = engine
        self.clock = clock
        self._journal = journal
        self._durable_lsn = NO_LSN
        self._waiting: list[tuple[Lsn, Callable[[], None]]] = []
        self._room: list[asyncio.Future[bool]] = []
        self._turn_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        self.on_wipe: Callable[[], None] = _nobody
        """Called at the end of a turn that has brought news of a wipe."""
        self._loop = asyncio.get_running_loop()

    @property
    def pressed(self) -> bool:
        """Whether nothing more may begin that will be recorded."""
        return False

    def start_journal(self, journal: Journal) -> None:
        """Records go there from now on."""
        self._journal = journal
        self.changed()

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
        future: asyncio.Future[bool] = self._loop.create_future()
        self.when_durable(lsn, partial(_conclude, future, True))
        return await self._within(future, max(0, deadline_ns - self.clock()) / 1e9)

    async def covered(self, deadline_ns: int) -> bool:
        """Wait until what has been written to the card was flushed (see `Journal.cover`). False when the deadline passed first."""
        assert self._journal is not None, "nothing is written before there is a journal"
        future: asyncio.Future[bool] = self._loop.create_future()
        self._journal.cover(partial(_conclude, future, True))
        return await self._within(future, max(0, deadline_ns - self.clock()) / 1e9)

    async def room(self, deadline_ns: int) -> bool:
        """Wait until space may have become free. False when the deadline passed first."""
        delay_s = (deadline_ns - self.clock()) / 1e9
        if delay_s <= 0:
            return False
        future: asyncio.Future[bool] = self._loop.create_future()
        self._room.append(future)
        self.changed()
        try:
            return await self._within(future, delay_s)
        finally:
            if future in self._room:
                self._room.remove(future)

    async def _within(self, future: asyncio.Future[bool], delay_s: float) -> bool:
        """Wait for the future, at most so long: False."""
        timer = self._loop.call_later(delay_s, _conclude, future, False)
        try:
            return await future
        finally:
            timer.cancel()

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
        if self.engine.wiping.news:
            self.on_wipe()
        self.arm_timer()

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
            _conclude(future, True)

    def space_may_be_free(self) -> None:
        """Let stores that wait for room look again (an I/O or a lease ended)."""
        if self._room:
            self._wake_room()
        self.changed()

    def arm_timer(self) -> None:
        """See to it that the engine is ticked when it wants to be."""
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


def _nobody() -> None:
    """Take no notice."""


def _conclude(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)
