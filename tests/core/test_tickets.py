"""Tickets: room that clients write to themselves, from the reservation to the last moment at which a late write may land."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.core.helpers import LIMITS, SECOND_NS, SECRET, Counter, World
from xkv_gateway.card.record_codec import encode_batches
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.errors import UnknownTicket
from xkv_gateway.core.records import DeleteBatch, FreedBatch, PutBatch
from xkv_gateway.core.restore import Restored
from xkv_gateway.core.types import BeginStore, StoreStatus, WritePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.core.tickets import Ticket

GRACE_NS = 10 * SECOND_NS
TTL_NS = 5 * SECOND_NS


def world(**limits: float) -> World:
    return World(direct_grace_ns=GRACE_NS, **limits)


def granted(w: World, keys: Sequence[bytes], size: int = 1024, scope: bytes = b"s") -> Ticket:
    request = BeginStore("n", scope, list(keys), [size] * len(keys))
    plans = [entry for entry in w.begin(keys, size, scope=scope) if isinstance(entry, WritePlan)]
    good, ticket, lsn = w.engine.tickets.grant(request, plans, w.now_ns)
    assert all(good)
    assert ticket is not None
    w.engine.tickets.begin(ticket, TTL_NS, w.now_ns)
    assert lsn == w.engine.last_lsn
    w.engine.audit()
    return ticket


def committed(w: World, ticket: Ticket) -> list[StoreStatus]:
    plans = list(ticket.plans)
    w.engine.tickets.close(ticket)
    outcome = w.engine.commit_store(plans, [7 + plan.slot for plan in plans], w.now_ns)
    w.engine.tickets.done(ticket, outcome.statuses)
    w.persist()
    return outcome.statuses


def units(ticket: Ticket) -> set[int]:
    return {e.start_au + i for plan in ticket.plans for e in plan.extents for i in range(e.count_au)}


def free(w: World) -> set[int]:
    return set(np.flatnonzero(~w.engine._state.allocator.taken()).tolist())


def after_crash(w: World, held_until_ns: int = 0) -> World:
    """Another run, with what the journal of this one held."""
    restored = Restored(w.limits, w.now_ns)
    for record in w.records:
        restored.apply(record)
    again = World()
    again.limits, again.now_ns = w.limits, w.now_ns
    again.engine = Engine(
        w.limits, digest_secret=SECRET, entropy=Counter(), restored=restored, held_until_ns=held_until_ns
    )
    again.engine.audit()
    return again


def test_a_ticket_is_committed_like_a_store() -> None:
    w = world()
    ticket = granted(w, [b"a", b"b"])
    w.persist()
    assert w.held([b"a", b"b"]) == [False, False]
    assert w.begin([b"a"]) == [StoreStatus.IN_PROGRESS]
    assert committed(w, ticket) == [StoreStatus.STORED] * 2
    assert w.held([b"a", b"b"]) == [True, True]
    assert w.engine.tickets.find(ticket.ident, w.now_ns).statuses == [StoreStatus.STORED] * 2
    w.wait(TTL_NS)
    with pytest.raises(UnknownTicket):
        w.engine.tickets.find(ticket.ident, w.now_ns)
    assert not w.engine.tickets.by_id
    assert w.held([b"a", b"b"]) == [True, True]


def test_what_was_reserved_is_doomed_after_a_crash_and_nobody_finds_it() -> None:
    w = world()
    ticket = granted(w, [b"a", b"b"])
    w.persist()
    again = after_crash(w, w.now_ns + GRACE_NS)
    assert again.held([b"a", b"b"]) == [False, False]
    assert not units(ticket) & free(again)
    again.wait(GRACE_NS - 1)
    assert not units(ticket) & free(again)
    assert again.engine.next_deadline() == again.now_ns + 1
    again.wait(1)
    again.persist()
    assert units(ticket) <= free(again)


def test_what_was_committed_is_there_after_a_crash() -> None:
    w = world()
    committed(w, granted(w, [b"a", b"b"]))
    again = after_crash(w)
    assert again.held([b"a", b"b"]) == [True, True]


def test_the_budget_of_the_day_counts_it_once_also_after_a_crash() -> None:
    w = world(written_bytes_per_day=1 << 20)
    committed(w, granted(w, [b"a", b"b"]))
    now_s = w.engine.lifetimes.now_s
    assert w.engine.budget.written(now_s) == 2 * 1024
    assert after_crash(w).engine.budget.written(now_s) == 2 * 1024


@pytest.mark.parametrize("settled", [True, False])
def test_what_is_given_back_is_free_at_once_or_after_the_grace_time(settled: bool) -> None:
    w = world()
    ticket = granted(w, [b"a"])
    mine = units(ticket)
    w.engine.tickets.abort(ticket, w.now_ns, settled=settled)
    w.engine.audit()
    assert (mine <= free(w)) is settled
    assert isinstance(w.begin([b"a"])[0], WritePlan), "the key is nobody's"
    if not settled:
        w.wait(GRACE_NS - 1)
        assert not mine & free(w)
        w.wait(1)
        assert mine <= free(w)
    w.persist()
    assert isinstance(w.records[-1], FreedBatch)
    assert mine <= free(after_crash(w))


def test_a_ticket_that_ends_by_itself_is_quarantined_from_its_end_on() -> None:
    w = world()
    ticket = granted(w, [b"a"])
    mine = units(ticket)
    w.wait(TTL_NS + 3 * SECOND_NS)
    with pytest.raises(UnknownTicket):
        w.engine.tickets.find(ticket.ident, w.now_ns)
    assert not mine & free(w)
    assert not mine & free(after_crash_of(w))
    w.wait(GRACE_NS - 3 * SECOND_NS - 1)
    assert not mine & free(w)
    w.wait(1)
    assert mine <= free(w)
    assert w.engine.counters.tickets_expired == 1


def test_what_a_ticket_held_is_others_from_its_last_moment_on() -> None:
    """Whether or not anybody has looked at the clock since."""
    w = world(leases_per_scope_max=1)
    granted(w, [b"a"])
    w.now_ns += TTL_NS - 1
    assert w.begin([b"a"]) == [StoreStatus.IN_PROGRESS]
    assert not w.engine.tickets.has_room(b"s", 1, w.now_ns)
    w.now_ns += 1
    assert w.engine.tickets.has_room(b"s", 1, w.now_ns)
    granted(w, [b"b"])
    w.now_ns += TTL_NS
    (plan,) = w.plans([b"b"])
    assert w.engine.commit_store([plan], [1], w.now_ns).statuses == [StoreStatus.STORED]


def after_crash_of(w: World) -> World:
    w.persist()
    return after_crash(w, w.now_ns + GRACE_NS)


def test_a_ticket_does_not_end_while_it_is_committed() -> None:
    w = world()
    ticket = granted(w, [b"a"])
    plans = list(ticket.plans)
    w.engine.tickets.close(ticket)
    w.wait(2 * TTL_NS)
    assert not units(ticket) & free(w)
    outcome = w.engine.commit_store(plans, [1], w.now_ns)
    w.engine.tickets.done(ticket, outcome.statuses)
    w.persist()
    w.wait(2 * SECOND_NS)
    assert w.held([b"a"]) == [True]
    assert not w.engine.tickets.by_id


@pytest.mark.parametrize("removal", ["delete", "wipe"])
def test_what_is_deleted_or_wiped_meanwhile_is_cancelled_and_stays_out_of_use(removal: str) -> None:
    w = world()
    ticket = granted(w, [b"a"])
    mine = units(ticket)
    w.persist()
    if removal == "delete":
        w.delete([b"a"])
    else:
        w.engine.wipe("n", None, w.now_ns)
    w.persist()
    assert not mine & free(w), "its client may write yet"
    assert not mine & free(after_crash(w, w.now_ns + 1))
    assert committed(w, ticket) == [StoreStatus.CANCELLED]
    assert mine <= free(w)
    assert w.held([b"a"]) == [False]
    assert after_crash(w).held([b"a"]) == [False]


def test_what_is_cancelled_and_never_committed_is_free_after_time_and_grace() -> None:
    w = world()
    ticket = granted(w, [b"a"])
    mine = units(ticket)
    w.delete([b"a"])
    w.wait(TTL_NS)
    w.wait(GRACE_NS - 1)
    assert not mine & free(w)
    w.wait(1)
    assert mine <= free(w)


def test_a_wiped_reservation_is_erased_before_it_is_free() -> None:
    w = world()
    ticket = granted(w, [b"a"])
    mine = units(ticket)
    w.engine.wipe("n", None, w.now_ns, erase=True)
    w.wait(TTL_NS)
    assert not w.engine.wiping.take_erasable(10, 10), "its client may write yet"
    w.wait(GRACE_NS)
    (plan,) = w.engine.wiping.take_erasable(10, 10)
    assert not mine & free(w)
    w.engine.wiping.erased([plan])
    w.engine.audit()
    assert mine <= free(w)


def test_reservations_that_were_cancelled_before_the_ticket_was_made_are_not_in_it() -> None:
    w = world()
    request = BeginStore("n", b"s", [b"a", b"b"], [1024, 1024])
    plans = w.plans([b"a", b"b"])
    w.delete([b"a"])
    good, ticket, _ = w.engine.tickets.grant(request, plans, w.now_ns)
    w.engine.audit()
    assert good == [False, True]
    assert ticket is not None
    assert ticket.plans == plans[1:]
    assert {plans[0].extents[0].start_au} <= free(w)
    good, ticket, lsn = w.engine.tickets.grant(request, plans[:1], w.now_ns)
    assert (good, ticket, lsn) == ([False], None, 0)


def test_tickets_of_a_scope_are_bounded_in_number_and_bytes() -> None:
    w = world(leases_per_scope_max=2, leased_bytes_per_scope_max=3000)
    tickets = w.engine.tickets
    assert tickets.has_room(b"s", 3000, w.now_ns)
    assert not tickets.has_room(b"s", 3001, w.now_ns)
    first = granted(w, [b"a"], 2000)
    assert not tickets.has_room(b"s", 1001, w.now_ns)
    assert tickets.has_room(b"other", 3000, w.now_ns)
    committed(w, first)
    assert tickets.has_room(b"s", 3000, w.now_ns), "what is committed is no longer the client's"
    granted(w, [b"b"])
    assert not tickets.has_room(b"s", 1, w.now_ns), "two of them, one of which keeps its answer"
    w.wait(TTL_NS)
    assert tickets.has_room(b"s", 3000, w.now_ns)


def test_a_checkpoint_keeps_what_a_ticket_holds_out_of_use() -> None:
    w = world()
    for keys, ends in (([b"a"], None), ([b"b"], "expired"), ([b"c"], "committing")):
        ticket = granted(w, keys)
        mine = units(ticket)
        w.persist()
        if ends == "expired":
            w.wait(TTL_NS)
        if ends == "committing":
            w.engine.tickets.close(ticket)
            w.engine.commit_store(ticket.plans, [1], w.now_ns)
        image = w.engine.image
        restored = Restored(w.limits, w.now_ns)
        restored.begin(w.engine.last_lsn + 1, image.used_stamp_max, image.generation_max())
        names = image.names()
        restored.add_names(names.namespaces, names.scopes)
        objects, extents = image.rows(0, image.slots_used, w.now_ns)
        restored.add_objects(objects)
        restored.add_extents(extents)
        restored.end(w.engine.last_lsn)
        again = world()
        again.engine = Engine(
            w.limits, digest_secret=SECRET, entropy=Counter(), restored=restored, held_until_ns=w.now_ns + 1
        )
        again.engine.audit()
        assert not mine & free(again)
        assert again.held(keys) == [False]
        again.wait(w.now_ns + 1)
        again.persist()
        assert mine <= free(again)


def test_a_reservation_is_one_batch_of_the_journal_however_many_there_are() -> None:
    w = world(max_objects=4096, capacity_au=4096, au_bytes=64)
    granted(w, [b"k%d" % number for number in range(500)], 64)
    records = w.engine.take_records()
    for body_bytes_max in range(4000, 12_000, 64):
        for body in encode_batches(records, body_bytes_max):
            inside = [record for record in records if body.first_lsn <= record.lsn <= body.last_lsn]
            puts = [record.slots.tolist() for record in inside if isinstance(record, PutBatch)]
            deletes = [record.slots.tolist() for record in inside if isinstance(record, DeleteBatch)]
            assert puts == deletes, "a put alone would be live after a crash"


# --- clients of the run before --------------------------------------------------------------------------------


def held(ns: int, **limits: float) -> World:
    w = World(**limits)
    w.engine = Engine(w.limits, digest_secret=SECRET, entropy=Counter(), held_until_ns=w.now_ns + ns)
    return w


def test_while_clients_of_the_run_before_may_live_nothing_that_is_removed_is_free() -> None:
    w = held(TTL_NS)
    w.store([b"a", b"b", b"c"])
    before = free(w)
    w.delete([b"a"])
    w.engine.wipe("n", None, w.now_ns, erase=True)
    plan = w.begin([b"x"], scope=b"t")
    w.persist()
    w.wait(TTL_NS - 1)
    assert free(w) == before - {plan[0].extents[0].start_au}  # type: ignore[union-attr]
    assert not w.engine.wiping.take_erasable(10, 10), "what they write would be on erased units"
    w.wait(1)
    assert len(w.engine.wiping.take_erasable(10, 10)) == 3
    w.persist()
    assert len(free(w)) == LIMITS.capacity_au - 4, "they are being erased"


def test_a_corrupt_object_is_held_as_long_as_the_clients_of_the_run_before() -> None:
    w = held(TTL_NS, corrupt_hold_ns=SECOND_NS)
    w.store([b"a"])
    plans = w.pinned([b"a"])
    w.end_load(plans, plans)
    w.persist()
    w.wait(TTL_NS - 1)
    assert len(free(w)) == LIMITS.capacity_au - 1
    w.wait(1)
    w.persist()
    assert len(free(w)) == LIMITS.capacity_au


def test_nothing_is_evicted_for_space_that_would_not_be_free_soon() -> None:
    w = held(TTL_NS)
    w.store([b"a%d" % number for number in range(LIMITS.capacity_au)])
    assert w.begin([b"x"]) == [StoreStatus.NO_SPACE]
    assert w.engine.counters.evicted_demand == 0
    w.wait(TTL_NS)
    w.store([b"x"])
    assert w.engine.counters.evicted_demand > 0


def test_what_waits_for_its_tombstone_when_their_time_ends_is_free_with_it() -> None:
    w = held(TTL_NS)
    w.store([b"a", b"b"])
    w.delete([b"a"])
    w.wait(TTL_NS)
    assert len(free(w)) == LIMITS.capacity_au - 2
    w.persist()
    assert len(free(w)) == LIMITS.capacity_au - 1
