"""Recomputes from the entries what the engine keeps as totals, and compares (R5). Reads all tables: for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .allocator import units_of_runs
from .errors import BrokenInvariant
from .lifecycle import State

if TYPE_CHECKING:
    from .arrays import Slots
    from .removal import Removal
    from .state import EngineState


def audit(state: EngineState, removal: Removal) -> None:
    """Check everything.

    Raises:
        BrokenInvariant: names what does not follow from the entries.
    """
    used = np.flatnonzero(state.slots.state != State.ABSENT)
    _check_totals(state, used)
    _check_extents(state, used)
    _check_index(state, used)
    _check_guards(state, used)
    _check_homes(state, used)
    _require(
        "units that wait for a tombstone",
        removal.pending_totals() == (removal.pending_au, removal.pending_objects),
    )


def _require(what: str, holds: object) -> None:
    if not holds:
        raise BrokenInvariant(what)


def _check_totals(state: EngineState, used: Slots) -> None:
    table = state.slots
    units = np.zeros(len(State), np.int64)
    np.add.at(units, table.state[used], table.units(used))
    objects = np.bincount(table.state, minlength=len(State))
    units[State.ABSENT] = state.limits.capacity_au - int(units.sum())
    _require("units by state", (units == table.units_in).all())
    _require("objects by state", (objects == table.objects_in).all())
    _require("a negative total", (units >= 0).all())
    _require("free units", units[State.ABSENT] == state.allocator.free_au)


def _check_extents(state: EngineState, used: Slots) -> None:
    table = state.slots
    extents = [extent for each in state.extents_of(used) for extent in each]
    _require("extents of objects that are gone", set(table.others) <= set(used.tolist()))
    held = [sum(extent.count_au for extent in each) for each in state.extents_of(used)]
    _require("units of an object", held == table.units(used).tolist())
    taken = np.zeros(state.limits.capacity_au, np.int64)
    if extents:
        array = np.array(extents, np.int64)
        np.add.at(taken, units_of_runs(array[:, 0], array[:, 1]), 1)
    _require("two objects in one unit", not len(taken) or taken.max() <= 1)
    _require("units taken", ((taken == 1) == state.allocator.taken()).all())
    state.allocator.check()


def _check_index(state: EngineState, used: Slots) -> None:
    table = state.slots
    listed = used[np.isin(table.state[used], (State.RESERVED, State.COMMITTING, State.LIVE))]
    found, held = state.index.find(table.digest_low[listed], table.digest_high[listed])
    _require("an object that the index does not find", held.all() and (found == listed).all())
    _require("objects in the index", state.index.count == len(listed))


def _check_guards(state: EngineState, used: Slots) -> None:
    table = state.slots
    leases = np.zeros(table.max_objects, np.int64)
    for lease in state.leases.by_id.values():
        np.add.at(leases, lease.slots, 1)
        _require("a leased slot was reused", (table.generation[lease.slots] == lease.generations).all())
    _require("leases of an object", (leases == table.leases).all())
    _require("leased units", table.leased_au == int(table.units(used[leases[used] > 0]).sum()))
    absent = np.ones(table.max_objects, np.bool_)
    absent[used] = False
    _require("a guard on what is not there", not (table.pins[absent].any() or table.leases[absent].any()))
    guarded = used[table.guarded(used) & (table.state[used] == State.LIVE)]
    _require("guarded units", table.guarded_live_au == int(table.units(guarded).sum()))
    _require("guarded objects", table.guarded_live_objects == len(guarded))
    for scope in state.names.scopes.values():
        own = [lease for home in scope.homes.values() for lease in (home.leases or {}).values()]
        _require("leases of a scope", len(own) == scope.leases)
        _require("leased bytes of a scope", sum(lease.leased_bytes for lease in own) == scope.leased_bytes)


def _check_homes(state: EngineState, used: Slots) -> None:
    table = state.slots
    listed = used[np.isin(table.state[used], (State.RESERVED, State.COMMITTING, State.LIVE))]
    homes = [home for home in state.names.homes if home is not None]
    for home in homes:
        own = np.sort(listed[table.home[listed] == home.ident])
        members = np.sort(state.recency.members(home.uses, home.ident))
        _require("members of a home", home.members == len(own))
        _require("the order of use of a home", np.array_equal(members, own))
        references = int((table.home[used] == home.ident).sum()) + len(home.leases or {})
        _require("references to a home", home.references == references)
        _require("a home without references", home.references > 0)
        bound, first = home.uses.bound, home.uses.first_stamp()
        _require(
            "a home that eviction does not know", first is None or (bound is not None and bound <= first)
        )
    _require(
        "objects without a home",
        len(used) == sum(int((table.home[used] == home.ident).sum()) for home in homes),
    )
    for slot in state.recency.parked:
        evictable = table.state[slot] == State.LIVE and not table.guarded(np.array([slot], np.intp))[0]
        _require("a parked object that nothing holds", not evictable)
