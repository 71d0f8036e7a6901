"""What only damage can leave in a restored index, and what becomes of it: units beyond the area, too few, or in two objects.

An index that was read whole, with all its records, never has any of it; the looks are cheap, and always taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .image import ROW_LIVE

if TYPE_CHECKING:
    from .arrays import I64, U8, U32, U64, Bools
    from .slots import SlotTable


class Soundness:
    """Looks through the rows of an index.

    Args:
        table: digests, sizes and extents by slot.
        row_state: state of the row of each slot; 0: none.
        stamp: when each was used.
        capacity_au: units of the data area.
    """

    def __init__(self, table: SlotTable, row_state: U8, stamp: U64, capacity_au: int) -> None:
        self._table = table
        self._row_state = row_state
        self._stamp = stamp
        self._capacity_au = capacity_au
        self.dropped_objects = 0

    def sound(self, slots: U32, *, look_for_repeats: bool) -> U32:
        """Return the slots (ascending) that make sense; the rows of the others become absent."""
        if look_for_repeats:
            slots = self._keep(slots, ~self._repeated(slots))
        starts, counts = self.runs(slots)
        owners = self._run_owners(slots)
        beyond = starts + counts > self._capacity_au
        short = self._units_short(slots)
        bad = np.unique(np.concatenate((owners[beyond], slots[short])))
        if len(bad):
            slots = self._keep(slots, ~np.isin(slots, bad))
            starts, counts = self.runs(slots)
            owners = self._run_owners(slots)
        shared = _overlapping(starts, counts)
        if shared.any():
            slots = self._keep(slots, ~np.isin(slots, np.unique(owners[shared])))
        return slots

    def _keep(self, slots: U32, good: Bools) -> U32:
        self.dropped_objects += int(len(good) - good.sum())
        self._row_state[slots[~good]] = 0
        return slots[good]

    def _repeated(self, slots: U32) -> Bools:
        """Which live objects have the identity of a live one that was used later: its delete is what is missing."""
        live = slots[self._row_state[slots] == ROW_LIVE]
        low, high = self._table.digest_low[live], self._table.digest_high[live]
        order = np.lexsort((self._stamp[live], high, low))
        same = (low[order][1:] == low[order][:-1]) & (high[order][1:] == high[order][:-1])
        return np.isin(slots, live[order[:-1][same]])

    def _units_short(self, slots: U32) -> Bools:
        """Which objects do not have the units that their size needs."""
        have = self._table.count_au[slots].astype(np.int64)
        for slot, others in self._table.others.items():
            at = int(np.searchsorted(slots, slot))
            if at < len(slots) and int(slots[at]) == slot:
                have[at] += sum(extent.count_au for extent in others)
        short: Bools = have != self._table.units(slots)
        return short

    def runs(self, slots: U32) -> tuple[I64, I64]:
        """Start and length, in units, of every extent of the slots."""
        table = self._table
        has = table.count_au[slots] > 0
        extra = [e for slot in self._split(slots) for e in self._table.others[slot]]
        return (
            np.concatenate((table.start_au[slots[has]], [e.start_au for e in extra])).astype(np.int64),
            np.concatenate((table.count_au[slots[has]], [e.count_au for e in extra])).astype(np.int64),
        )

    def _run_owners(self, slots: U32) -> U32:
        has = self._table.count_au[slots] > 0
        extra = [slot for slot in self._split(slots) for _ in self._table.others[slot]]
        return np.concatenate((slots[has], np.array(extra, np.uint32)))

    def _split(self, slots: U32) -> list[int]:
        if not self._table.others:
            return []
        known = set(self._table.others)
        return [slot for slot in slots.tolist() if slot in known]


def _overlapping(starts: I64, counts: I64) -> Bools:
    """Which runs hang together with another one by shared units (all of such a cluster: which of them is right is lost)."""
    result = np.zeros(len(starts), np.bool_)
    if not len(starts):
        return result
    order = np.argsort(starts, kind="stable")
    begin, reach = starts[order], np.maximum.accumulate(starts[order] + counts[order])
    apart = np.ones(len(starts), np.bool_)
    apart[1:] = begin[1:] >= reach[:-1]
    if apart.all():
        return result
    cluster = np.cumsum(apart) - 1
    result[order] = np.bincount(cluster)[cluster] > 1
    return result
