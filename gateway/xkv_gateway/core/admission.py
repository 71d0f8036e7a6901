"""Which keys of a store get room now, which get it soon, and which cannot: first within the scope's quota, then on the card.

Key by key, what it needs is compared with what is free, soon free and reclaimable, before anything is evicted: what cannot fit costs
nobody anything. What is evicted for a quota is the scope's own, and counts as soon free on the card as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .lifecycle import ABSENT
from .tenancy import Enforcement
from .types import StoreStatus, WritePlan

if TYPE_CHECKING:
    from .arrays import I64
    from .eviction import Eviction
    from .names import Scope
    from .removal import Removal
    from .state import EngineState

GATHER_STEPS: Final = 8
"""What lies scattered is joined by evicting an eighth of what is needed at a time."""
Entries = list[WritePlan | StoreStatus | None]


@dataclass(frozen=True, slots=True)
class _Room:
    """What may be taken now, and what can be had in all."""

    now: int
    reach: int


@dataclass(slots=True)
class _Sorted:
    """Places of keys, and what they need."""

    now: list[int]
    soon: list[int]
    now_au: int = 0
    soon_au: int = 0
    over_quota: int = 0


_UNBOUNDED = _Room(1 << 62, 1 << 62)


class Admission:
    """Decides for one engine."""

    def __init__(self, state: EngineState, removal: Removal, eviction: Eviction) -> None:
        self._state = state
        self._removal = removal
        self._eviction = eviction

    def admit(self, name: bytes, wanted: I64, units: I64, entries: Entries) -> tuple[I64, bool]:
        """Decide for the wanted keys; makes room for those that can get it soon, refuses the rest.

        Args:
            name: the scope.
            wanted: places of the keys.
            units: what each key needs, by place.
            entries: gets the refusals, by place.

        Returns:
            Places of the keys to reserve, and whether others wait.
        """
        if not len(wanted):
            return wanted, False
        table, removal = self._state.slots, self._removal
        scope = self._state.names.scopes.get(name)
        quota, limit_au = self._within(scope, name)
        total_au = int(units[wanted].sum())
        free_au, free_objects = table.units_in[ABSENT], table.objects_in[ABSENT]
        if total_au <= min(free_au, quota.now) and len(wanted) <= free_objects and limit_au != 0:
            return wanted, False
        able_au, able_objects = self._eviction.reclaimable()
        chosen = self._sort(
            wanted,
            units,
            entries,
            (quota, limit_au),
            _Room(free_au, free_au + removal.pending_au + able_au),
            _Room(free_objects, free_objects + removal.pending_objects + able_objects),
        )
        self._count(name, chosen.over_quota)
        need_au = chosen.now_au + chosen.soon_au
        if chosen.soon:
            if scope is not None and need_au > quota.now:
                self._eviction.make_room_within(scope, need_au - quota.now)
            need_objects = len(chosen.now) + len(chosen.soon)
            self._eviction.make_room(
                scope, need_au, max(0, need_au - free_au), max(0, need_objects - free_objects)
            )
        return np.array(chosen.now, np.int64), bool(chosen.soon)

    def gather(self, name: bytes, place: int, need_au: int, entries: Entries) -> bool:
        """There is room for a key, but in more pieces than an object may have: evict, so that pieces join.

        What goes first lies together more often than not, so a part of the object's own size is evicted at a time, and then it is
        tried again. It ends, since each time less is left that could go.

        Returns:
            Whether the key waits; else it is refused.
        """
        state = self._state
        if self._eviction.reclaimable()[0] + self._removal.pending_au:
            scope = state.names.scopes.get(name)
            self._eviction.make_room(scope, need_au, -(-need_au // GATHER_STEPS), 0)
            return True
        entries[place] = StoreStatus.NO_SPACE
        state.counters.no_space += 1
        return False

    def _count(self, name: bytes, over_quota: int) -> None:
        if over_quota:
            self._state.counters.over_quota += over_quota
            own = self._state.quotas.counters.get(name)
            if own is not None:
                own.over_quota += over_quota

    def _within(self, scope: Scope | None, name: bytes) -> tuple[_Room, int | None]:
        """What the quota leaves, and the limit itself."""
        if self._state.rules.enforcement is not Enforcement.HARD:
            return _UNBOUNDED, None
        limit_au = self._state.quotas.limit_au_of(name) if scope is None else scope.limit_au
        if limit_au is None:
            return _UNBOUNDED, None
        if scope is None:
            return _Room(limit_au, limit_au), limit_au
        left_au = limit_au - scope.charged_au
        if self._removal.holding:
            return _Room(left_au, left_au), limit_au  # what is evicted now would not be free soon
        return _Room(left_au, left_au + scope.pending_au + scope.live_au - scope.guarded_live_au), limit_au

    def _sort(
        self,
        wanted: I64,
        units: I64,
        entries: Entries,
        quota: tuple[_Room, int | None],
        card: _Room,
        objects: _Room,
    ) -> _Sorted:
        within, limit_au = quota
        chosen = _Sorted([], [])
        now_max = min(within.now, card.now)
        for i, need_au in zip(wanted.tolist(), units[wanted].tolist(), strict=True):
            sum_au, count = chosen.now_au + chosen.soon_au + need_au, len(chosen.now) + len(chosen.soon) + 1
            if limit_au == 0 or sum_au > within.reach:
                entries[i] = StoreStatus.OVER_QUOTA
                chosen.over_quota += 1
            elif sum_au > card.reach or count > objects.reach:
                entries[i] = StoreStatus.NO_SPACE
                self._state.counters.no_space += 1
            elif chosen.now_au + need_au <= now_max and len(chosen.now) + 1 <= objects.now:
                chosen.now.append(i)
                chosen.now_au += need_au
            else:
                chosen.soon.append(i)
                chosen.soon_au += need_au
        return chosen
