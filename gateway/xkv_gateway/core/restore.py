"""An engine out of rows and records: what a card held, brought back.

    Restored(limits)  ->  names, rows, extents of a checkpoint  ->  records of the journal, in order  ->  Engine(restored=...)

Rows land in arrays by slot at once, so that ten million of them never exist twice. Records say what a slot is from then on;
they name it by slot and generation, so a record that does not fit what is there (the checkpoint was ahead of it) changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .image import NS_PER_S, ROW_DOOMED, ROW_LIVE, ROW_QUARANTINED, ROW_WIPED
from .lifecycle import ABSENT, DOOMED, LIVE, QUARANTINED
from .records import (
    ClockRecord,
    DeleteBatch,
    DeleteCause,
    FreedBatch,
    NamespaceNamed,
    PutBatch,
    ScopeNamed,
    TenantRecord,
    TenantsKnownRecord,
    TtlRecord,
    WipeRecord,
)
from .restore_times import RestoredTimes
from .slots import SlotTable
from .soundness import Soundness
from .tenancy import TenantRow
from .types import NO_LSN, EngineLimits, Extent, Lsn

if TYPE_CHECKING:
    from .arrays import U8, U32, U64, Bools, Slots
    from .image import Columns
    from .records import Record
    from .removal import Removal
    from .state import EngineState
    from .wiping import Wiping

GENERATIONS: Final = 1 << 32
"""They begin anew behind the last one."""
INSERT_BATCH: Final = 8192
"""Slots entered into the index together."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Rows as they were read, before anything is dropped: for a check of the card. All arrays are parallel."""

    slots: U32
    live: Bools
    named: Bools
    """Whether the namespace and the scope have names."""
    repeated: Bools
    """Whether a live row of the same identity exists."""


