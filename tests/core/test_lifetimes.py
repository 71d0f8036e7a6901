"""How long objects may live: gone at once when their time is over, taken away bit by bit, and only by their namespace's rule."""

from __future__ import annotations

import pytest

from xkv_gateway.core.expiry import SCAN_SLOTS, VICTIMS
from xkv_gateway.core.lifetimes import AWAY_S_MAX, CLOCK_RECORD_S, resumed_s
from xkv_gateway.core.records import ClockRecord, DeleteBatch, DeleteCause, TtlRecord
from xkv_gateway.core.types import StoreStatus, WritePlan

from .helpers import SECOND_NS, World, keys


def world(idle_s: int = 0, total_s: int = 0, **limits: float) -> World:
    made = World(**limits)
    made.wait(0)
    made.engine.lifetimes.set("n", idle_s, total_s)
    made.wait(0)
    return made


def later(world: World, seconds: int) -> None:
    """Let time go on without a tick."""
    world.now_ns += seconds * SECOND_NS


def test_an_object_that_nobody_uses_is_a_miss_when_its_time_is_over_before_any_sweep() -> None:
    w = world(idle_s=60)
    w.store(keys(3))
    later(w, 59)
    assert w.held(keys(3)) == [True] * 3
    later(w, 2)
    assert w.held(keys(3)) == [False] * 3
    assert w.lookup(keys(3)).hits == 0
    assert w.load(keys(3)) == [None] * 3
    assert w.engine.usage().live_objects == 3


@pytest.mark.parametrize("limit", ["idle", "total"])
@pytest.mark.parametrize("begin_ms", range(0, 1000, 90))
def test_nothing_is_gone_before_its_time_at_whatever_part_of_a_second_it_was_stored(
    limit: str, begin_ms: int
) -> None:
    w = world(**{f"{limit}_s": 1})
    w.now_ns += begin_ms * 1_000_000
    w.store(keys(1))
    w.now_ns += SECOND_NS - 1
    assert w.held(keys(1)) == [True]
    w.wait(0)
    assert w.held(keys(1)) == [True]
    w.now_ns += SECOND_NS + 1
    assert w.held(keys(1)) == [False]


def test_a_lease_and_a_load_are_uses_and_a_bare_lookup_is_none() -> None:
    w = world(idle_s=60)
    leased, loaded, seen = keys(3)
    w.store([leased, loaded, seen])
    later(w, 50)
    w.lease([leased])
    w.end_load(w.pinned([loaded]))
    assert w.held([seen]) == [True]
    later(w, 59)
    assert w.held([leased, loaded, seen]) == [True, True, False]
    later(w, 2)
    assert w.held([leased, loaded, seen]) == [False, False, False]


def test_total_time_runs_from_the_store_whatever_is_read() -> None:
    w = world(total_s=100)
    w.store(keys(1))
    for _ in range(9):
        later(w, 11)
        w.end_load(w.pinned(keys(1)))
    later(w, 2)
    assert w.held(keys(1)) == [False]


def test_a_sweep_takes_them_away_counts_them_and_frees_their_space() -> None:
    w = world(idle_s=10, total_s=1000)
    w.store(keys(5))
    w.wait(11 * SECOND_NS)
    w.persist()
    assert w.engine.counters.evicted_ttl == 5
    assert w.engine.counters.evicted_ttl_bytes == 5 * 1024
    assert w.engine.usage().free_au == w.limits.capacity_au
    causes = [record.cause for record in w.records if isinstance(record, DeleteBatch)]
    assert causes == [DeleteCause.EVICTED_TTL]


def test_only_the_namespace_with_the_rule_loses_anything() -> None:
    w = world(idle_s=10)
    w.store(keys(2))
    w.store(keys(2), ns="other")
    w.store(keys(2), ns="")
    w.wait(3600 * SECOND_NS)
    assert w.held(keys(2)) == [False] * 2
    assert w.held(keys(2), ns="other") == [True] * 2
    assert w.held(keys(2), ns="") == [True] * 2
    assert w.engine.counters.evicted_ttl == 2


def test_a_rule_holds_for_what_is_there_already_and_ends_with_its_removal() -> None:
    w = world()
    w.store(keys(1))
    later(w, 100)
    w.engine.lifetimes.set("n", 0, 101)
    assert w.held(keys(1)) == [True]
    later(w, 2)
    assert w.held(keys(1)) == [False]
    w.engine.lifetimes.set("n", 0, 0)
    assert w.held(keys(1)) == [True]  # not swept yet: nothing was lost
    assert w.engine.next_deadline() is None


