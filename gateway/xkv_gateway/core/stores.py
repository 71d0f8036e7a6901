"""How objects come: reserved, written by the shell, committed, and LIVE once their record is durable (R2)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from .admission import Admission
from .errors import StalePlan
from .lifecycle import COMMITTING, LIVE, RESERVED, Event
from .records import (
    RECORD_OBJECTS_MAX,
    RESERVED_OBJECTS_MAX,
    DeleteBatch,
    DeleteCause,
    NamespaceNamed,
    PutBatch,
    ScopeNamed,
)
from .state import rows
from .types import NO_LSN, CommitOutcome, Extent, Lsn, StoreOutcome, StoreStatus, WritePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .admission import Entries
    from .arrays import I64, U64, Bools, Slots
    from .eviction import Eviction
    from .names import Home
    from .removal import Removal
    from .state import EngineState
    from .types import BeginStore
    from .wiping import Wiping


class Stores:
    """Reservations and commits under way."""

    def __init__(self, state: EngineState, removal: Removal, eviction: Eviction, wiping: Wiping) -> None:
        self._state = state
        self._removal = removal
        self._eviction = eviction
        self._admission = Admission(state, removal, eviction)
        self._wiping = wiping
        self._puts: deque[tuple[Lsn, Slots]] = deque()

    def begin(self, request: BeginStore) -> StoreOutcome:
        """See `Engine.begin_store`."""
        state, limits, table = self._state, self._state.limits, self._state.slots
        assert len(set(request.keys)) == len(request.keys) == len(request.sizes_bytes), (
            "the codec checks this"
        )
        low, high = state.digester.digest(request.namespace, request.scope, request.keys)
        slots, held = state.index.find(low, high)
        if state.wiping and held.any():
            gone = held & ~state.visible(slots, request.namespace, request.scope)
            self._wiping.forsake(np.unique(slots[gone]))
            held &= ~gone
        if state.lifetimes.rules and (over := state.lifetimes.over(request.namespace, slots)) is not None:
            over &= held & (table.state[slots] == LIVE)
            self._eviction.take(np.unique(slots[over]), DeleteCause.EVICTED_TTL)
            held &= ~over
        sizes = np.array(request.sizes_bytes, np.int64)
        assert not len(sizes) or int(sizes.min()) >= 0, "the codec checks this"
        units = table.units_of_bytes(sizes)
        oversize = (sizes > limits.object_bytes_max) | (units > limits.capacity_au)
        entries: Entries = [None] * len(request.keys)
        if np.count_nonzero(held):
            self._note_held(slots, np.flatnonzero(held).tolist(), entries)
        if np.count_nonzero(oversize):
            for i in np.flatnonzero(oversize & ~held).tolist():
                entries[i] = StoreStatus.TOO_LARGE
                state.counters.too_large += 1
        wanted = self._within_budget((~(held | oversize)).nonzero()[0], sizes, entries)
        kept = slots[held & (table.state[slots] == LIVE)]
        if request.keep:
            kept = np.union1d(kept, self._still_live(request.keep))
        # What the reply calls `exists` must not be evicted for other members of the same batch.
        if len(kept):
            table.pin(kept)
        admitted, waiting = self._admission.admit(request.scope, wanted, units, entries)
        if len(admitted):
            waiting |= self._place(request, admitted, sizes, (low[admitted], high[admitted]), entries)
        if len(kept):
            self._removal.unguarded(table.unpin(kept))
        # Whatever waits, waits for tombstones: those of its victims, or older ones.
        wait = state.log.unless_durable(self._removal.last_tombstone_lsn) if waiting else NO_LSN
        return StoreOutcome(entries, wait)

    def _within_budget(self, wanted: I64, sizes: I64, entries: Entries) -> I64:
        """Refuse what the budget of the day has no room for: it would have to wait for hours."""
        left_bytes = self._state.budget.left(self._state.lifetimes.now_s)
        if left_bytes is None or not len(wanted):
            return wanted
        fits: Bools = np.cumsum(sizes[wanted]) <= left_bytes
        for i in wanted[~fits].tolist():
            entries[i] = StoreStatus.NO_SPACE
            self._state.counters.budget += 1
        return wanted[fits]

    def commit(self, plans: Sequence[WritePlan], checksums: Sequence[int]) -> CommitOutcome:
        """See `Engine.commit_store`."""
        state, table = self._state, self._state.slots
        slots, current = self._current(plans)
        if state.wiping and current.any():
            self._wiping.forsake(self._overtaken(slots[current]))
        ready = current & (table.state[slots] == RESERVED)
        stored = slots[ready]
        lsn = NO_LSN
        if len(stored):
            table.checksum[stored] = np.array(checksums, np.uint64)[ready]
            table.has_writer[stored] = False
            table.stored_s[stored] = table.used_s[stored] = state.lifetimes.now_s
            table.move(stored, Event.COMMIT)
            lsn = self._record(stored)
            state.counters.stored += len(stored)
            self._count_stored(stored)
        if len(stored) != len(slots):
            self._removal.abandon(slots[current & ~ready], None)
            state.counters.cancelled += len(slots) - len(stored)
        statuses = [StoreStatus.STORED if ok else StoreStatus.CANCELLED for ok in ready.tolist()]
        return CommitOutcome(statuses, lsn)

    def abort(self, plans: Sequence[WritePlan], settles_at_ns: int | None) -> None:
        """See `Engine.abort_store`."""
        slots, current = self._current(plans)
        self._state.counters.aborted += int(current.sum())
        if current.any():
            self._removal.abandon(slots[current], settles_at_ns)

    # --- reservations that clients write to (tickets) ---------------------------------------------------------

    def still_reserved(self, plans: Sequence[WritePlan]) -> list[bool]:
        """Which plans nobody has cancelled."""
        slots, current = self._current(plans)
        if self._state.wiping and current.any():
            self._wiping.forsake(self._overtaken(slots[current]))
        good: list[bool] = (current & (self._state.slots.state[slots] == RESERVED)).tolist()
        return good

    def record_reserved(self, plans: Sequence[WritePlan]) -> Lsn:
        """Let the journal know of reservations: puts that are deleted at once, so that their rows are doomed from the start.

        The run that comes after a crash finds rows that nobody can look up, and keeps their units out of use for as long as it does
        with all that is doomed. The commit is a second put of the same slot and generation.
        """
        log, lsn = self._state.log, NO_LSN
        slots = np.array([plan.slot for plan in plans], np.intp)
        self._state.slots.checksum[slots] = 0
        self._removal.recorded.update(slots.tolist())
        self._state.lifetimes.record_time()
        owners, of_slot = self._named(slots)
        for begin in range(0, len(slots), RESERVED_OBJECTS_MAX):
            which = slice(begin, begin + RESERVED_OBJECTS_MAX)
            part = slots[which]
            put = log.add(self._put(log.next_lsn(), part, owners, of_slot[which]))
            generations = self._state.slots.generation[part]
            lsn = log.add(
                DeleteBatch(log.next_lsn(), DeleteCause.DELETED, part.astype(np.uint32), generations)
            )
            assert lsn == put + 1, "what belongs together is one batch of the journal"
        return lsn

    def in_clients_hands(self, unit: int) -> bool:
        """Whether clients may still write to units from this one on: of tickets, or of what a run before has handed out."""
        recorded = self._removal.recorded
        return self._removal.holding or not recorded.isdisjoint(self._state.slots.reaching(unit).tolist())

    def persisted(self, lsn: Lsn) -> None:
        """Puts up to `lsn` are durable: what was not removed meanwhile is LIVE."""
        table = self._state.slots
        parts: list[Slots] = []
        while self._puts and self._puts[0][0] <= lsn:
            parts.append(self._puts.popleft()[1])
        if parts:
            slots = np.concatenate(parts)
            slots = slots[table.state[slots] == COMMITTING]
            table.move(slots, Event.PERSIST)
            if self._removal.recorded:
                self._removal.recorded.difference_update(slots.tolist())
            self._removal.unguarded(slots)

    def _current(
        self, plans: Sequence[WritePlan]
    ) -> tuple[Slots, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Slots of plans, and which plans have neither been committed nor aborted before (R7)."""
        table = self._state.slots
        numbers = [plan.slot for plan in plans]
        if len(set(numbers)) != len(numbers):
            msg = "the same plan twice in one call"
            raise StalePlan(msg)
        slots = np.array(numbers, np.intp)
        generations = np.array([plan.generation for plan in plans], np.uint32)
        return slots, (table.generation[slots] == generations) & table.has_writer[slots]

    def _still_live(self, plans: Sequence[WritePlan]) -> Slots:
        table = self._state.slots
        slots = np.array([plan.slot for plan in plans], np.intp)
        generations = np.array([plan.generation for plan in plans], np.uint32)
        live: Slots = slots[(table.generation[slots] == generations) & (table.state[slots] == LIVE)]
        return live

    def _overtaken(self, slots: Slots) -> Slots:
        """Reservations that a wipe has condemned and not come to yet."""
        table = self._state.slots
        slots = slots[table.state[slots] == RESERVED]
        return slots[self._wiping.condemned(slots)]

    def _count_stored(self, slots: Slots) -> None:
        state = self._state
        sizes = state.slots.size_bytes[slots].astype(np.int64)
        state.counters.stored_bytes += int(sizes.sum())
        if state.quotas.counters:
            for home, count, size in state.accounts.by_home(slots, sizes):
                own = state.quotas.counters.get(home.scope.name)
                if own is not None:
                    own.stored += count
                    own.stored_bytes += size

    def _note_held(self, slots: Slots, where: list[int], entries: Entries) -> None:
        table, counters = self._state.slots, self._state.counters
        for i in where:
            if table.state[slots[i]] == LIVE:
                entries[i] = StoreStatus.EXISTS
                counters.exists += 1
            else:
                entries[i] = StoreStatus.IN_PROGRESS
                counters.in_progress += 1

    def _place(
        self, request: BeginStore, places: I64, sizes: I64, digests: tuple[U64, U64], entries: Entries
    ) -> bool:
        """Reserve room for keys that are admitted. Returns whether some wait until what is free lies in fewer pieces."""
        waiting = False
        for i in self._reserve(request, places, sizes[places], digests, entries).tolist():
            need_au = int(self._state.slots.units_of_bytes(sizes[i : i + 1])[0])
            waiting |= self._admission.gather(request.scope, i, need_au, entries)
        return waiting

    def _reserve(
        self, request: BeginStore, places: I64, sizes: I64, digests: tuple[U64, U64], entries: Entries
    ) -> I64:
        """Reserve room; returns the places of those for which what is free lies in too many pieces."""
        state, table = self._state, self._state.slots
        allocation = state.allocator.allocate(table.units_of_bytes(sizes))
        slots = table.take(len(places))
        low, high = digests
        scattered = places[allocation.failed]
        table.start_au[slots], table.count_au[slots] = allocation.starts, allocation.counts
        for i, others in allocation.others.items():
            table.others[int(slots[i])] = tuple(Extent(*run) for run in others)
        if allocation.failed:
            kept = np.ones(len(places), np.bool_)
            kept[allocation.failed] = False
            table.give_back(slots[~kept])
            slots, places, sizes, low, high = slots[kept], places[kept], sizes[kept], low[kept], high[kept]
        if not len(slots):
            return scattered
        home = state.names.intern(request.namespace, request.scope)
        home.references += len(slots)
        table.digest_low[slots], table.digest_high[slots] = low, high
        table.size_bytes[slots] = sizes
        state.budget.spend(int(sizes.sum()), state.lifetimes.now_s)
        table.home[slots] = home.ident
        table.has_writer[slots] = True
        table.move(slots, Event.RESERVE)
        state.index.insert(slots)
        scope = home.scope
        state.recency.touch(scope.uses, scope.ident, slots, scope.members)
        plans = rows(
            WritePlan,
            slots.tolist(),
            table.generation[slots].tolist(),
            table.size_bytes[slots].tolist(),
            state.extents_of(slots),
        )
        for i, plan in zip(places.tolist(), plans, strict=True):
            entries[i] = plan
        return scattered

    def _record(self, slots: Slots) -> Lsn:
        log, lsn = self._state.log, NO_LSN
        self._state.lifetimes.record_time()
        owners, of_slot = self._named(slots)
        for begin in range(0, len(slots), RECORD_OBJECTS_MAX):
            part = slice(begin, begin + RECORD_OBJECTS_MAX)
            lsn = log.add(self._put(log.next_lsn(), slots[part], owners, of_slot[part]))
            self._puts.append((lsn, slots[part]))
        return lsn

    def _named(self, slots: Slots) -> tuple[list[Home], Slots]:
        """The homes of some slots, as `_owners`; the journal knows their names from here on."""
        log = self._state.log
        owners, of_slot = self._owners(slots)
        for home in owners:
            space, scope = home.namespace, home.scope
            if not space.named:
                space.named = True
                log.add(NamespaceNamed(log.next_lsn(), space.ident, space.name))
            if not scope.named:
                scope.named = True
                log.add(ScopeNamed(log.next_lsn(), scope.ident, scope.name))
        return owners, of_slot

    def _owners(self, slots: Slots) -> tuple[list[Home], Slots]:
        """The homes of some slots, at least one, and which of them is that of each."""
        names, homes = self._state.names, self._state.slots.home.take(slots)
        if np.count_nonzero(homes == homes[0]) == len(homes):
            return [names.home(int(homes[0]))], np.zeros(len(homes), np.intp)
        idents, of_slot = np.unique(homes, return_inverse=True)
        return [names.home(ident) for ident in idents.tolist()], of_slot

    def _put(self, lsn: Lsn, slots: Slots, owners: Sequence[Home], of_slot: Slots) -> PutBatch:
        table = self._state.slots
        starts, counts = table.start_au[slots], table.count_au[slots]
        extent_counts = (counts > 0).astype(np.uint8)
        if any(slot in table.others for slot in slots.tolist()) if table.others else False:
            extents = self._state.extents_of(slots)
            extent_counts = np.array([len(each) for each in extents], np.uint8)
            flat = [extent for each in extents for extent in each]
            starts = np.array([extent.start_au for extent in flat], np.uint32)
            counts = np.array([extent.count_au for extent in flat], np.uint32)
        elif not extent_counts.all():
            starts, counts = starts[counts > 0], counts[counts > 0]
        return PutBatch(
            lsn=lsn,
            slots=slots.astype(np.uint32),
            generations=table.generation[slots],
            digests_low=table.digest_low[slots],
            digests_high=table.digest_high[slots],
            namespace_ids=np.array([home.namespace.ident for home in owners], np.uint32)[of_slot],
            scope_ids=np.array([home.scope.ident for home in owners], np.uint32)[of_slot],
            sizes_bytes=table.size_bytes[slots],
            checksums=table.checksum[slots],
            extent_counts=extent_counts,
            extent_starts_au=starts,
            extent_counts_au=counts,
        )
