"""Which objects go to make room, and when: on demand, in a cycle over the whole card, in a cycle for a quota.

A victim is LIVE without a guard; which one comes first is the policy's matter. Between two cycles nothing is evicted but what a store
has asked for. All work is bounded: what a call does not finish, the next one goes on with.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from .fairness import FairOrder
from .lifecycle import ABSENT, DOOMED, LIVE
from .order import Need, Order
from .records import DeleteCause
from .tenancy import Enforcement, EvictionPolicy

if TYPE_CHECKING:
    from .arrays import Slots
    from .names import Scope
    from .removal import Removal
    from .state import EngineState
    from .tenancy import EvictionRules

VICTIMS_PER_TICK: Final = 2048
VICTIMS_PER_STORE: Final = 4096
"""Bounds the time that one call takes; a store that needs more asks again."""
TURNS_PER_CALL: Final = 512
"""Scopes that give, one after the other, in one call."""
PORTIONS_PER_CALL: Final = 64
PORTION: Final = 256
"""The fullest scope gives in portions of 1/256 of the card; then it is looked again which one is the fullest."""
SCOPES_PER_TICK: Final = 2048
"""Scopes judged in one call of a cycle."""


class Eviction:
    """Makes room."""

    def __init__(self, state: EngineState, removal: Removal) -> None:
        self._state = state
        self._removal = removal
        self._order = Order(state)
        self._promised_au = 0
        self._promised_objects = 0
        self._cycle_at_ns = 0
        """When the next cycle may begin."""
        self._pass: Need | None = None
        """What the cycle over the whole card has yet to evict."""
        self._card_next = False
        """The cycle has yet to look at the whole card."""
        self._suspects: dict[Scope, None] = {}
        """Scopes that may have reached what their quota allows."""
        self._to_judge: deque[Scope] = deque()
        self._trims: deque[tuple[Scope, Need]] = deque()
        self.set_rules(state.rules)

    def set_rules(self, rules: EvictionRules) -> None:
        """From now on these hold. What a cycle has begun is finished by them."""
        assert rules.trigger_watermark > 0 < rules.eviction_ratio <= 1
        state = self._state
        self._rules = rules
        self._isolated = rules.policy is EvictionPolicy.ISOLATED_LRU
        self._soft = rules.enforcement is Enforcement.SOFT
        self._able = rules.policy is not EvictionPolicy.NOOP
        self._fair = FairOrder(state.names, state.limits.capacity_au)
        self._suspects.clear()
        watched = self._able and (self._isolated or self._soft)
        state.quotas.on_limit = self._fair.list if self._isolated else None
        state.accounts.watch = self._watch if watched else None
        for scope in state.names.scopes.values():
            scope.listed = None
            if watched:
                self._watch(scope)

    # --- on demand ----------------------------------------------------------------------------------------

    def reclaimable(self) -> tuple[int, int]:
        """Units and objects that may be evicted now."""
        if not self._able or self._removal.holding:
            return 0, 0
        table = self._state.slots
        return (
            table.units_in[LIVE] - table.guarded_live_au,
            table.objects_in[LIVE] - table.guarded_live_objects,
        )

    def make_room(self, scope: Scope | None, need_au: int, short_au: int, short_objects: int) -> None:
        """Evict what is needed beyond free space and beyond doomed space that no other store waits for.

        Stores that wait are not known here; what was promised to them is taken off as tombstones complete, so
        waiting stores do not count on the same space, and a store that went away leaves free space, no debt.

        Args:
            scope: who asks, if it holds anything.
            need_au: all that it asks for.
            short_au: what is missing of that.
            short_objects: objects that are missing.
        """
        removal = self._removal
        self._promised_au = min(self._promised_au, removal.pending_au)
        self._promised_objects = min(self._promised_objects, removal.pending_objects)
        need = Need(
            short_au - (removal.pending_au - self._promised_au),
            short_objects - (removal.pending_objects - self._promised_objects),
            VICTIMS_PER_STORE,
            TURNS_PER_CALL,
        )
        self._evict(need, DeleteCause.EVICTED_DEMAND, scope, need_au)
        self._promised_au = min(self._promised_au + short_au, removal.pending_au)
        self._promised_objects = min(self._promised_objects + short_objects, removal.pending_objects)

    def make_room_within(self, scope: Scope, short_au: int) -> None:
        """Evict the scope's own oldest, as `make_room`, so that its usage allows for `short_au` more."""
        scope.promised_au = min(scope.promised_au, scope.pending_au)
        need = Need(short_au - (scope.pending_au - scope.promised_au), 0, VICTIMS_PER_STORE, TURNS_PER_CALL)
        self._doom(self._order.oldest_of(scope, need), DeleteCause.EVICTED_QUOTA)
        scope.promised_au = min(scope.promised_au + short_au, scope.pending_au)

    # --- cycles -------------------------------------------------------------------------------------------

    def next_at_ns(self, now_ns: int) -> int | None:
        """When `run` has something to do; a time that has passed: at once. None: nothing."""
        if self._pass is not None or self._trims or self._to_judge or self._card_next:
            return now_ns
        quotas = self._state.quotas
        if self._suspects or quotas.changed or quotas.leaving:
            return max(now_ns, self._cycle_at_ns)
        return max(now_ns, self._cycle_at_ns) if self._full() and self.reclaimable()[1] else None

    def run(self, now_ns: int) -> None:
        """Begin the cycle if it is time, and go on with it, a bounded amount."""
        due = self.next_at_ns(now_ns)
        if due is None or due > now_ns:
            return
        if self._pass is None and not self._trims and not self._to_judge and not self._card_next:
            self._begin(now_ns)
        for _ in range(min(SCOPES_PER_TICK, len(self._to_judge))):
            self._judge(self._to_judge.popleft())
        budget = Need(1, 0, VICTIMS_PER_TICK, TURNS_PER_CALL)
        while self._trims and not budget.met:
            self._trim(budget)
        if self._card_next and not self._trims and not self._to_judge:
            self._card_next = False
            self._begin_pass()
        if self._pass is not None and not budget.met:
            self._go_on(self._pass, budget)

    def _begin(self, now_ns: int) -> None:
        quotas = self._state.quotas
        self._cycle_at_ns = now_ns + self._rules.interval_ns
        self._state.counters.eviction_cycles += 1
        quotas.cycle()
        changed, quotas.changed = quotas.changed, set()
        if self._able:
            self._suspects.update(dict.fromkeys(changed))
        self._to_judge.extend(self._suspects)
        self._suspects = {}
        self._card_next = True

    def _begin_pass(self) -> None:
        """Look at the whole card, when what quotas take is gone."""
        rules, limits = self._rules, self._state.limits
        if self._full() and self.reclaimable()[1]:
            used_au, used_objects = self._used()
            trigger, ratio = rules.trigger_watermark, rules.eviction_ratio
            self._pass = Need(
                math.ceil(ratio * used_au) if used_au >= trigger * limits.capacity_au else 0,
                math.ceil(ratio * used_objects) if used_objects >= trigger * limits.max_objects else 0,
                VICTIMS_PER_TICK,
                TURNS_PER_CALL,
            )
            self._state.counters.eviction_passes += 1

    def _go_on(self, need: Need, budget: Need) -> None:
        need.victims_max, need.turns_max = budget.victims_max, budget.turns_max
        self._evict(need, DeleteCause.EVICTED_WATERMARK, None, 0)
        # It also ends where nothing more can be evicted; the next cycle tries again.
        if need.enough or not need.met:
            self._pass = None

    def _used(self) -> tuple[int, int]:
        """Units and objects in use, without what is doomed already."""
        table = self._state.slots
        limits, units, objects = self._state.limits, table.units_in, table.objects_in
        return (
            limits.capacity_au - units[ABSENT] - units[DOOMED],
            limits.max_objects - objects[ABSENT] - objects[DOOMED],
        )

    def _full(self) -> bool:
        used_au, used_objects = self._used()
        limits, share = self._state.limits, self._rules.trigger_watermark
        return used_au >= share * limits.capacity_au or used_objects >= share * limits.max_objects

    # --- quotas, in a cycle -------------------------------------------------------------------------------

    def _watch(self, scope: Scope) -> None:
        """A scope holds more than before, or has more to give."""
        if self._isolated:
            self._fair.list(scope)
        if self._soft and self._excess(scope) is not None:
            self._suspects[scope] = None

    def _excess(self, scope: Scope) -> Need | None:
        """What a cycle takes from a scope for its quota, as things are now."""
        limit_au, held_au = scope.limit_au, scope.held_au
        if limit_au is None or not scope.members:
            return None
        if not limit_au:
            return Need(held_au, scope.members, VICTIMS_PER_TICK, 1)
        if self._soft:
            rules = self._rules
            full = held_au >= rules.trigger_watermark * limit_au
            excess_au = math.ceil(rules.eviction_ratio * held_au) if full else 0
        else:
            excess_au = held_au - limit_au
        return Need(excess_au, 0, VICTIMS_PER_TICK, 1) if excess_au > 0 else None

    def _judge(self, scope: Scope) -> None:
        need = self._excess(scope) if _in_use(self._state, scope) else None
        if need is not None:
            self._trims.append((scope, need))

    def _trim(self, budget: Need) -> None:
        scope, need = self._trims[0]
        need.victims_max, need.turns_max = budget.victims_max, 1
        if _in_use(self._state, scope):
            self._doom(self._order.oldest_of(scope, need), DeleteCause.EVICTED_QUOTA)
            budget.victims_max = need.victims_max
            if need.victims_max <= 0 and not need.enough:
                return
            if self._excess(scope) is not None:
                # A share was taken and it is still too much, or the rest is guarded, or not live yet.
                self._suspects[scope] = None
        budget.turns_max -= 1
        self._trims.popleft()

    # --- the policy ---------------------------------------------------------------------------------------

    def _evict(self, need: Need, cause: DeleteCause, asking: Scope | None, more_au: int) -> None:
        """Doom what the policy says until `need` is met or nothing is left; `need` says what is still missing."""
        if not self._able or need.enough:
            return
        if not self._isolated:
            self._doom(self._order.oldest_of_all(need), cause)
            return
        limits = self._state.limits
        for _ in range(PORTIONS_PER_CALL):
            scope = self._fair.fullest(asking, more_au)
            if scope is None:
                return
            portion = Need(
                min(need.units, max(1, limits.capacity_au // PORTION)),
                min(need.objects, max(1, limits.max_objects // PORTION)),
                need.victims_max,
                1,
            )
            before = portion.units, portion.objects, portion.victims_max
            self._doom(self._order.oldest_of(scope, portion), cause)
            need.units -= before[0] - portion.units
            need.objects -= before[1] - portion.objects
            need.victims_max = portion.victims_max
            if need.met:
                return
        need.turns_max = 0

    def _doom(self, victims: list[Slots], cause: DeleteCause) -> None:
        if victims:
            self.take(np.concatenate(victims), cause)

    def take(self, slots: Slots, cause: DeleteCause) -> None:
        """Evict these (LIVE, no repetitions), and count them."""
        if len(slots):
            self._count(slots, cause)
            self._removal.doom(slots, cause)

    def _count(self, slots: Slots, cause: DeleteCause) -> None:
        state, name = self._state, cause.name.lower()
        sizes = state.slots.size_bytes[slots].astype(np.int64)
        for attribute, amount in ((name, len(slots)), (f"{name}_bytes", int(sizes.sum()))):
            setattr(state.counters, attribute, getattr(state.counters, attribute) + amount)
        if not state.quotas.counters:
            return
        for home, count, size in state.accounts.by_home(slots, sizes):
            own = state.quotas.counters.get(home.scope.name)
            if own is not None:
                setattr(own, name, getattr(own, name) + count)
                own.evicted_bytes += size


def _in_use(state: EngineState, scope: Scope) -> bool:
    return state.names.scopes.get(scope.name) is scope
