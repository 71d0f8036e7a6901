"""Eviction, reservations that fail, usage that must not drift."""

from __future__ import annotations

import random

import pytest

from xkv_gateway.core.records import DeleteBatch, DeleteCause
from xkv_gateway.core.tenancy import EvictionPolicy, EvictionRules
from xkv_gateway.core.types import StoreStatus, WritePlan

from .helpers import SECOND_NS, World, keys

K = [b"k"]


def test_a_store_evicts_exactly_what_it_needs() -> None:
    world = World()
    names = keys(18)
    for name in names:
        world.store([name])
    world.store(keys(11, "n"))
    assert world.held(names) == [False] + [True] * 17
    assert world.engine.counters.evicted_demand == 1
    assert world.held(keys(11, "n")) == [True] * 11


def test_a_store_that_cannot_fit_fails_and_evicts_nothing() -> None:
    world = World(object_bytes_max=28 * 1024)
    world.store(keys(18))
    assert world.begin([b"big"], 29 * 1024) == [StoreStatus.TOO_LARGE]
    world.lease(keys(1))
    assert world.begin([b"big"], 28 * 1024) == [StoreStatus.NO_SPACE]
    assert world.held(keys(18)) == [True] * 18
    assert world.engine.last_lsn == world.records[-1].lsn


def test_free_space_in_too_many_pieces_is_joined_by_evicting_more() -> None:
    """Every second unit is free: half the card, and yet no object of more than 64 units finds room."""
    world = World(capacity_au=400, max_objects=500)
    names = keys(400)
    world.store(names)
    world.delete(names[::2])
    world.persist()
    world.store([b"large"], 150 * 1024)
    assert world.held([b"large"]) == [True]
    assert 40 <= world.engine.counters.evicted_demand <= 80
    assert world.engine.counters.no_space == 0


def test_a_batch_of_objects_that_lie_scattered_gets_room_for_each() -> None:
    world = World(capacity_au=1000, max_objects=1100)
    names = keys(1000)
    world.store(names)
    world.delete(names[::2])
    world.persist()
    world.store(keys(4, "large"), [120 * 1024, 100 * 1024, 120 * 1024, 80 * 1024])
    assert world.held(keys(4, "large")) == [True] * 4
    assert world.engine.counters.no_space == 0


def test_what_lies_scattered_and_is_not_to_be_had_is_no_space_and_nothing_waits() -> None:
    world = World(capacity_au=400, max_objects=500)
    names = keys(400)
    world.store(names)
    world.delete(names[::2])
    world.persist()
    lease = world.lookup(names[1::2], SECOND_NS, each=True).lease
    assert lease is not None
    assert world.begin([b"large"], 150 * 1024) == [StoreStatus.NO_SPACE]
    assert world.engine.counters.evicted_demand == 0
    world.engine.release(lease, world.now_ns)
    assert world.begin([b"large"], 150 * 1024) == [None]


def test_nothing_is_evicted_for_what_lies_scattered_where_nothing_may_be() -> None:
    world = World(EvictionRules(policy=EvictionPolicy.NOOP), capacity_au=400, max_objects=500)
    names = keys(400)
    world.store(names)
    world.delete(names[::2])
    world.persist()
    assert world.begin([b"large"], 150 * 1024) == [StoreStatus.NO_SPACE]
    assert world.held(names[1::2]) == [True] * 200


def test_members_of_one_batch_do_not_evict_each_other() -> None:
    world = World(capacity_au=8)
    entries = world.begin(keys(12))
    assert all(isinstance(entry, WritePlan) for entry in entries[:8])
    assert entries[8:] == [StoreStatus.NO_SPACE] * 4


def test_stores_that_wait_do_not_count_on_the_same_space() -> None:
    world = World(capacity_au=8)
    world.store(keys(8))
    for i in range(4):
        assert world.begin([b"%d" % i], 2048) == [None]
    assert world.engine.counters.evicted_demand == 8
    world.persist()
    assert all(isinstance(world.begin([b"%d" % i], 2048)[0], WritePlan) for i in range(4))


def test_what_a_store_that_went_away_had_evicted_is_free_for_others() -> None:
    world = World(capacity_au=8)
    world.store(keys(8))
    assert world.begin([b"a"], 2048) == [None]
    world.persist()
    assert isinstance(world.begin([b"b"], 2048)[0], WritePlan)
    assert world.engine.counters.evicted_demand == 2


def test_the_object_limit_makes_room_like_the_capacity_does() -> None:
    world = World(max_objects=4)
    world.store(keys(4), 0)
    assert world.begin(keys(5, "n"), 0) == [None] * 4 + [StoreStatus.NO_SPACE]
    world.persist()
    world.store(keys(4, "n"), 0)
    assert world.held(keys(4)) == [False] * 4


