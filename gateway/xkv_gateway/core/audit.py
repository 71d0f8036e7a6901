"""Recomputes from the entries what the engine keeps as totals, and compares (R5). Reads all tables: for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .accounts import CHARGED, HELD
from .allocator import units_of_runs
from .errors import BrokenInvariant
from .lifecycle import ABSENT, COMMITTING, DOOMED, LIVE, RESERVED, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .arrays import Slots
    from .removal import Removal
    from .state import EngineState
    from .tickets import Tickets


def audit(state: EngineState, removal: Removal, tickets: Tickets) -> None:
    """Check everything.

    Raises:
        BrokenInvariant: names what does not follow from the entries.
    """
    used = np.flatnonzero(state.slots.state != ABSENT)
    _check_totals(state, used)
    _check_extents(state, used)
    _check_index(state, used)
    _check_guards(state, used)
    _check_homes(state, used)
    _check_scopes(state, used)
    _require(
        "units that wait for a tombstone",
        _pending(state, removal) == (removal.pending_au, removal.pending_objects),
    )
    _check_tickets(state, removal, tickets)
    by_scope = sum(scope.pending_au for scope in state.names.scopes.values())
    _require("units of scopes that wait for a tombstone", by_scope == removal.pending_au)


def _check_tickets(state: EngineState, removal: Removal, tickets: Tickets) -> None:
    table, recorded = state.slots, np.array(sorted(removal.recorded), np.intp)
    _require("what tickets of scopes hold", tickets.check() == tickets.counted)
    slots = tickets.slots()
    _require("a slot in two tickets", len(set(slots)) == len(slots))
    _require("a ticket's slot that the journal does not know", set(slots) <= removal.recorded)
    _require("a recorded slot that is free or live", not np.isin(table.state[recorded], (ABSENT, LIVE)).any())


def _pending(state: EngineState, removal: Removal) -> tuple[int, int]:
    """Units and objects that wait for their tombstone alone."""
    if removal.holding:
        return 0, 0
    table, held = state.slots, removal.held_until()
    doomed = np.flatnonzero((table.state == DOOMED) & ~table.tombstoned & ~table.must_erase)
    doomed = doomed[~table.guarded(doomed)]
    doomed = doomed[[slot not in held for slot in doomed.tolist()]] if len(doomed) else doomed
    return int(table.units(doomed).sum()), len(doomed)


def _require(what: str, holds: object) -> None:
    if not holds:
        raise BrokenInvariant(what)


def _check_totals(state: EngineState, used: Slots) -> None:
    table = state.slots
    units = np.zeros(len(State), np.int64)
    np.add.at(units, table.state[used], table.units(used))
    objects = np.bincount(table.state, minlength=len(State))
    units[ABSENT] = state.limits.capacity_au - int(units.sum())
    _require("units by state", (units == table.units_in).all())
    _require("objects by state", (objects == table.objects_in).all())
    _require("a negative total", (units >= 0).all())
    _require("free units", units[ABSENT] == state.allocator.free_au)


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
    listed = used[np.isin(table.state[used], (RESERVED, COMMITTING, LIVE))]
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
    guarded = used[table.guarded(used) & (table.state[used] == LIVE)]
    _require("guarded units", table.guarded_live_au == int(table.units(guarded).sum()))
    _require("guarded objects", table.guarded_live_objects == len(guarded))
    _check_leases_of_scopes(state)


def _check_leases_of_scopes(state: EngineState) -> None:
    own: dict[int, list[int]] = {}
    for home in state.names.homes:
        for lease in () if home is None else (home.leases or {}).values():
            assert home is not None
            own.setdefault(home.scope.ident, []).append(lease.leased_bytes)
    for scope in state.names.scopes.values():
        _require("leases of a scope", len(own.get(scope.ident, ())) == scope.leases)
        _require("leased bytes of a scope", sum(own.get(scope.ident, ())) == scope.leased_bytes)


def _check_homes(state: EngineState, used: Slots) -> None:
    table = state.slots
    homes = [home for home in state.names.homes if home is not None]
    for home in homes:
        own = used[table.home[used] == home.ident]
        _require("references to a home", home.references == len(own) + len(home.leases or {}))
        _require("a home without references", home.references > 0)
        _require("live objects of a home", home.live_objects == (table.state[own] == LIVE).sum())
        _require("units charged to a home", home.charged_au == _units_in(state, own, CHARGED))
        same = state.names.find(home.namespace.name, home.scope.name)
        _require("a home that nobody finds", home.condemned or same is home)
        listed = np.isin(table.state[own], tuple(HELD)).any()
        _require("a wipe that nobody goes on with", not (home.condemned and listed) or state.wiping)
    _require(
        "objects without a home",
        len(used) == sum(int((table.home[used] == home.ident).sum()) for home in homes),
    )
    for space in state.names.namespaces.values():
        own_homes = [home for home in homes if home.namespace is space]
        _require("homes of a namespace", space.refs == len(own_homes) > 0)
        _require("live objects of a namespace", space.live_objects == sum(h.live_objects for h in own_homes))
        _require("units charged to a namespace", space.charged_au == sum(h.charged_au for h in own_homes))


def _units_in(state: EngineState, slots: Slots, states: Iterable[int]) -> int:
    table = state.slots
    return int(table.units(slots[np.isin(table.state[slots], tuple(states))]).sum())


def _check_scopes(state: EngineState, used: Slots) -> None:
    table = state.slots
    homes = [home for home in state.names.homes if home is not None]
    for scope in state.names.scopes.values():
        idents = [home.ident for home in homes if home.scope is scope]
        _require("homes of a scope", scope.refs == len(idents) > 0)
        own = used[np.isin(table.home[used], idents)]
        listed = np.sort(own[np.isin(table.state[own], tuple(HELD))])
        live = own[table.state[own] == LIVE]
        guarded = live[table.guarded(live)]
        _require("usage of a scope", scope.charged_au == _units_in(state, own, CHARGED))
        _require("units held by a scope", scope.held_au == _units_in(state, own, HELD))
        _require("live units of a scope", scope.live_au == int(table.units(live).sum()))
        _require("live objects of a scope", scope.live_objects == len(live))
        _require("guarded units of a scope", scope.guarded_live_au == int(table.units(guarded).sum()))
        _require("guarded objects of a scope", scope.guarded_live_objects == len(guarded))
        _require("members of a scope", scope.members == len(listed))
        _require("the limit of a scope", scope.limit_au == state.quotas.limit_au_of(scope.name))
        members = np.sort(state.recency.members(scope.uses, scope.ident))
        _require("the order of use of a scope", np.array_equal(members, listed))
        bound, first = scope.uses.bound, scope.uses.first_stamp()
        _require(
            "a scope that eviction does not know", first is None or (bound is not None and bound <= first)
        )
    _check_parked(state)


def _check_parked(state: EngineState) -> None:
    table = state.slots
    for slot in state.recency.parked:
        evictable = table.state[slot] == LIVE and not table.guarded(np.array([slot], np.intp))[0]
        _require("a parked object that nothing holds", not evictable)