def test_a_key_whose_time_is_over_is_stored_anew_and_not_said_to_exist() -> None:
    w = world(total_s=10)
    w.store(keys(1))
    later(w, 11)
    (entry,) = w.begin(keys(1))
    assert isinstance(entry, WritePlan)
    assert w.commit([entry]) == [StoreStatus.STORED]
    assert w.held(keys(1)) == [True]
    later(w, 9)
    assert w.begin(keys(1)) == [StoreStatus.EXISTS]


def test_on_a_full_card_what_is_over_its_time_makes_room_for_its_successor() -> None:
    w = world(total_s=10)
    w.store(keys(28))
    later(w, 11)
    w.store(keys(28))
    assert w.held(keys(28)) == [True] * 28
    assert w.engine.counters.evicted_demand == 0


def test_a_delete_does_not_count_what_was_over_its_time() -> None:
    w = world(idle_s=10)
    w.store(keys(2, "a"))
    later(w, 5)
    w.store(keys(2, "b"))
    later(w, 6)
    assert w.delete([*keys(2, "a"), *keys(2, "b")]) == 2
    w.persist()
    assert w.engine.usage().free_au == w.limits.capacity_au


def test_a_lease_keeps_the_bytes_until_it_ends() -> None:
    w = world(total_s=10)
    w.store(keys(1))
    later(w, 9)
    lease = w.lease(keys(1), 30 * SECOND_NS)
    w.wait(5 * SECOND_NS)
    assert w.held(keys(1)) == [False]
    plans = w.pinned(keys(1), lease)
    w.end_load(plans)
    w.wait(30 * SECOND_NS)
    w.persist()
    assert w.engine.usage().free_au == w.limits.capacity_au


def test_many_go_in_bounded_slices_while_the_rest_of_the_engine_goes_on() -> None:
    count = 3 * VICTIMS
    w = World(capacity_au=2 * SCAN_SLOTS, max_objects=2 * SCAN_SLOTS)
    engine = w.engine
    audit, engine.audit = engine.audit, lambda: None  # type: ignore[method-assign]
    for begin in range(0, count, 2048):
        w.store(keys(2048, f"{begin}-"))
    w.store(keys(1), ns="other")
    engine.lifetimes.set("n", 1, 0)
    later(w, 2)
    gone = []
    while (deadline_ns := engine.next_deadline()) is not None and deadline_ns <= w.now_ns:
        before = engine.counters.evicted_ttl
        engine.tick(w.now_ns)
        gone.append(engine.counters.evicted_ttl - before)
        assert w.held(keys(1), ns="other") == [True]
    assert max(gone) == VICTIMS
    assert sum(gone) == count
    w.persist()
    audit()


def test_a_pass_comes_when_the_next_one_is_due_and_not_before() -> None:
    w = world(idle_s=100)
    w.store(keys(1))
    w.wait(0)
    w.wait(SECOND_NS)
    deadline_ns = w.engine.next_deadline()
    assert deadline_ns is not None
    assert deadline_ns - w.now_ns == 25 * SECOND_NS - SECOND_NS  # the journal is told the time
    w.wait(deadline_ns - w.now_ns)
    assert w.engine._expiry._due_s == 101


def test_the_journal_is_told_the_time_now_and_then_and_rules_when_they_change() -> None:
    w = World()
    for second in range(0, 3 * CLOCK_RECORD_S, 2):
        later(w, 2)
        w.store([b"%d" % second])
    w.engine.lifetimes.set("n", 5, 0)
    w.engine.lifetimes.set("n", 5, 0)
    w.persist()
    times = [record.time_s for record in w.records if isinstance(record, ClockRecord)]
    assert times == [CLOCK_RECORD_S, 2 * CLOCK_RECORD_S]
    assert sum(isinstance(record, TtlRecord) for record in w.records) == 1


def test_between_runs_the_clock_of_the_host_counts_within_bounds() -> None:
    now_s = 1_800_000_000
    assert resumed_s(0, now_s) == now_s
    assert resumed_s(now_s, now_s + 60) == now_s + 60
    assert resumed_s(now_s, now_s - 10**9) == now_s
    assert resumed_s(now_s, now_s + 10**9) == now_s + AWAY_S_MAX
