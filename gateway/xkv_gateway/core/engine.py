"""The engine: one synchronous mutator that knows what is held, where, and who may read it. No I/O, clock or randomness.

It never awaits, so between two calls the state is whole and no lock exists. Time is an argument (monotonic ns). What must
survive is told as records: the shell appends those of one turn as one journal write, calls `persisted`, and then
releases the replies that waited for their LSN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .audit import audit
from .eviction import Eviction
from .expiry import Expiry
from .image import EngineImage
from .inspection import Inspection
from .lifecycle import ABSENT, COMMITTING, DOOMED, LIVE, QUARANTINED, RESERVED
from .reads import Reads
from .records import DeleteCause, Record
from .removal import Removal
from .state import EngineState
from .stores import Stores
from .tickets import Tickets
from .types import DeleteOutcome, Usage, WipeOutcome
from .wiping import Wiping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .arrays import Bools, Slots
    from .counters import Counters
    from .restore import Restored
    from .tenancy import EvictionRules
    from .types import (
        BeginLoad,
        BeginStore,
        CommitOutcome,
        Delete,
        EngineLimits,
        LeaseId,
        Lookup,
        LookupOutcome,
        Lsn,
        ReadPlan,
        StoreOutcome,
        WritePlan,
    )


class Engine:
    """The façade. Every method takes the time, does its work at once and leaves a whole state.

    Args:
        limits: what the engine is built for; all tables have their final size from the start.
        digest_secret: the card's secret that identities are digested with, 16 to 64 bytes.
        entropy: gives that many unguessable bytes, for lease ids.
        restored: what a card held, to begin with instead of nothing.
        time_s: the card time with which the engine begins (`lifetimes.resumed_s`).
        held_until_ns: what is doomed is not free before, since clients of the run before may still use it (R3).
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        digest_secret: bytes,
        entropy: Callable[[int], bytes],
        restored: Restored | None = None,
        time_s: int = 0,
        held_until_ns: int = 0,
    ) -> None:
        self._state = EngineState(limits, digest_secret, restored.table if restored is not None else None)
        self._state.lifetimes.begin(time_s)
        self._removal = Removal(self._state, held_until_ns)
        self.quotas = self._state.quotas
        """Registered tenants."""
        self.lifetimes = self._state.lifetimes
        """How long objects may live."""
        self.budget = self._state.budget
        """Of bytes written a day."""
        self.wiping = Wiping(self._state, self._removal)
        """Wipes under way."""
        self.inspection = Inspection(self._state)
        """Who holds what, for operators."""
        if restored is not None:
            restored.fill(self._state, self._removal, self.wiping)
        self._eviction = Eviction(self._state, self._removal)
        self._expiry = Expiry(self._state, self._eviction)
        self._stores = Stores(self._state, self._removal, self._eviction, self.wiping)
        self._reads = Reads(self._state, self._removal, entropy)
        self.leased = self._reads.granted
        """Extents, size and checksum of each object of a lease that the last lookup granted, in the order of its hits."""
        self.tickets = Tickets(limits, self.counters, self._stores, entropy, self._reads.settle)
        """Room that clients write to themselves."""
        self._now_ns = 0

    @property
    def counters(self) -> Counters:
        """What happened since the start."""
        return self._state.counters

    @property
    def rules(self) -> EvictionRules:
        """The rules of eviction that hold now."""
        return self._state.rules

    @property
    def last_lsn(self) -> Lsn:
        """The LSN of the newest record."""
        return self._state.log.last_lsn

    @property
    def image(self) -> EngineImage:
        """What a checkpoint is made of."""
        self._reads.enter()
        return EngineImage(self._state, self._removal, self.wiping)

    # --- reading ------------------------------------------------------------------------------------------

    def lookup(self, request: Lookup, now_ns: int) -> LookupOutcome:
        """Which keys are held (R2), and a lease over the hits where asked for and within the scope's bounds.

        Only with a lease granted do the objects count as used. A granted lease is entered into the tables by the next call of
        any method (it is due at once, see `next_deadline`): so the reply need not wait for that.
        """
        self._now_ns = self._reads.settle(now_ns)
        return self._reads.lookup(request, now_ns)

    def begin_load(self, request: BeginLoad, now_ns: int) -> list[ReadPlan | None]:
        """Pin the objects of the keys for reading; None: a miss. The same key twice gives two pins.

        With a lease, its generations are pinned, also if they are doomed, but not once they were wiped.
        """
        self._now_ns = self._reads.settle(now_ns)
        return self._reads.begin_load(request, now_ns)

    def end_load(self, plans: Sequence[ReadPlan], corrupt: Sequence[ReadPlan], now_ns: int) -> Lsn:
        """Unpin. The corrupt ones among the plans are removed, and their units held out of use (R6).

        Returns:
            The LSN of their delete records, or NO_LSN.

        Raises:
            StalePlan: a plan is not pinned; nothing was changed.
        """
        self._now_ns = self._reads.settle(now_ns)
        return self._reads.end_load(plans, corrupt, now_ns)

    def renew(self, lease: LeaseId, ttl_ns: int, now_ns: int) -> int:
        """Let a lease end `ttl_ns` from now, or at the longest that is allowed.

        Returns:
            The granted ns.

        Raises:
            UnknownLease: it ended or is unknown, or one of its objects is doomed.
        """
        self._now_ns = self._reads.settle(now_ns)
        return self._reads.renew(lease, ttl_ns, now_ns)

    def release(self, lease: LeaseId, now_ns: int) -> None:
        """End a lease.

        Raises:
            UnknownLease: it ended before, or is unknown.
        """
        self._now_ns = self._reads.settle(now_ns)
        self._reads.release(lease, now_ns)

    # --- writing ------------------------------------------------------------------------------------------

    def begin_store(self, request: BeginStore, now_ns: int) -> StoreOutcome:
        """Reserve room for each key that is not held; evicts what that needs, never more, never for a key that cannot fit."""
        self._now_ns = self._reads.settle(now_ns)
        self._reads.expire(now_ns)
        self.tickets.expire(now_ns)
        return self._stores.begin(request)

    def commit_store(
        self, plans: Sequence[WritePlan], checksums: Sequence[int], now_ns: int
    ) -> CommitOutcome:
        """The payloads of the plans are complete on the device; visible once the outcome's LSN is durable.

        A plan that was cancelled, committed or aborted before is CANCELLED.

        Raises:
            StalePlan: the same plan twice; nothing was changed.
        """
        self._now_ns = self._reads.settle(now_ns)
        return self._stores.commit(plans, checksums)

    def abort_store(self, plans: Sequence[WritePlan], now_ns: int, settles_at_ns: int | None) -> None:
        """Give reservations back; `settles_at_ns` says from when no write of theirs can land (None: already, R4).

        A plan that was committed or aborted before is left alone.

        Raises:
            StalePlan: the same plan twice; nothing was changed.
        """
        self._now_ns = self._reads.settle(now_ns)
        self._stores.abort(plans, settles_at_ns)

    def delete(self, request: Delete, now_ns: int) -> DeleteOutcome:
        """Forget keys. Stores of them that are under way are cancelled; commits under way come first, then go."""
        self._now_ns = self._reads.settle(now_ns)
        state, table = self._state, self._state.slots
        low, high = state.digester.digest(request.namespace, request.scope, request.keys)
        slots, held = state.index.find(low, high)
        if state.wiping:
            held &= state.visible(slots, request.namespace, request.scope)
        slots = np.unique(slots[held])
        slots = slots[~self._expired(request.namespace, slots)]
        reserved = table.state[slots] == RESERVED
        doomed = slots[~reserved]
        if reserved.any():
            self._removal.cancel(slots[reserved])
        self._removal.doom(doomed, DeleteCause.DELETED)
        state.counters.deleted += len(doomed)
        # Also a key that someone else deleted a moment ago is gone for good only with that record.
        return DeleteOutcome(len(doomed), state.log.unless_durable(self._removal.last_tombstone_lsn))

    def _expired(self, namespace: str, slots: Slots) -> Bools:
        """Which of these are over their time; they are taken away."""
        over = self._state.lifetimes.over(namespace, slots)
        if over is None:
            return np.zeros(len(slots), np.bool_)
        over &= self._state.slots.state[slots] == LIVE
        self._eviction.take(slots[over], DeleteCause.EVICTED_TTL)
        return over

    def wipe(self, namespace: str, scope: bytes | None, now_ns: int, *, erase: bool = False) -> WipeOutcome:
        """Forget all of a namespace, or of one scope in it: invisible from here on, also for loads with a lease.

        The tables follow in this call and in the next ticks. With `erase` the units are handed out by `wiping.take_erasable`
        before they are free; without, they are free as deleted ones are.
        """
        self._now_ns = self._reads.settle(now_ns)
        return self.wiping.wipe(namespace, scope, erase=erase)

    def forget_beyond(self, capacity_au: int, now_ns: int) -> int:
        """Remove the live objects that have units from this one on: their bytes are gone. Returns how many."""
        self._now_ns = self._reads.settle(now_ns)
        slots = self._state.slots.reaching(capacity_au)
        slots = slots[self._state.slots.state[slots] == LIVE]
        self._removal.doom(slots, DeleteCause.CORRUPT)
        return len(slots)

    def set_rules(self, rules: EvictionRules, written_bytes_per_day: int) -> None:
        """From now on these rules of eviction and this budget hold; what they take away goes in the next cycles."""
        self._state.rules = rules
        self._eviction.set_rules(rules)
        self.quotas.set_rules(rules)
        self.budget.bytes_per_day = written_bytes_per_day

    # --- durability and time ------------------------------------------------------------------------------

    def take_records(self) -> list[Record]:
        """The durable records since the last call, in the order of their LSNs."""
        return self._state.log.take()

    def persisted(self, lsn: Lsn, now_ns: int) -> None:
        """Records up to `lsn` are durable: puts become LIVE (R2), doomed objects without a guard free (R3)."""
        self._now_ns = self._reads.settle(now_ns)
        assert self._state.log.persisted_lsn <= lsn <= self.last_lsn, "persisted out of order"
        self._state.log.persisted_lsn = lsn
        self._stores.persisted(lsn)
        self._removal.persisted(lsn)

    def tick(self, now_ns: int) -> None:
        """Expire leases, end quarantines, go on with wipes, take away what is over its time, evict in the background: a bounded amount of each."""
        self._now_ns = self._reads.settle(now_ns)
        self._reads.expire(now_ns)
        self.tickets.expire(now_ns)
        self._removal.settle(now_ns)
        if not self._removal.backlogged:
            self.wiping.step()
            self._expiry.step()
            self._eviction.run(now_ns)

    def next_deadline(self) -> int | None:
        """When `tick` wants to be called next (monotonic ns; a time that has passed: at once), or None: not before the next call."""
        self._reads.enter()
        times = [
            self._state.leases.next_deadline(),
            self._removal.next_deadline(),
            self.tickets.next_deadline(),
        ]
        if not self._removal.backlogged:
            if self.wiping.under_way:
                return self._now_ns
            times += [self._eviction.next_at_ns(self._now_ns), self._expiry.next_at_ns(self._now_ns)]
        return min((each for each in times if each is not None), default=None)

    # --- inspection ---------------------------------------------------------------------------------------

    @property
    def reserved_objects(self) -> int:
        """Objects whose stores are under way."""
        objects = self._state.slots.objects_in
        return objects[RESERVED] + objects[COMMITTING]

    def usage(self) -> Usage:
        """Where the units are (R5)."""
        self._reads.enter()
        table = self._state.slots
        units = table.units_in
        return Usage(
            free_au=units[ABSENT],
            reserved_au=units[RESERVED] + units[COMMITTING],
            reserved_objects=self.reserved_objects,
            live_au=units[LIVE],
            doomed_au=units[DOOMED],
            quarantined_au=units[QUARANTINED],
            live_objects=table.objects_in[LIVE],
            leases=len(self._state.leases.by_id),
            leased_au=table.leased_au,
        )

    def audit(self) -> None:
        """Recompute every total from the entries (R5). For tests and simulation: reads all tables.

        Raises:
            BrokenInvariant: something does not follow from the entries.
        """
        self._reads.enter()
        audit(self._state, self._removal, self.tickets)
