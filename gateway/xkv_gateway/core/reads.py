"""Lookups, loads and leases: everything that only reads objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .errors import StalePlan, UnknownLease
from .leases import Lease
from .lifecycle import LIVE
from .slots import has_repetitions
from .state import rows
from .types import NO_LSN, LeaseId, LookupMode, LookupOutcome, ReadPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .arrays import Bools, Slots
    from .names import Home
    from .removal import Removal
    from .state import EngineState
    from .types import BeginLoad, Extent, Lookup, Lsn

_ENDED_TWICE: Final = "a load was ended twice"
LEASE_ID_BYTES: Final = 16
EXPIRIES_PER_TURN: Final = 1024
"""Leases cleaned up in one call; those left are over all the same, by the clock."""
EXPIRED_KEYS_PER_TURN: Final = 1 << 14
"""... and objects that they cover: a lease may cover thousands."""


class Reads:
    """Reads objects, guards them while they are read."""

    def __init__(self, state: EngineState, removal: Removal, entropy: Callable[[int], bytes]) -> None:
        self._state = state
        self._removal = removal
        self._entropy = entropy
        self._granted: tuple[LeaseId, Home, Slots, int, int] | None = None

    def lookup(self, request: Lookup, now_ns: int) -> LookupOutcome:
        """See `Engine.lookup`."""
        state, table = self._state, self._state.slots
        low, high = state.digester.digest(request.namespace, request.scope, request.keys)
        slots, live = state.index.find(low, high)
        live &= table.state.take(slots) == LIVE
        if state.wiping:
            live &= state.visible(slots, request.namespace, request.scope)
        if state.lifetimes.rules and (over := state.lifetimes.over(request.namespace, slots)) is not None:
            live &= ~over
        first_miss = live.tobytes().find(0)
        sizes: list[int | None]
        if request.mode is LookupMode.PREFIX:
            found = slots if first_miss < 0 else slots[:first_miss]
            sizes = table.size_bytes.take(found).tolist()
        else:
            found = slots if first_miss < 0 else slots[live]
            sizes = table.size_bytes.take(slots).tolist()
            if first_miss >= 0:
                for i in np.flatnonzero(~live).tolist():
                    sizes[i] = None
        hits = len(found)
        state.counters.lookup_hits += hits
        state.counters.lookup_misses += len(slots) - hits
        if state.quotas.counters and (own := state.quotas.counters.get(request.scope)) is not None:
            own.lookup_hits += hits
            own.lookup_misses += len(slots) - hits
        if not hits or request.lease_ttl_ns <= 0:
            return LookupOutcome(hits, sizes, None, 0)
        home = state.names.home(int(table.home[found[0]]))
        ttl_ns = min(request.lease_ttl_ns, state.limits.lease_ttl_max_ns)
        leased_bytes = sum(filter(None, sizes))
        lease = self._grant(home, found, leased_bytes, now_ns + ttl_ns, now_ns)
        return LookupOutcome(hits, sizes, lease, ttl_ns if lease is not None else 0)

    def begin_load(self, request: BeginLoad, now_ns: int) -> list[ReadPlan | None]:
        """See `Engine.begin_load`."""
        state, table = self._state, self._state.slots
        low, high = state.digester.digest(request.namespace, request.scope, request.keys)
        found: Bools
        if request.lease is None:
            slots, found = state.index.find(low, high)
            found &= table.state[slots] == LIVE
            if state.wiping:
                found &= state.visible(slots, request.namespace, request.scope)
            if state.lifetimes.rules and (over := state.lifetimes.over(request.namespace, slots)) is not None:
                found &= ~over
        else:
            lease = state.leases.find(request.lease, now_ns)
            if lease is None or lease.home.condemned:
                self._count_loads(request.scope, 0, len(request.keys))
                return [None] * len(request.keys)
            slots, found = lease.covered(low, high, table.digest_low, table.digest_high)
        pinned = slots if np.count_nonzero(found) == len(found) else slots[found]
        self._count_loads(request.scope, len(pinned), len(slots) - len(pinned))
        if not len(pinned):
            return [None] * len(slots)
        table.pin(pinned)
        alive = pinned[table.state[pinned] == LIVE]
        if len(alive):
            scope = state.names.home(int(table.home[alive[0]])).scope
            state.recency.touch(scope.uses, scope.ident, alive, scope.members)
            table.used_s[alive] = state.lifetimes.now_s
        plans = rows(
            ReadPlan,
            pinned.tolist(),
            table.generation[pinned].tolist(),
            table.size_bytes[pinned].tolist(),
            table.checksum[pinned].tolist(),
            state.extents_of(pinned),
        )
        if len(pinned) == len(slots):
            return list(plans)
        return [next(plans) if hit else None for hit in found.tolist()]

    def end_load(self, plans: Sequence[ReadPlan], corrupt: Sequence[ReadPlan], now_ns: int) -> Lsn:
        """See `Engine.end_load`."""
        if not plans:
            return NO_LSN
        table = self._state.slots
        slots = self._pinned(plans)
        lsn = NO_LSN
        if corrupt:
            bad = np.unique(self._pinned(corrupt))
            assert np.isin(bad, slots).all(), "a corrupt plan that is not among the plans"
            self._state.counters.corrupt += len(bad)
            lsn = self._removal.doom_corrupt(bad, now_ns + self._state.limits.corrupt_hold_ns)
        self._removal.unguarded(table.unpin(slots))
        return lsn

    def renew(self, ident: LeaseId, ttl_ns: int, now_ns: int) -> int:
        """See `Engine.renew`."""
        state, table = self._state, self._state.slots
        lease = state.leases.find(ident, now_ns)
        if lease is None or lease.home.condemned or not (table.state[lease.slots] == LIVE).all():
            msg = "the lease ended, or cannot be kept"
            raise UnknownLease(msg)
        granted_ns = min(ttl_ns, state.limits.lease_ttl_max_ns)
        state.leases.prolong(lease, now_ns + granted_ns)
        state.counters.leases_renewed += 1
        return granted_ns

    def release(self, ident: LeaseId, now_ns: int) -> None:
        """See `Engine.release`."""
        lease = self._state.leases.find(ident, now_ns)
        if lease is None:
            msg = "the lease ended"
            raise UnknownLease(msg)
        self._state.counters.leases_released += 1
        self._end(lease)

    def expire(self, now_ns: int) -> None:
        """Clean up leases whose time is over, at most EXPIRIES_PER_TURN, and no further one after EXPIRED_KEYS_PER_TURN."""
        keys = 0
        for _ in range(EXPIRIES_PER_TURN):
            lease = self._state.leases.due(now_ns)
            if lease is None or keys >= EXPIRED_KEYS_PER_TURN:
                return
            keys += len(lease.slots)
            self._state.counters.leases_expired += 1
            self._end(lease)

    def settle(self, now_ns: int) -> int:
        """Enter the lease that the last lookup granted, and let the time go on; returns `now_ns`."""
        self.enter()
        self._state.lifetimes.advance(now_ns)
        return now_ns

    def enter(self) -> None:
        """Enter the lease that the last lookup granted, if it is not yet.

        What a granted lease changes is not needed for the answer, so it is done behind it: before anything else looks.
        """
        granted, self._granted = self._granted, None
        if granted is not None:
            ident, home, slots, leased_bytes, deadline_ns = granted
            state, table = self._state, self._state.slots
            unique = state.recency.touch(home.scope.uses, home.scope.ident, slots, home.scope.members)
            table.used_s[unique] = state.lifetimes.now_s
            if len(unique) != len(slots):
                leased_bytes = int(table.size_bytes[unique].sum(dtype=np.int64))
            table.lease(unique)
            generations = table.generation[unique]
            state.leases.add(Lease(ident, home, unique, generations, leased_bytes, deadline_ns))

    def granted(self, ident: LeaseId) -> list[tuple[tuple[Extent, ...], int, int]]:
        """See `Engine.leased`."""
        assert self._granted is not None, "a lookup granted it, and nothing came after"
        assert self._granted[0] == ident, "a lookup granted it, and nothing came after"
        table, slots = self._state.slots, self._granted[2]
        extents = self._state.extents_of(slots)
        return list(
            zip(extents, table.size_bytes[slots].tolist(), table.checksum[slots].tolist(), strict=True)
        )

    def _grant(
        self, home: Home, slots: Slots, leased_bytes: int, deadline_ns: int, now_ns: int
    ) -> LeaseId | None:
        if not self._may_lease(home, leased_bytes):
            self.expire(now_ns)
            if not self._may_lease(home, leased_bytes):
                self._state.counters.leases_refused += 1
                return None
        ident = LeaseId(self._entropy(LEASE_ID_BYTES))
        self._granted = (ident, home, slots, leased_bytes, deadline_ns)
        self._state.counters.leases_granted += 1
        return ident

    def _count_loads(self, scope: bytes, hits: int, misses: int) -> None:
        self._state.counters.load_hits += hits
        self._state.counters.load_misses += misses
        counted = self._state.quotas.counters
        if counted and (own := counted.get(scope)) is not None:
            own.load_hits += hits
            own.load_misses += misses

    def _may_lease(self, home: Home, leased_bytes: int) -> bool:
        limits, scope = self._state.limits, home.scope
        return (
            scope.leases < limits.leases_per_scope_max
            and scope.leased_bytes + leased_bytes <= limits.leased_bytes_per_scope_max
        )

    def _end(self, lease: Lease) -> None:
        state = self._state
        assert (state.slots.generation[lease.slots] == lease.generations).all(), "a leased slot was reused"
        state.leases.remove(lease)
        self._removal.unguarded(state.slots.unlease(lease.slots))
        state.drop_reference(lease.home, 1)

    def _pinned(self, plans: Sequence[ReadPlan]) -> Slots:
        """Slots of plans that are pinned, or StalePlan with nothing changed (R7)."""
        table = self._state.slots
        slots = np.array([plan.slot for plan in plans], np.intp)
        if len(plans) == 1:
            slot = plans[0].slot
            if not table.pins[slot] or table.generation[slot] != plans[0].generation:
                raise StalePlan(_ENDED_TWICE)
            return slots
        generations = np.array([plan.generation for plan in plans], np.uint32)
        enough = np.count_nonzero(table.pins.take(slots)) == len(slots)
        if enough and has_repetitions(slots):
            unique, counts = np.unique(slots, return_counts=True)
            enough = bool((table.pins[unique] >= counts).all())
        if not enough or np.count_nonzero(table.generation.take(slots) != generations):
            raise StalePlan(_ENDED_TWICE)
        return slots
