"""Which objects go to make room: the least recently used of all homes that are LIVE without a guard."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .lifecycle import State
from .recency import NEVER
from .records import DeleteCause

if TYPE_CHECKING:
    from .arrays import Slots
    from .names import Home
    from .removal import Removal
    from .state import EngineState

VICTIMS_PER_TICK: Final = 4096
VICTIMS_PER_STORE: Final = 65536
"""Bounds the time that one call takes; a store that needs more asks again."""
_LOOK: Final = 256
"""Entries looked at together, beyond the number that is needed for certain."""


@dataclass(slots=True)
class Need:
    """What is still missing."""

    units: int
    objects: int
    victims_max: int

    @property
    def met(self) -> bool:
        """Whether to stop."""
        return (self.units <= 0 and self.objects <= 0) or self.victims_max <= 0


class Eviction:
    """On demand, and in the background from the high watermark down to the low one."""

    def __init__(self, state: EngineState, removal: Removal) -> None:
        self._state = state
        self._removal = removal
        self._promised_au = 0
        self._promised_objects = 0
        self._passing = False

    # --- on demand ----------------------------------------------------------------------------------------

    def reclaimable(self) -> tuple[int, int]:
        """Units and objects that are LIVE and unguarded."""
        table = self._state.slots
        return (
            int(table.units_in[State.LIVE]) - table.guarded_live_au,
            int(table.objects_in[State.LIVE]) - table.guarded_live_objects,
        )

    def make_room(self, short_au: int, short_objects: int) -> None:
        """Evict what is needed beyond free space and beyond doomed space that no other store waits for.

        Stores that wait are not known here; what was promised to them is taken off as tombstones complete, so
        waiting stores do not count on the same space, and a store that went away leaves free space, no debt.
        """
        removal = self._removal
        self._promised_au = min(self._promised_au, removal.pending_au)
        self._promised_objects = min(self._promised_objects, removal.pending_objects)
        self.evict(
            Need(
                short_au - (removal.pending_au - self._promised_au),
                short_objects - (removal.pending_objects - self._promised_objects),
                VICTIMS_PER_STORE,
            ),
            DeleteCause.EVICTED_DEMAND,
        )
        self._promised_au = min(self._promised_au + short_au, removal.pending_au)
        self._promised_objects = min(self._promised_objects + short_objects, removal.pending_objects)

    # --- in the background --------------------------------------------------------------------------------

    def wanted(self) -> bool:
        """Whether `run` has something to do: a pass is under way or due, and something can be evicted."""
        return (self._passing or self._above(self._state.limits.eviction_high_watermark)) and bool(
            self.reclaimable()[1]
        )

    def run(self) -> None:
        """Continue the pass, at most VICTIMS_PER_TICK objects."""
        limits = self._state.limits
        if not self._passing:
            if not self._above(limits.eviction_high_watermark):
                return
            self._passing = True
            self._state.counters.eviction_passes += 1
        used_au, used_objects = self._used()
        need = Need(
            used_au - int(limits.eviction_low_watermark * limits.capacity_au),
            used_objects - int(limits.eviction_low_watermark * limits.max_objects),
            VICTIMS_PER_TICK,
        )
        self.evict(need, DeleteCause.EVICTED_WATERMARK)
        # A pass also ends where nothing more can be evicted; the next crossing begins another.
        self._passing = need.victims_max <= 0 and not (need.units <= 0 and need.objects <= 0)

    def _used(self) -> tuple[int, int]:
        """Units and objects in use, without what is doomed already."""
        table = self._state.slots
        gone = (State.ABSENT, State.DOOMED)
        return (
            self._state.limits.capacity_au - sum(int(table.units_in[state]) for state in gone),
            self._state.limits.max_objects - sum(int(table.objects_in[state]) for state in gone),
        )

    def _above(self, share: float) -> bool:
        used_au, used_objects = self._used()
        limits = self._state.limits
        return used_au > share * limits.capacity_au or used_objects > share * limits.max_objects

    # --- the order ----------------------------------------------------------------------------------------

    def evict(self, need: Need, cause: DeleteCause) -> None:
        """Doom the oldest objects until `need` is met or nothing is left; `need` says what is still missing."""
        if need.met:
            return
        state, recency = self._state, self._state.recency
        victims: list[Slots] = []
        while recency.heap and not need.met:
            bound, ident = heapq.heappop(recency.heap)
            home = state.names.homes[ident]
            if home is None or home.uses.bound != bound:
                continue
            while recency.heap and recency.heap[0] == (bound, ident):
                # A home that fell back to a bound it had before is listed twice; it must not be its own limit.
                heapq.heappop(recency.heap)
            limit = recency.heap[0][0] if recency.heap else NEVER
            victims += self._oldest(home, limit, need)
            recency.list_home(home.uses, ident)
        if victims:
            slots = np.concatenate(victims)
            self._count(slots, cause)
            self._removal.doom(slots, cause)

    def _oldest(self, home: Home, limit: int, need: Need) -> list[Slots]:
        """Take victims off the front of a home's order, as long as they are older than `limit`."""
        log, victims, look = home.uses, [], max(_LOOK, need.objects)
        while not need.met:
            front = log.front[0][0] if log.front else NEVER
            head = log.head_stamp()
            if min(front, head) >= limit:
                break
            if front < head:
                assert log.front is not None
                stamp, slot = heapq.heappop(log.front)
                if int(self._state.recency.stamp_of[slot]) == stamp:
                    victims.append(self._sift(home, np.array([slot], np.intp), need)[0])
                continue
            slots, stamps = log.head(look, min(limit, front))
            look *= 2  # long rows of stale entries are passed in big steps, small needs read little
            valid = np.flatnonzero(self._state.recency.stamp_of[slots] == stamps)
            taken, looked_at = self._sift(home, slots[valid], need)
            victims.append(taken)
            log.drop_head(len(slots) if looked_at == len(valid) else int(valid[looked_at - 1]) + 1)
        return victims

    def _sift(self, home: Home, slots: Slots, need: Need) -> tuple[Slots, int]:
        """Choose victims among valid entries in order; park the guarded ones in between.

        Returns:
            The victims, and how many of the entries were used up.
        """
        table = self._state.slots
        able = (table.state[slots] == State.LIVE) & ~table.guarded(slots)
        places = np.flatnonzero(able)
        units = np.cumsum(table.units(slots[places]))
        enough = (
            max(int(np.searchsorted(units, need.units)) + 1, need.objects) if need.units > 0 else need.objects
        )
        count = min(enough, need.victims_max, len(places))
        looked_at = int(places[count - 1]) + 1 if count < len(places) or count == enough else len(slots)
        if not able[:looked_at].all():
            self._state.recency.park(home.ident, slots[:looked_at][~able[:looked_at]])
        need.units -= int(units[count - 1]) if count else 0
        need.objects -= count
        need.victims_max -= count
        return slots[places[:count]], looked_at

    def _count(self, slots: Slots, cause: DeleteCause) -> None:
        counters = self._state.counters
        size = int(self._state.slots.size_bytes[slots].sum(dtype=np.int64))
        if cause is DeleteCause.EVICTED_DEMAND:
            counters.evicted_demand += len(slots)
            counters.evicted_demand_bytes += size
        else:
            counters.evicted_watermark += len(slots)
            counters.evicted_watermark_bytes += size
