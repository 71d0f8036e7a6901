"""How objects go: doomed, then free once no guard covers them and their tombstone is durable (R3), or quarantined (R4).

Single deletes, evictions, wipes and corrupt objects all pass `doom`, and all space comes back through `_vanish`: there
is no second path that could forget a guard (R8).
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from .arrays import NO_SLOTS
from .lifecycle import DOOMED, LIVE, QUARANTINED, RESERVED, Event
from .records import RECORD_OBJECTS_MAX, DeleteBatch, DeleteCause, FreedBatch
from .types import NO_LSN

if TYPE_CHECKING:
    from collections.abc import Callable

    from .arrays import Slots
    from .state import EngineState
    from .types import Lsn

BACKLOG_MAX: Final = 1 << 15
"""Objects whose tombstones are not durable yet, from which on nothing more is removed in the background: what one `persisted` may have to
free, in a few milliseconds, however long the journal takes."""
SETTLED_PER_TURN: Final = 1 << 13
"""Objects that one `settle` makes free: what a client that died held, or all that a run before left, may be many more."""


class Removal:
    """Deletions under way, and the quarantine."""

    def __init__(self, state: EngineState, held_until_ns: int = 0) -> None:
        self._state = state
        self._held_until_ns = held_until_ns
        self.holding = held_until_ns > 0
        """Whether nothing that is doomed becomes free: clients of the run before may still read or write it (R3)."""
        self._held_back: deque[Slots] = deque()
        """Doomed objects that would be free but for that."""
        self.recorded: set[int] = set()
        """Slots that are not live and that the journal knows: of tickets, from the reservation to the commit."""
        self._tombstones: deque[tuple[Lsn, Slots]] = deque()
        self._quarantine: list[tuple[int, int, int]] = []
        """Heap of (settles at, slot, generation)."""
        self._holds: dict[int, int] = {}
        """Slots of corrupt objects, and until when their units stay out of use."""
        self.last_tombstone_lsn = NO_LSN
        self._backlog = 0
        self.pending_au = 0
        """Units of doomed objects that wait for nothing but their tombstone."""
        self.pending_objects = 0
        self.on_ready: Callable[[Slots], None] = _nobody
        """Takes objects that were wiped, and whose units can be erased now."""
        self.mark: Callable[[Slots], None] = _nobody
        """Told of objects that go while a wipe is under way: they may be among what it must erase."""

    @property
    def backlogged(self) -> bool:
        """Whether what goes in the background has to wait for the journal."""
        return self._backlog >= BACKLOG_MAX

    def doom(self, slots: Slots, cause: DeleteCause) -> Lsn:
        """Remove LIVE or COMMITTING objects (no repetitions): invisible from here on, recorded, freed later.

        Returns:
            The LSN of the last record, or NO_LSN if there was nothing to remove.
        """
        state, table = self._state, self._state.slots
        for begin in range(0, len(slots), RECORD_OBJECTS_MAX):
            part = slots[begin : begin + RECORD_OBJECTS_MAX]
            if state.wiping:
                self.mark(part)
            table.move(part, Event.DOOM)
            self._unlist(part)
            generations = table.generation[part]
            recorded = part.astype(np.uint32)
            self.last_tombstone_lsn = state.log.add(
                DeleteBatch(state.log.next_lsn(), cause, recorded, generations)
            )
            self._tombstones.append((self.last_tombstone_lsn, part))
            self._backlog += len(part)
            self._count_pending(part[~table.guarded(part)], 1)
        return self.last_tombstone_lsn if len(slots) else NO_LSN

    def doom_corrupt(self, slots: Slots, hold_until_ns: int) -> Lsn:
        """Remove objects whose bytes are wrong, pinned by the load that found it; their units are not trusted for a while."""
        table = self._state.slots
        hold_until_ns = max(hold_until_ns, self._held_until_ns)
        self._holds.update(dict.fromkeys(slots.tolist(), hold_until_ns))
        return self.doom(slots[table.state[slots] == LIVE], DeleteCause.CORRUPT)

    def cancel(self, slots: Slots) -> None:
        """Take RESERVED objects from their writers, who will hear it when they commit; until then they may write."""
        self._state.slots.move(slots, Event.CANCEL)
        self._unlist(slots)

    def abandon(self, slots: Slots, settles_at_ns: int | None) -> None:
        """The writers of RESERVED or cancelled objects gave up; None: no write of theirs can land any more."""
        table = self._state.slots
        reserved = table.state[slots] == RESERVED
        table.move(slots[reserved], Event.ABORT if settles_at_ns is None else Event.FAIL)
        self._unlist(slots[reserved])
        table.has_writer[slots] = False
        if settles_at_ns is None:
            self._record_freed(_among(self.recorded, slots[reserved]))
            self._vanish(slots[reserved])
            self._settle(slots[~reserved])
        else:
            for slot in slots.tolist():
                heapq.heappush(self._quarantine, (settles_at_ns, slot, int(table.generation[slot])))

    def unguarded(self, slots: Slots) -> None:
        """The last lease or pin of these slots ended, or they became LIVE."""
        if not len(slots):
            return
        state, table = self._state, self._state.slots
        if state.recency.parked:
            for slot in slots.tolist():
                if slot in state.recency.parked and table.state[slot] == LIVE:
                    scope = state.names.home(int(table.home[slot])).scope
                    state.recency.return_parked(scope.uses, scope.ident, slot)
        doomed = slots[table.state[slots] == DOOMED]
        if len(doomed):
            durable = table.tombstoned[doomed]
            self._count_pending(doomed[~durable], 1)
            self._free(doomed[durable])

    def persisted(self, lsn: Lsn) -> None:
        """Tombstones up to `lsn` are durable."""
        table = self._state.slots
        parts: list[Slots] = []
        while self._tombstones and self._tombstones[0][0] <= lsn:
            parts.append(self._tombstones.popleft()[1])
        if not parts:
            return
        slots = np.concatenate(parts)
        self._backlog -= len(slots)
        table.tombstoned[slots] = True
        unguarded = slots[~table.guarded(slots)]
        self._count_pending(unguarded, -1)
        self._free(unguarded)

    def settle(self, now_ns: int) -> None:
        """End the quarantine of what can be trusted again, and the time of the clients of the run before: SETTLED_PER_TURN objects."""
        table = self._state.slots
        if self.holding and now_ns >= self._held_until_ns:
            self.holding = False
            for _, part in self._tombstones:
                self._count_pending(part[~table.guarded(part)], 1)
        left = SETTLED_PER_TURN
        while left and self._held_back and not self.holding:
            part = self._held_back.popleft()
            if len(part) > left:
                self._held_back.appendleft(part[left:])
            self._free(part[:left])
            left -= min(left, len(part))
        settled: list[int] = []
        while len(settled) < left and self._quarantine and self._quarantine[0][0] <= now_ns:
            _, slot, generation = heapq.heappop(self._quarantine)
            assert table.generation[slot] == generation, "a quarantined slot was reused"
            settled.append(slot)
        if settled:
            self._settle(np.array(settled, np.intp))

    def erased(self, slots: Slots) -> None:
        """The units of objects that were wiped hold zeroes: they are free."""
        doomed = self._state.slots.state[slots] == DOOMED
        self._free(slots[doomed])
        self._settle(slots[~doomed])

    def no_longer_pending(self, slots: Slots) -> None:
        """Doomed ones among these will wait for the eraser, not only for their tombstone."""
        table = self._state.slots
        waiting = slots[(table.state[slots] == DOOMED) & ~table.tombstoned[slots]]
        self._count_pending(waiting[~table.guarded(waiting)], -1)

    def held_until(self) -> dict[int, int]:
        """Slots of corrupt objects, and until when (monotonic ns) their units stay out of use."""
        return self._holds

    def restore(self, doomed: Slots, holds: dict[int, int]) -> None:
        """Begin with objects whose tombstones are durable, and with what of them is held until its time, being corrupt."""
        table = self._state.slots
        table.tombstoned[doomed] = True
        self._holds = {slot: max(until_ns, self._held_until_ns) for slot, until_ns in holds.items()}
        for slot, until_ns in self._holds.items():
            if table.state[slot] == QUARANTINED:
                heapq.heappush(self._quarantine, (until_ns, slot, int(table.generation[slot])))
        self._free(doomed)

    def next_deadline(self) -> int | None:
        """When `settle` has something to do."""
        ends_ns = [self._quarantine[0][0]] if self._quarantine else []
        if self.holding or self._held_back:
            ends_ns.append(self._held_until_ns)
        return min(ends_ns, default=None)

    def _unlist(self, slots: Slots) -> None:
        if len(slots):
            self._state.index.remove(slots)
            self._state.recency.forget(slots)

    def _count_pending(self, slots: Slots, sign: int) -> None:
        if self.holding:
            return  # they wait for more than their tombstones
        slots = self._without_held(slots)
        slots = slots[~self._state.slots.must_erase[slots]]
        if not len(slots):
            return
        units = self._state.slots.units(slots)
        self.pending_au += sign * int(units.sum())
        self.pending_objects += sign * len(slots)
        self._state.accounts.pend(slots, units, sign)

    def _settle(self, slots: Slots) -> None:
        """Quarantined, and nothing can land on them any more: free, or to be erased if they were wiped."""
        if not len(slots):
            return
        table = self._state.slots
        erase = table.must_erase[slots]
        if erase.any():
            self.on_ready(slots[erase])
            slots = slots[~erase]
        table.move(slots, Event.SETTLE)
        # Only corrupt objects, and those of tickets, have a past in the journal that must be closed.
        corrupt = [slot for slot in slots.tolist() if self._holds.pop(slot, None) is not None]
        self._record_freed(np.array(corrupt, np.intp))
        self._record_freed(_among(self.recorded, slots))
        self._vanish(slots)

    def _without_held(self, slots: Slots) -> Slots:
        if not self._holds:
            return slots
        return np.array([slot for slot in slots.tolist() if slot not in self._holds], np.intp)

    def _free(self, slots: Slots) -> None:
        """DOOMED, unguarded, tombstone durable: the units are free, or held if they were corrupt."""
        if not len(slots):
            return
        if self.holding:
            self._held_back.append(slots)
            return
        table = self._state.slots
        free = self._without_held(slots)
        if len(free) != len(slots):
            held = np.array([slot for slot in slots.tolist() if slot in self._holds], np.intp)
            table.move(held, Event.HOLD)
            for slot in held.tolist():
                heapq.heappush(self._quarantine, (self._holds[slot], slot, int(table.generation[slot])))
        erase = table.must_erase[free]
        if erase.any():
            self.on_ready(free[erase])
            free = free[~erase]
        if len(free):
            table.move(free, Event.FREE)
            self._record_freed(free)
            self._vanish(free)

    def _record_freed(self, slots: Slots) -> None:
        table, log = self._state.slots, self._state.log
        for begin in range(0, len(slots), RECORD_OBJECTS_MAX):
            part = slots[begin : begin + RECORD_OBJECTS_MAX]
            generations = table.generation[part]
            log.add(FreedBatch(log.next_lsn(), part.astype(np.uint32), generations))

    def _vanish(self, slots: Slots) -> None:
        """ABSENT now: give back extents, slots and references."""
        if not len(slots):
            return
        state, table = self._state, self._state.slots
        starts = table.start_au[slots].astype(np.int64)
        counts = table.count_au[slots].astype(np.int64)
        if table.others:
            extra = [extent for slot in slots.tolist() for extent in table.others.pop(slot, ())]
            if extra:
                starts = np.concatenate((starts, np.array([e.start_au for e in extra], np.int64)))
                counts = np.concatenate((counts, np.array([e.count_au for e in extra], np.int64)))
        if self.recorded:
            self.recorded.difference_update(slots.tolist())
        used = counts > 0
        state.allocator.release(starts[used], counts[used])
        table.give_back(slots)
        state.drop_references(slots)


def _among(recorded: set[int], slots: Slots) -> Slots:
    """Those that the journal has a row of although they never were live."""
    if not recorded:
        return NO_SLOTS
    return np.array([slot for slot in slots.tolist() if slot in recorded], np.intp)


def _nobody(slots: Slots) -> None:
    """Take no notice."""