def test_the_watermark_counts_bytes_and_overshoots_by_less_than_one_object() -> None:
    world = World(
        capacity_au=1100, max_objects=2000, rules=EvictionRules(trigger_watermark=0.8, eviction_ratio=0.13)
    )
    world.store([b"huge"], 800 * 1024)
    for i in range(79):
        world.store(keys(1, f"s{i}"))
    assert world.engine.next_deadline() is None
    world.store([b"one more"])
    assert world.engine.next_deadline() == world.now_ns
    for _ in range(64):
        world.wait(0)
    assert world.held([b"huge"]) == [False]
    assert world.engine.counters.evicted_watermark == 1
    assert world.engine.counters.eviction_passes == 1
    assert world.engine.next_deadline() is None
    small = World(
        capacity_au=100, max_objects=200, rules=EvictionRules(trigger_watermark=0.8, eviction_ratio=0.13)
    )
    for name in keys(81):
        small.store([name])
    small.wait(0)
    assert small.engine.usage().live_au == 70


def test_one_unevictable_oldest_object_neither_blocks_nor_spins_eviction() -> None:
    world = World(capacity_au=8, rules=EvictionRules(trigger_watermark=0.9, eviction_ratio=0.44))
    names = keys(8)
    for name in names:
        world.store([name])
    lease = world.lease(names[:1], 30 * SECOND_NS)
    for name in names[1:]:
        world.end_load(world.pinned([name]))
    world.wait(0)
    assert world.held(names) == [True] + [False] * 4 + [True] * 3
    world.store(keys(7, "n"))
    assert world.held(names[:1]) == [True]
    world.engine.release(lease, world.now_ns)
    world.persist()
    world.begin([b"x"])
    assert world.held(names[:1]) == [False], "once it can go, it is the oldest again"


def test_when_all_is_leased_there_is_no_space_now_and_nothing_to_do_until_a_lease_ends() -> None:
    world = World(capacity_au=4, rules=EvictionRules(trigger_watermark=0.5, eviction_ratio=0.1))
    world.store(keys(4))
    world.lease(keys(4), 9 * SECOND_NS)
    assert world.begin(K) == [StoreStatus.NO_SPACE]
    world.wait(0)
    assert world.engine.next_deadline() == world.now_ns + 9 * SECOND_NS
    world.wait(9 * SECOND_NS)
    world.persist()
    assert isinstance(world.begin(K)[0], WritePlan)


def test_a_writer_that_dies_blocks_its_key_only_until_it_is_aborted_and_leaves_no_drift() -> None:
    world = World()
    before = world.engine.usage()
    audit, world.engine.audit = world.engine.audit, lambda: None  # type: ignore[method-assign]
    for i in range(1000):
        plans = world.plans(K, 20 * 1024)
        assert world.held(K) == [False]
        assert world.begin(K) == [StoreStatus.IN_PROGRESS]
        settles_at_ns = world.now_ns + SECOND_NS if i % 2 else None
        world.engine.abort_store(plans, world.now_ns, settles_at_ns)
        world.now_ns += SECOND_NS
        world.engine.tick(world.now_ns)
    audit()
    assert world.engine.usage() == before
    assert not world.engine._state.names.scopes
    assert world.engine.take_records() == []


def test_ending_twice_is_a_typed_no_op_in_every_order() -> None:
    world = World()
    plans = world.plans(K)
    assert world.delete(K) == 0
    assert world.delete(K) == 0
    world.engine.abort_store(plans, world.now_ns, None)
    world.engine.abort_store(plans, world.now_ns, None)
    assert world.commit(plans) == [StoreStatus.CANCELLED]
    plans = world.plans(K)
    world.engine.abort_store(plans, world.now_ns, world.now_ns + SECOND_NS)
    assert world.commit(plans) == [StoreStatus.CANCELLED]
    assert world.engine.usage().quarantined_au == 1
    plans = world.plans(K)
    assert world.commit(plans, durable=False) == [StoreStatus.STORED]
    assert world.delete(K) == 1
    assert world.delete(K) == 0
    world.persist()
    assert world.held(K) == [False]


def test_a_slow_read_keeps_its_extents_while_the_card_is_filled_again() -> None:
    world = World(capacity_au=4)
    world.store(keys(4))
    lease = world.lease(keys(1))
    pins = world.pinned(keys(1), lease)
    world.wait(2 * SECOND_NS)
    world.store(keys(3, "n"), scope=b"b")
    world.delete(keys(1))
    world.persist()
    assert world.begin([b"more"], scope=b"b") == [None]
    assert world.engine.usage().doomed_au >= 1
    assert world.load(keys(1), lease) == [None]
    world.end_load(pins)
    world.persist()
    assert isinstance(world.begin([b"more"], scope=b"b")[0], WritePlan)


