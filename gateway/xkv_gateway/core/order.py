"""Victims off the front of the order of use: of one scope, or the oldest of all scopes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .lifecycle import LIVE
from .recency import NEVER

if TYPE_CHECKING:
    from .arrays import Slots
    from .names import Scope
    from .state import EngineState

_LOOK: Final = 256
"""Entries looked at together, beyond the number that is needed for certain."""
_ONE_BY_ONE: Final = 2
"""Entries looked at one by one first: where scopes take turns, there is not more to take at a time."""


@dataclass(slots=True)
class Need:
    """What is still missing."""

    units: int
    objects: int
    victims_max: int
    turns_max: int
    """Changes from one scope to the next."""

    @property
    def met(self) -> bool:
        """Whether to stop."""
        return (self.units <= 0 and self.objects <= 0) or self.victims_max <= 0 or self.turns_max <= 0

    @property
    def enough(self) -> bool:
        """Whether nothing is missing."""
        return self.units <= 0 and self.objects <= 0


class Order:
    """Takes victims: LIVE without a guard. They leave the order; the caller dooms them."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def oldest_of_all(self, need: Need) -> list[Slots]:
        """The least recently used of all, until `need` is met; it says what is still missing."""
        state, recency = self._state, self._state.recency
        victims: list[Slots] = []
        while recency.heap and not need.met:
            bound, ident = heapq.heappop(recency.heap)
            scope = state.names.scope_at(ident)
            if scope is None or scope.uses.bound != bound:
                continue
            while recency.heap and recency.heap[0] == (bound, ident):
                # A scope that fell back to a bound it had before is listed twice; it must not be its own limit.
                heapq.heappop(recency.heap)
            limit = recency.heap[0][0] if recency.heap else NEVER
            self._take(scope, limit, need, victims)
            recency.list_log(scope.uses, ident)
            need.turns_max -= 1
        return victims

    def oldest_of(self, scope: Scope, need: Need) -> list[Slots]:
        """The least recently used of one scope, until `need` is met."""
        victims: list[Slots] = []
        self._take(scope, NEVER, need, victims)
        need.turns_max -= 1
        return victims

    def _take(self, scope: Scope, limit: int, need: Need, victims: list[Slots]) -> None:
        """Take victims off the front of a scope's order, as long as they are older than `limit`."""
        log, look, singly = scope.uses, max(_LOOK, need.objects), _ONE_BY_ONE if limit != NEVER else 0
        while not need.met:
            front = log.front[0][0] if log.front else NEVER
            head = log.head_stamp()
            if min(front, head) >= limit:
                break
            if front < head or singly:
                singly -= singly > 0
                slot = self._pop(scope, from_front=front < head, stamp=min(front, head))
                if slot is not None:
                    victims.append(self._sift(scope, np.array([slot], np.intp), need)[0])
                continue
            slots, stamps = log.head(look, min(limit, front))
            look *= 2  # long rows of stale entries are passed in big steps, small needs read little
            valid = np.flatnonzero(self._state.recency.stamp_of[slots] == stamps)
            taken, looked_at = self._sift(scope, slots[valid], need)
            victims.append(taken)
            log.drop_head(len(slots) if looked_at == len(valid) else int(valid[looked_at - 1]) + 1)

    def _pop(self, scope: Scope, *, from_front: bool, stamp: int) -> int | None:
        """The slot of the first entry, which is dropped; None: it is stale."""
        log = scope.uses
        if from_front:
            assert log.front is not None
            _, slot = heapq.heappop(log.front)
        else:
            slot = log.pop_head()
        return slot if int(self._state.recency.stamp_of[slot]) == stamp else None

    def _sift(self, scope: Scope, slots: Slots, need: Need) -> tuple[Slots, int]:
        """Choose victims among valid entries in order; park the guarded ones in between.

        Returns:
            The victims, and how many of the entries were used up.
        """
        table = self._state.slots
        if len(slots) == 1:
            return self._sift_one(scope, slots, need)
        able = (table.state[slots] == LIVE) & ~table.guarded(slots)
        places = np.flatnonzero(able)
        units = np.cumsum(table.units(slots[places]))
        enough = (
            max(int(np.searchsorted(units, need.units)) + 1, need.objects) if need.units > 0 else need.objects
        )
        count = min(enough, need.victims_max, len(places))
        looked_at = int(places[count - 1]) + 1 if count < len(places) or count == enough else len(slots)
        if not able[:looked_at].all():
            self._state.recency.park(scope.ident, slots[:looked_at][~able[:looked_at]])
        need.units -= int(units[count - 1]) if count else 0
        need.objects -= count
        need.victims_max -= count
        return slots[places[:count]], looked_at

    def _sift_one(self, scope: Scope, slots: Slots, need: Need) -> tuple[Slots, int]:
        table, slot = self._state.slots, int(slots[0])
        if table.state[slot] != LIVE or table.leases[slot] or table.pins[slot]:
            self._state.recency.park(scope.ident, slots)
            return slots[:0], 1
        need.units -= -(-int(table.size_bytes[slot]) // table.au_bytes)
        need.objects -= 1
        need.victims_max -= 1
        return slots, 1
