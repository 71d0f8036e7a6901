"""The objects: parallel arrays by slot, and the totals that follow from them.

71 bytes an object, allocated for the object limit as zeroes, so that pages that were never touched cost nothing and
nothing ever grows. States change in `move` alone, and with them the totals (R5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .arrays import NO_SLOTS
from .lifecycle import ABSENT, LIVE, Event, State, next_state, next_states

if TYPE_CHECKING:
    from .accounts import Accounts
    from .arrays import I64, U8, U16, U32, U64, Bools, Slots
    from .types import Extent

SLOTS_MAX: Final = 2**32 - 1


def has_repetitions(slots: Slots) -> bool:
    """Whether a slot occurs more than once."""
    if len(slots) < 2:
        return False
    ordered = np.sort(slots)
    return bool((ordered[1:] == ordered[:-1]).any())


class SlotTable:
    """Arrays of `max_objects` slots over `capacity_au` units of `au_bytes`."""

    def __init__(self, max_objects: int, capacity_au: int, au_bytes: int) -> None:
        assert 0 < max_objects <= SLOTS_MAX
        assert 0 < capacity_au <= SLOTS_MAX
        self.max_objects = max_objects
        self.au_bytes = au_bytes
        self.digest_low: U64 = np.zeros(max_objects, np.uint64)
        self.digest_high: U64 = np.zeros(max_objects, np.uint64)
        self.checksum: U64 = np.zeros(max_objects, np.uint64)
        self.stored_s: U32 = np.zeros(max_objects, np.uint32)
        self.used_s: U32 = np.zeros(max_objects, np.uint32)
        """When it was committed, and last used, in card time (`lifetimes`)."""
        self.home: U32 = np.zeros(max_objects, np.uint32)
        self.size_bytes: U32 = np.zeros(max_objects, np.uint32)
        self.start_au: U32 = np.zeros(max_objects, np.uint32)
        self.count_au: U32 = np.zeros(max_objects, np.uint32)
        """First extent; the others of an object that was split are in `others`."""
        self.others: dict[int, tuple[Extent, ...]] = {}
        self.generation: U32 = np.zeros(max_objects, np.uint32)
        self.pins: U32 = np.zeros(max_objects, np.uint32)
        self.leases: U16 = np.zeros(max_objects, np.uint16)
        self.state: U8 = np.zeros(max_objects, np.uint8)
        self.has_writer: Bools = np.zeros(max_objects, np.bool_)
        """A store holds the plan and has neither committed nor aborted."""
        self.tombstoned: Bools = np.zeros(max_objects, np.bool_)
        """Doomed, and the record of that is durable."""
        self.must_erase: Bools = np.zeros(max_objects, np.bool_)
        """Wiped: its units are deallocated and read back before they are free."""
        self.units_in = [0] * len(State)
        self.units_in[ABSENT] = capacity_au
        self.objects_in = [0] * len(State)
        self.objects_in[ABSENT] = max_objects
        self.leased_au = 0
        """Units of objects with a lease."""
        self.guarded_live_au = 0
        self.guarded_live_objects = 0
        """Live, and leased or pinned: what cannot be evicted now."""
        self.accounts: Accounts | None = None
        """Told of every change, for the totals of scopes and namespaces."""
        self._freed: U32 = np.empty(max_objects, np.uint32)
        self._freed_count = 0
        self._fresh = 0

    @property
    def fresh(self) -> int:
        """Slots from this one on were never taken."""
        return self._fresh

    def restore(self, slots: Slots, states: U8, units: I64) -> None:
        """Begin with these slots (ascending, no repetitions) in these states, all others ABSENT."""
        assert not self._fresh, "a table is restored before it is used"
        self.state[slots] = states
        for state in np.unique(states).tolist():
            which = states == state
            for totals, moved in (
                (self.units_in, int(units[which].sum())),
                (self.objects_in, int(which.sum())),
            ):
                totals[state] += moved
                totals[ABSENT] -= moved
        self._fresh = int(slots[-1]) + 1 if len(slots) else 0
        absent = np.flatnonzero(self.state[: self._fresh] == ABSENT).astype(np.uint32)
        self._freed[: len(absent)] = absent[::-1]
        self._freed_count = len(absent)

    def reaching(self, unit: int) -> Slots:
        """Slots in use that have units from this one on."""
        ends = self.start_au.astype(np.int64) + self.count_au
        reaches = (self.state != ABSENT) & (self.count_au > 0) & (ends > unit)
        for slot, others in self.others.items():
            reaches[slot] |= any(extent.start_au + extent.count_au > unit for extent in others)
        return np.flatnonzero(reaches)

    def units(self, slots: Slots) -> I64:
        """Units that each object occupies."""
        if len(slots) == 1:
            return np.array((-(-int(self.size_bytes[slots[0]]) // self.au_bytes),), np.int64)
        return self.units_of_bytes(self.size_bytes.take(slots).astype(np.int64))

    def units_of_bytes(self, sizes_bytes: I64) -> I64:
        """Units that payloads of these sizes occupy."""
        return -(-sizes_bytes // self.au_bytes)

    def take(self, count: int) -> Slots:
        """Slots that are ABSENT; the caller made sure that there are `count`."""
        recycled = min(count, self._freed_count)
        slots = np.empty(count, np.intp)
        slots[:recycled] = self._freed[self._freed_count - recycled : self._freed_count]
        self._freed_count -= recycled
        fresh = count - recycled
        assert self._fresh + fresh <= self.max_objects, "more slots taken than there are"
        slots[recycled:] = np.arange(self._fresh, self._fresh + fresh)
        if fresh:
            # Written to now, page by page: when thousands are given back at once it would be a pause.
            self.generation[self._fresh : self._fresh + fresh] += np.uint32(0)
        self._fresh += fresh
        return slots

    def give_back(self, slots: Slots) -> None:
        """Slots that became ABSENT: whatever names them by their generation means nothing from here on."""
        self.generation[slots] += 1
        self.tombstoned[slots] = False
        self.has_writer[slots] = False
        if np.count_nonzero(self.must_erase.take(slots)):  # its pages are only there once something was wiped
            self.must_erase[slots] = False
        self._freed[self._freed_count : self._freed_count + len(slots)] = slots
        self._freed_count += len(slots)

    def move(self, slots: Slots, event: Event) -> None:
        """Apply one event to slots without repetitions: the only place where states and their totals change."""
        if not len(slots):
            return
        before = self.state.take(slots)
        units = self.units(slots)
        if len(slots) == 1 or np.count_nonzero(before == before[0]) == len(slots):
            old = int(before[0])
            self.state[slots] = new = next_state(old, event)
            self._shift(slots, units, old, new)
        else:
            self.state[slots] = after = next_states(before, event)
            for state in np.unique(before).tolist():
                which = before == state
                self._shift(slots[which], units[which], state, int(after[which][0]))
        if event is Event.DOOM:
            guarded = self.guarded(slots) & (before == LIVE)
            if np.count_nonzero(guarded):
                self._count_guarded(slots[guarded], units[guarded], -1)

    def _shift(self, slots: Slots, units: I64, before: int, after: int) -> None:
        moved = int(units.sum())
        for state, sign in ((before, -1), (after, 1)):
            self.units_in[state] += sign * moved
            self.objects_in[state] += sign * len(slots)
        if self.accounts is not None:
            self.accounts.shift(slots, units, before, after)

    # --- guards: what keeps an object's units where they are ----------------------------------------------

    def guarded(self, slots: Slots) -> Bools:
        """Which slots have a lease or a pin."""
        guarded: Bools = (self.leases.take(slots) != 0) | (self.pins.take(slots) != 0)
        return guarded

    def lease(self, slots: Slots) -> None:
        """Count a lease on each of the slots (LIVE, no repetitions)."""
        before = self.leases.take(slots)
        first = before == 0
        fresh = np.count_nonzero(first)
        if fresh:
            units = self.units(slots)
            self.leased_au += int((units if fresh == len(slots) else units[first]).sum())
            first &= self.pins.take(slots) == 0
            self._count_some_guarded(slots, units, first, 1)
        before += 1
        self.leases[slots] = before

    def unlease(self, slots: Slots) -> Slots:
        """Take a lease off each of the slots (no repetitions).

        Returns:
            The slots that have no guard left.
        """
        left = self.leases.take(slots)
        assert np.count_nonzero(left) == len(slots), "a lease ended twice"
        left -= 1
        self.leases[slots] = left
        last: Slots = slots[left == 0] if np.count_nonzero(left) else slots
        if len(last):
            units = self.units(last)
            self.leased_au -= int(units.sum())
            pinned = self.pins.take(last) != 0
            if np.count_nonzero(pinned):
                last, units = last[~pinned], units[~pinned]
            self._count_some_guarded(last, units, self.state.take(last) == LIVE, -1)
        return last

    def pin(self, slots: Slots) -> None:
        """Pin slots for an I/O; a slot that occurs twice gets two pins."""
        if len(slots) == 1:
            self._pin_one(int(slots[0]), slots)
            return
        repeated = has_repetitions(slots)
        guarded = self.guarded(slots)
        if not guarded.all():
            free = slots[~guarded]
            if repeated:
                free = np.unique(free)
            self._count_some_guarded(free, self.units(free), self.state.take(free) == LIVE, 1)
        if repeated:
            np.add.at(self.pins, slots, 1)
        else:
            self.pins[slots] += 1

    def unpin(self, slots: Slots) -> Slots:
        """Take the pins off again.

        Returns:
            The slots that have no guard left, without repetitions.
        """
        if len(slots) == 1:
            return self._unpin_one(int(slots[0]), slots)
        assert self.pins.take(slots).all(), "an I/O ended twice"
        repeated = has_repetitions(slots)
        if repeated:
            np.subtract.at(self.pins, slots, 1)
        else:
            self.pins[slots] -= 1
        last = slots[~self.guarded(slots)]
        if len(last):
            if repeated:
                last = np.unique(last)
            self._count_some_guarded(last, self.units(last), self.state.take(last) == LIVE, -1)
        return last

    def _pin_one(self, slot: int, slots: Slots) -> None:
        pins = int(self.pins[slot])
        self.pins[slot] = pins + 1
        if not pins and not self.leases[slot] and self.state[slot] == LIVE:
            self._count_guarded(slots, self.units(slots), 1)

    def _unpin_one(self, slot: int, slots: Slots) -> Slots:
        pins = int(self.pins[slot])
        assert pins, "an I/O ended twice"
        self.pins[slot] = pins - 1
        if pins > 1 or self.leases[slot]:
            return NO_SLOTS
        if self.state[slot] == LIVE:
            self._count_guarded(slots, self.units(slots), -1)
        return slots

    def _count_some_guarded(self, slots: Slots, units: I64, which: Bools, sign: int) -> None:
        count = np.count_nonzero(which)
        if count == len(which):
            self._count_guarded(slots, units, sign)
        elif count:
            self._count_guarded(slots[which], units[which], sign)

    def _count_guarded(self, slots: Slots, units: I64, sign: int) -> None:
        self.guarded_live_au += sign * int(units.sum())
        self.guarded_live_objects += sign * len(slots)
        if self.accounts is not None:
            self.accounts.guard(slots, units, sign)
