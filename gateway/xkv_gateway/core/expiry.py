"""Takes away what is over its time: passes over all slots, a bounded number of them a call.

Lookups, loads and stores do not wait for that: to them an object is gone once it is over its time (`lifetimes.over`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .lifecycle import LIVE
from .lifetimes import NO_END, ROUNDED_S, record_period_s
from .records import DeleteCause

if TYPE_CHECKING:
    from .eviction import Eviction
    from .state import EngineState

SCAN_SLOTS: Final = 1 << 16
"""Slots looked at in one call: a millisecond or two."""
VICTIMS: Final = 2048
"""... and taken away in one call."""
PAUSE_S: Final = 1
SLOTS_PER_PAUSE_S: Final = 1_000_000
"""Between two passes are PAUSE_S, and one more second for so many slots: passes cost a percent of a core or so."""


class Expiry:
    """The passes of one engine."""

    def __init__(self, state: EngineState, eviction: Eviction) -> None:
        self._state = state
        self._eviction = eviction
        self._at: int | None = None
        """The next slot to look at; None: no pass is under way."""
        self._began_s = 0
        self._due_s = 0
        self._earliest_s = NO_END
        self._record_s = 0
        """When the journal is to be told the time, although nothing may be stored."""

    def next_at_ns(self, now_ns: int) -> int | None:
        """When `step` has something to do; a time that has passed: at once. None: nothing."""
        lifetimes = self._state.lifetimes
        if not lifetimes.rules:
            return None
        if self._at is not None or lifetimes.changed:
            return now_ns
        return max(now_ns, lifetimes.at_ns(min(self._due_s, self._record_s)))

    def step(self) -> None:
        """Begin a pass if it is time, and go on with it, a bounded amount."""
        lifetimes = self._state.lifetimes
        if not lifetimes.rules:
            self._at = None
            return
        if lifetimes.now_s >= self._record_s:
            self._record_time()
        if lifetimes.changed:
            lifetimes.changed = False
            self._record_s = 0
            self._begin()
        elif self._at is None:
            if lifetimes.now_s < self._due_s:
                return
            self._begin()
        self._go_on()

    def _record_time(self) -> None:
        """After a kill what was read counts as read when the card was last told the time: that must not be long ago."""
        lifetimes = self._state.lifetimes
        period_s = record_period_s(lifetimes.rules.values())
        self._record_s = NO_END
        if period_s:
            lifetimes.record_time()
            self._record_s = lifetimes.now_s + period_s

    def _begin(self) -> None:
        self._at, self._earliest_s, self._began_s = 0, NO_END, self._state.lifetimes.now_s

    def _go_on(self) -> None:
        state, table = self._state, self._state.slots
        assert self._at is not None
        first = self._at
        last = min(first + SCAN_SLOTS, table.fresh)
        slots = np.flatnonzero(table.state[first:last] == LIVE) + first
        if len(slots):
            ends = state.lifetimes.ends_s(slots)
            victims = slots[ends <= state.lifetimes.now_s]
            if len(victims) > VICTIMS:
                victims = victims[:VICTIMS]
                last = int(victims[-1]) + 1
                ends = ends[slots < last]
            left = ends[ends > state.lifetimes.now_s]
            self._earliest_s = min(self._earliest_s, int(left.min(initial=NO_END)))
            self._eviction.take(victims, DeleteCause.EVICTED_TTL)
        self._at = last
        if last >= table.fresh:
            self._end()

    def _end(self) -> None:
        """Whatever was stored or used meanwhile has the shortest time before it that any rule allows."""
        rules = self._state.lifetimes.rules.values()
        shortest_s = min(limit_s for rule in rules for limit_s in (rule.idle_s, rule.total_s) if limit_s)
        pause_s = PAUSE_S + self._state.slots.fresh // SLOTS_PER_PAUSE_S
        now_s = self._state.lifetimes.now_s
        self._due_s = max(now_s + pause_s, min(self._earliest_s, self._began_s + shortest_s + ROUNDED_S))
        self._at = None