class Restored:
    """Collects what a card held; then fills the tables of a new engine, once.

    Args:
        limits: of the engine that it is for.
        now_ns: monotonic; from when on corrupt objects are held.
    """

    def __init__(self, limits: EngineLimits, now_ns: int) -> None:
        self.last_lsn: Lsn = NO_LSN
        self.dropped_objects = 0
        """Objects that were given up: their units overlap, or their names are lost. Only damage does that."""
        self._limits = limits
        self._now_ns = now_ns
        size = limits.max_objects
        self.table = SlotTable(size, limits.capacity_au, limits.au_bytes)
        """Becomes the engine's."""
        self._damaged = False
        self._row_state: U8 = np.zeros(size, np.uint8)
        self._namespace_id: U32 = np.zeros(size, np.uint32)
        self._scope_id: U32 = np.zeros(size, np.uint32)
        self._stamp: U64 = np.zeros(size, np.uint64)
        self._stamp_next = 1
        self._generation_max = 0
        self._holds: dict[int, int] = {}
        self._namespaces: dict[int, str] = {}
        self._scopes: dict[int, bytes] = {}
        self.tenants: dict[bytes, TenantRow] = {}
        """By scope, those that were taken out included."""
        self.tenants_known = True
        """Whether these are certainly all; whoever finds that rows may be missing says so."""
        self._known_lsn = NO_LSN
        self.times = RestoredTimes(self.table)

    # --- from a checkpoint ----------------------------------------------------------------------------------

    def begin(self, start_lsn: int, used_stamp_max: int, generation_max: int) -> None:
        """Tell what the checkpoint says of itself: records from `start_lsn` on are still to come."""
        self.last_lsn = Lsn(start_lsn - 1)
        self._stamp_next = used_stamp_max + 1
        self._generation_max = generation_max

    def add_names(self, namespaces: dict[int, str], scopes: dict[int, bytes]) -> None:
        """Add what ids stand for."""
        self._namespaces.update(namespaces)
        self._scopes.update(scopes)

    def add_objects(self, rows: Columns) -> None:
        """Add rows of `objects`; those of slots beyond the limit, or in no known state, are dropped (damage)."""
        inside = rows["slot"] < self._limits.max_objects
        inside &= (rows["state"] >= ROW_LIVE) & (rows["state"] <= ROW_WIPED)
        self.dropped_objects += int(len(inside) - inside.sum())
        slots = rows["slot"][inside]
        table = self.table
        for column, array in (
            ("digest_low", table.digest_low),
            ("digest_high", table.digest_high),
            ("checksum", table.checksum),
            ("size_bytes", table.size_bytes),
            ("first_au", table.start_au),
            ("first_count_au", table.count_au),
            ("generation", table.generation),
            ("namespace_id", self._namespace_id),
            ("scope_id", self._scope_id),
            ("state", self._row_state),
        ):
            array[slots] = rows[column][inside]
        # No row was used after the checkpoint was closed.
        self._stamp[slots] = np.minimum(rows["used_stamp"][inside], np.uint64(self._stamp_next - 1))
        held = np.flatnonzero(rows["hold_s"][inside])
        for slot, hold_s in zip(slots[held].tolist(), rows["hold_s"][inside][held].tolist(), strict=True):
            self._holds[slot] = self._now_ns + hold_s * NS_PER_S

    def add_extents(self, rows: Columns) -> None:
        """Add rows of `extents`, after the objects that they belong to."""
        for slot, generation, start, count in zip(
            rows["slot"].tolist(),
            rows["generation"].tolist(),
            rows["start_au"].tolist(),
            rows["count_au"].tolist(),
            strict=True,
        ):
            if slot < self._limits.max_objects and int(self.table.generation[slot]) == generation:
                self.table.others[slot] = (*self.table.others.get(slot, ()), Extent(start, count))

    def add_tenant(self, row: TenantRow) -> None:
        """Add a tenant, from a checkpoint, a ledger or the journal: of two for one scope the newer one counts."""
        before = self.tenants.get(row.scope)
        if before is None or before.lsn < row.lsn:
            self.tenants[row.scope] = row

    def note_tenants_known(self, lsn: Lsn, *, known: bool) -> None:
        """Add what somebody said on whether the tenants are complete; the newest word counts."""
        if lsn >= self._known_lsn:
            self._known_lsn, self.tenants_known = lsn, known

    # --- from the journal -----------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:  # noqa: C901 - a line or two for each kind
        """Apply the next record. Its LSN follows, but for damage."""
        self.last_lsn = record.lsn
        match record:
            case NamespaceNamed():
                self._namespaces[record.namespace_id] = record.name
            case ScopeNamed():
                self._scopes[record.scope_id] = record.name
            case PutBatch():
                self._put(record)
            case DeleteBatch():
                slots = self._current(record.slots, record.generations)
                gone = ROW_WIPED if record.cause is DeleteCause.WIPED else ROW_DOOMED
                self._row_state[slots[self._row_state[slots] == ROW_LIVE]] = gone
                if record.cause is DeleteCause.CORRUPT:
                    until_ns = self._now_ns + self._limits.corrupt_hold_ns
                    self._holds.update(dict.fromkeys(slots.tolist(), until_ns))
            case FreedBatch():
                slots = self._current(record.slots, record.generations)
                self._row_state[slots] = 0
                self._forget(slots)
            case WipeRecord():
                self.wipe(record.namespace, record.scope)
            case TenantRecord():
                self.add_tenant(TenantRow(record.scope, record.limit_bytes, record.name, record.lsn))
            case TtlRecord() | ClockRecord():
                self.times.apply(record)
            case TenantsKnownRecord():
                self.note_tenants_known(record.lsn, known=record.known)

    def _put(self, batch: PutBatch) -> None:
        inside = batch.slots < self._limits.max_objects
        assert inside.all(), "a put beyond the object limit"
        table, slots = self.table, batch.slots
        self._forget(slots)
        # The commit of a ticket: the second put of what was reserved by the first, which has been counted.
        again = (table.generation[slots] == batch.generations) & (self._row_state[slots] == ROW_DOOMED)
        table.digest_low[slots], table.digest_high[slots] = batch.digests_low, batch.digests_high
        table.checksum[slots], table.size_bytes[slots] = batch.checksums, batch.sizes_bytes
        table.generation[slots] = batch.generations
        self.times.put(slots, np.where(again, np.uint32(0), batch.sizes_bytes))
        self._generation_max = max(self._generation_max, int(batch.generations.max(initial=0)))
        self._namespace_id[slots], self._scope_id[slots] = batch.namespace_ids, batch.scope_ids
        self._row_state[slots] = ROW_LIVE
        # The tail of a prompt is older than its head.
        self._stamp[slots[::-1]] = np.arange(self._stamp_next, self._stamp_next + len(slots), dtype=np.uint64)
        self._stamp_next += len(slots)
        self._put_extents(slots, batch)

    def _put_extents(self, slots: U32, batch: PutBatch) -> None:
        table, counts = self.table, batch.extent_counts.astype(np.int64)
        first = np.cumsum(counts) - counts
        has = counts > 0
        table.start_au[slots], table.count_au[slots] = 0, 0
        table.start_au[slots[has]] = batch.extent_starts_au[first[has]]
        table.count_au[slots[has]] = batch.extent_counts_au[first[has]]
        for i in np.flatnonzero(counts > 1).tolist():
            rest = slice(int(first[i]) + 1, int(first[i] + counts[i]))
            starts, lengths = batch.extent_starts_au[rest].tolist(), batch.extent_counts_au[rest].tolist()
            table.others[int(slots[i])] = tuple(map(Extent, starts, lengths))

    def wipe(self, namespace: str, scope: bytes | None) -> None:
        """Carry out a wipe, of all that was put so far: from the journal, or from a ledger where the journal lacks it."""
        spaces = [ident for ident, name in self._namespaces.items() if name == namespace]
        hit = np.isin(self._namespace_id, spaces) & (self._row_state != 0)
        if scope is not None:
            hit &= np.isin(self._scope_id, [i for i, name in self._scopes.items() if name == scope])
        self._row_state[hit] = ROW_WIPED

    def _current(self, slots: U32, generations: U32) -> U32:
        inside = slots < self._limits.max_objects
        slots, generations = slots[inside], generations[inside]
        current: U32 = slots[(self.table.generation[slots] == generations) & (self._row_state[slots] != 0)]
        return current

    def _forget(self, slots: U32) -> None:
        if self._holds or self.table.others:
            for slot in slots.tolist():
                self._holds.pop(slot, None)
                self.table.others.pop(slot, None)

    # --- into an engine -------------------------------------------------------------------------------------

    @property
    def live_objects(self) -> int:
        """Objects that lookups will find."""
        return int((self._row_state == ROW_LIVE).sum())

    def end(self, last_lsn: int) -> None:
        """Tell the LSN that the journal ends with, whether or not all records up to it could be read."""
        self.last_lsn = Lsn(last_lsn)

    def listing(self) -> Listing:
        """Return the rows."""
        slots = np.flatnonzero(self._row_state).astype(np.uint32)
        live = self._row_state[slots] == ROW_LIVE
        keys = np.stack((self.table.digest_low[slots], self.table.digest_high[slots]), axis=1)
        _, of_row, count = np.unique(keys[live], axis=0, return_inverse=True, return_counts=True)
        repeated = np.zeros(len(slots), np.bool_)
        repeated[live] = count[of_row.reshape(-1)] > 1
        return Listing(slots, live, self._have_names(slots), repeated)

    @property
    def damaged(self) -> bool:
        """Whether records or rows are missing."""
        return self._damaged

    def note_damage(self) -> None:
        """Tell that records are missing: what is left may contradict itself, and is looked through."""
        self._damaged = True

    def fill(self, state: EngineState, removal: Removal, wiping: Wiping) -> None:
        """Complete the tables of a new engine that was made around `table`."""
        table = self.table
        assert state.slots is table
        check = Soundness(table, self._row_state, self._stamp, self._limits.capacity_au)
        named = self._named(np.flatnonzero(self._row_state).astype(np.uint32))
        slots = check.sound(named, look_for_repeats=self._damaged)
        self.dropped_objects += check.dropped_objects
        for slot in slots[self._row_state[slots] == ROW_QUARANTINED].tolist():
            if slot not in self._holds:
                self._row_state[slot] = ROW_DOOMED
        table.others = {slot: e for slot, e in table.others.items() if self._row_state[slot]}
        rows = self._row_state[slots]
        states = np.full(len(slots), LIVE, np.uint8)
        states[(rows == ROW_DOOMED) | (rows == ROW_WIPED)] = DOOMED
        states[rows == ROW_QUARANTINED] = QUARANTINED
        absent = np.ones(table.max_objects, np.bool_)
        absent[slots] = False
        # Whatever named these slots before means nothing from here on.
        table.generation[absent] = (self._generation_max + 1) % GENERATIONS
        state.allocator.claim(*check.runs(slots))
        table.restore(slots, states, table.units(slots))
        self._join_homes(state, slots, states == LIVE)
        self.times.fill(state, slots)
        live = slots[states == LIVE]
        for begin in range(0, len(live), INSERT_BATCH):
            state.index.insert(live[begin : begin + INSERT_BATCH])
        state.log.last_lsn = state.log.persisted_lsn = self.last_lsn
        holds = {slot: until for slot, until in self._holds.items() if self._row_state[slot] > ROW_LIVE}
        wiping.restore(slots[rows == ROW_WIPED])
        removal.restore(slots[states == DOOMED], holds)
        state.quotas.restore(self.tenants.values(), known=self.tenants_known, known_lsn=self._known_lsn)

    def _named(self, slots: U32) -> U32:
        """Drop objects whose namespace or scope nobody named."""
        good = self._have_names(slots)
        self.dropped_objects += int(len(good) - good.sum())
        self._row_state[slots[~good]] = 0
        return slots[good]

    def _have_names(self, slots: U32) -> Bools:
        namespaces = np.array(sorted(self._namespaces), np.uint32)
        scopes = np.array(sorted(self._scopes), np.uint32)
        return np.isin(self._namespace_id[slots], namespaces) & np.isin(self._scope_id[slots], scopes)

    def _join_homes(self, state: EngineState, slots: U32, live: Bools) -> None:
        if not len(slots):
            return
        pairs = self._namespace_id[slots].astype(np.uint64) << np.uint64(32) | self._scope_id[slots]
        unique, of_slot = np.unique(pairs, return_inverse=True)
        # What is wiped lives in condemned homes of its own, beside what was stored under the same names since.
        wiped = self._row_state[slots] == ROW_WIPED
        some = bool(wiped.any())
        if some:
            both, of_slot = np.unique(of_slot * 2 + wiped, return_inverse=True)
            unique, condemned = unique[both // 2], (both % 2).astype(np.bool_)
        ids = [
            (pair >> 32, pair & 0xFFFFFFFF, some and bool(condemned[i]))
            for i, pair in enumerate(unique.tolist())
        ]
        homes = state.names.restore(self._namespaces, self._scopes, ids)
        idents = np.array([home.ident for home in homes], np.uint32)
        state.slots.home[slots] = idents[of_slot]
        for home, count in zip(homes, np.bincount(of_slot, minlength=len(homes)).tolist(), strict=True):
            home.references = count
        table = state.slots
        for each in np.unique(table.state[slots]).tolist():
            these = slots[table.state[slots] == each]
            state.accounts.shift(these, table.units(these), ABSENT, each)
        _restore_order(state, slots[live], self._stamp)


def _restore_order(state: EngineState, live: Slots, stamp: U64) -> None:
    """Live slots in the order of their use, scope by scope."""
    if not len(live):
        return
    scope_of_home = np.array(
        [-1 if home is None else home.scope.ident for home in state.names.homes], np.int64
    )
    scopes = scope_of_home[state.slots.home[live]]
    order = np.lexsort((stamp[live], scopes))
    live, scopes = live[order], scopes[order]
    begins = np.flatnonzero(np.diff(scopes, prepend=-1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(live)], strict=True):
        scope = state.names.scope_at(int(scopes[begin]))
        assert scope is not None
        mine = live[begin:end]
        state.recency.restore(scope.uses, scope.ident, mine, stamp[mine])