def test_many_writers_of_one_key_leave_exactly_one_value_and_its_usage() -> None:
    world = World()
    first = world.plans(K, 5000)
    assert [world.begin(K, size)[0] for size in range(49)] == [StoreStatus.IN_PROGRESS] * 49
    world.commit(first)
    assert world.begin(K, 1) == [StoreStatus.EXISTS]
    assert world.engine.usage().live_au == 5
    for i in range(200):
        world.delete(K)
        plans = world.plans(K, 1024 if i % 2 else 10240)
        if i % 3:
            world.commit(plans)
        else:
            world.engine.abort_store(plans, world.now_ns, None)
            world.store(K, 1)
        world.persist()
    usage = world.engine.usage()
    assert (usage.live_objects, usage.free_au + usage.live_au) == (1, 28)
    assert usage.live_au == -(-world.pinned(K)[0].size_bytes // 1024)


def test_many_hands_in_random_order_never_break_an_invariant() -> None:
    dice = random.Random(7)
    world = World(
        capacity_au=64, max_objects=64, rules=EvictionRules(trigger_watermark=0.9, eviction_ratio=0.22)
    )
    writes: list[WritePlan] = []
    for _ in range(1500):
        scope = dice.choice([b"", b"a", b"b"])
        names = dice.sample(keys(30), dice.randint(1, 6))
        match dice.randrange(7):
            case 0 | 1:
                entries = world.begin(names, [dice.choice([1, 1024, 9000])] * len(names), scope=scope)
                writes += [entry for entry in entries if isinstance(entry, WritePlan)]
            case 2 | 3 if writes:
                dice.shuffle(writes)
                world.commit([writes.pop()], durable=dice.random() < 0.5)
            case 4 if writes:
                world.engine.abort_store(
                    [writes.pop()], world.now_ns, dice.choice([None, world.now_ns + SECOND_NS])
                )
            case 5:
                world.delete(names, scope=scope)
            case _:
                world.lookup(names, dice.choice([0, SECOND_NS]), scope=scope)
                world.wait(SECOND_NS // 4)
    for plan in writes:
        world.commit([plan])
    for scope in (b"", b"a", b"b"):
        world.delete(keys(30), scope=scope)
    world.wait(61 * SECOND_NS)
    world.persist()
    assert world.engine.usage().free_au == 64


def test_causes_of_deletion_are_recorded_and_counted() -> None:
    world = World(capacity_au=4)
    world.store(keys(4))
    world.store([b"n"])
    world.delete([b"n"])
    world.engine.wipe("n", None, world.now_ns)
    world.persist()
    causes = [record.cause for record in world.records if isinstance(record, DeleteBatch)]
    assert causes == [DeleteCause.EVICTED_DEMAND, DeleteCause.DELETED, DeleteCause.WIPED]
    counters = world.engine.counters
    assert (counters.evicted_demand, counters.evicted_demand_bytes, counters.deleted, counters.wiped) == (
        1,
        1024,
        1,
        3,
    )


@pytest.mark.parametrize("scope", [None, b"s"])
def test_a_wipe_leaves_other_scopes_and_namespaces_and_cancels_stores_under_way(scope: bytes | None) -> None:
    world = World()
    world.store(keys(2))
    world.store(keys(2), ns="n2")
    world.store(keys(2), scope=b"s2")
    plans = world.plans([b"late"])
    outcome = world.engine.wipe("n", scope, world.now_ns)
    assert outcome.objects == (2 if scope else 4)
    assert outcome.lsn == world.engine.last_lsn
    assert world.commit(plans) == [StoreStatus.CANCELLED]
    assert world.held(keys(2)) == [False] * 2
    assert world.held(keys(2), ns="n2") == [True] * 2
    assert world.held(keys(2), scope=b"s2") == [scope is not None] * 2


def test_a_key_that_exists_is_not_evicted_for_the_other_members_of_its_batch() -> None:
    world = World(capacity_au=4)
    for name in keys(4):
        world.store([name])
    assert world.begin([*keys(1), b"n"]) == [StoreStatus.EXISTS, None]
    assert world.held(keys(4)) == [True, False, True, True]
    world.persist()
    assert world.begin([*keys(1), b"x", b"y", b"z"])[0] is StoreStatus.EXISTS
    world.persist()
    assert world.held(keys(1)) == [True]
