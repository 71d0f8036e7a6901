"""The index as a checkpoint holds it: rows out of a running engine, and an engine out of rows and records.

Rows are columns by name, as numpy arrays of equal length; the names are those of the tables in FORMAT.md. A checkpoint
is fuzzy: it is taken in parts while the engine goes on, so its rows may already show records that come after its start. Replay
makes up for that, since a record says what a slot *is*, not how it changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from .budget import HOUR_S
from .lifecycle import DOOMED, LIVE, QUARANTINED

if TYPE_CHECKING:
    from .arrays import U32
    from .removal import Removal
    from .state import EngineState
    from .tenancy import TenantRow, TtlRow
    from .types import Lsn
    from .wiping import Wiping

Columns = dict[str, npt.NDArray[Any]]

ROW_LIVE: Final = 1
ROW_DOOMED: Final = 2
ROW_QUARANTINED: Final = 3
ROW_WIPED: Final = 4
"""States of a row; wiped: doomed, and its units are to be erased before anybody uses them. What is reserved or committing has none: its put comes later in the journal, or never."""

HOLD_S_MAX: Final = 65535
NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class NamesImage:
    """What the ids in the rows stand for."""

    namespaces: dict[int, str]
    scopes: dict[int, bytes]


class EngineImage:
    """Reads a running engine, part by part. Every method is one turn: consistent in itself."""

    def __init__(self, state: EngineState, removal: Removal, wiping: Wiping) -> None:
        self._state = state
        self._removal = removal
        self._wiping = wiping

    def ttls(self) -> list[TtlRow]:
        """All rules on how long objects may live, those that were taken away included."""
        return self._state.lifetimes.rows()

    def clock(self) -> Columns:
        """Columns of `clock`: the card time now, and what was written in each hour of the day."""
        now_s, budget = self._state.lifetimes.now_s, self._state.budget
        budget.written(now_s)
        hours = [(hour * HOUR_S, written) for hour, written in budget.hours.items()]
        flat = np.array([*hours, (now_s, 0)], np.uint64)
        return {"time_s": flat[:, 0].copy(), "written_bytes": flat[:, 1].copy()}

    def lives(self, first: int, last: int) -> Columns:
        """Columns of `lives` for the slots first..last-1: when the live ones were stored and used."""
        table = self._state.slots
        slots = (np.flatnonzero(table.state[first:last] == LIVE) + first).astype(np.uint32)
        return {
            "slot": slots,
            "generation": table.generation[slots],
            "stored_s": table.stored_s[slots],
            "used_s": table.used_s[slots],
        }

    def tenants(self) -> tuple[list[TenantRow], bool, Lsn]:
        """All registered tenants, whether they are known to be all, and the record that said so."""
        quotas = self._state.quotas
        return quotas.rows(), quotas.known, quotas.known_lsn

    @property
    def slots_used(self) -> int:
        """Slots from this one on were never taken."""
        return self._state.slots.fresh

    @property
    def used_stamp_max(self) -> int:
        """The newest stamp of use."""
        return self._state.recency.newest_stamp

    def generation_max(self) -> int:
        """The largest generation that any slot has had."""
        used = self._state.slots.generation[: self.slots_used]
        return int(used.max()) if len(used) else 0

    def names(self) -> NamesImage:
        """All names that are in use."""
        names = self._state.names
        return NamesImage(
            {space.ident: space.name for space in names.namespaces.values()},
            {scope.ident: scope.name for scope in names.scopes.values()},
        )

    def rows(self, first: int, last: int, now_ns: int) -> tuple[Columns, Columns]:
        """Columns of `objects` and of `extents` for the slots first..last-1."""
        state, table = self._state, self._state.slots
        part = table.state[first:last]
        wanted = (part == LIVE) | (part == DOOMED)
        held = self._removal.held_until()
        for slot in self._removal.recorded:
            # Of a ticket: whatever becomes of it, its units are out of use until the journal says more.
            if first <= slot < last:
                wanted[slot - first] = True
        for slot in held:
            if first <= slot < last and part[slot - first] == QUARANTINED:
                wanted[slot - first] = True
        slots = (np.flatnonzero(wanted) + first).astype(np.uint32)
        row_state = np.full(len(slots), ROW_LIVE, np.uint8)
        row_state[table.state[slots] != LIVE] = ROW_DOOMED
        row_state[table.state[slots] == QUARANTINED] = ROW_QUARANTINED
        row_state[table.must_erase[slots]] = ROW_WIPED
        if state.wiping:
            # Rows that the wipe has not come to: a checkpoint that begins now is not told of it by its journal.
            row_state[self._wiping.condemned(slots)] = ROW_WIPED
        namespace_ids, scope_ids = self._owners(table.home[slots])
        objects: Columns = {
            "digest_low": table.digest_low[slots],
            "digest_high": table.digest_high[slots],
            "checksum": table.checksum[slots],
            "used_stamp": state.recency.stamp_of[slots],
            "size_bytes": table.size_bytes[slots],
            "namespace_id": namespace_ids,
            "scope_id": scope_ids,
            "generation": table.generation[slots],
            "slot": slots,
            "first_au": table.start_au[slots],
            "first_count_au": table.count_au[slots],
            "hold_s": _holds_s(slots, held, now_ns),
            "state": row_state,
            "extents": (table.count_au[slots] > 0).astype(np.uint8),
        }
        return objects, self._extents(slots, objects["extents"])

    def _owners(self, homes: U32) -> tuple[U32, U32]:
        unique, of_row = np.unique(homes, return_inverse=True)
        owners = [self._state.names.home(ident) for ident in unique.tolist()]
        namespaces = np.array([home.namespace.ident for home in owners], np.uint32)
        scopes = np.array([home.scope.ident for home in owners], np.uint32)
        return namespaces[of_row], scopes[of_row]

    def _extents(self, slots: U32, extents: npt.NDArray[Any]) -> Columns:
        """Rows of the extents beyond the first; adds them to the counts of the objects."""
        table = self._state.slots
        rows: list[tuple[int, int, int, int, int]] = []
        if table.others:
            for i, slot in enumerate(slots.tolist()):
                others = table.others.get(slot, ())
                extents[i] += len(others)
                generation = int(table.generation[slot])
                rows += [(slot, generation, n, e.start_au, e.count_au) for n, e in enumerate(others, 1)]
        flat = np.array(rows, np.uint32).reshape(-1, 5)
        names = ("slot", "generation", "ordinal", "start_au", "count_au")
        return {name: np.ascontiguousarray(flat[:, i]) for i, name in enumerate(names)}


def _holds_s(slots: U32, held: dict[int, int], now_ns: int) -> npt.NDArray[np.uint16]:
    holds = np.zeros(len(slots), np.uint16)
    if held:
        for i, slot in enumerate(slots.tolist()):
            if slot in held:
                holds[i] = min(HOLD_S_MAX, max(0, held[slot] - now_ns) // NS_PER_S + 1)
    return holds
