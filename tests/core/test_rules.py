"""The rules of the design that concern the engine, one test named after each."""

from __future__ import annotations

import numpy as np
import pytest

from xkv_gateway.core.errors import BrokenInvariant, StalePlan
from xkv_gateway.core.records import DeleteBatch, DeleteCause, FreedBatch, PutBatch
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import StoreStatus, WritePlan

from .helpers import SECOND_NS, World, keys

K = [b"k"]


def test_r1_an_object_is_found_under_exactly_its_namespace_scope_and_key() -> None:
    world = World()
    places = [("a", b"bc", b"k"), ("ab", b"c", b"k"), ("a", b"b", b"ck"), ("", b"x", b"k"), ("x", b"", b"k")]
    for ns, scope, key in places:
        assert world.held([key], ns=ns, scope=scope) == [False]
        world.store([key], ns=ns, scope=scope)
    for ns, scope, key in places[:2]:
        assert world.delete([key], ns=ns, scope=scope) == 1
    assert [world.held([key], ns=ns, scope=scope) for ns, scope, key in places] == [[False]] * 2 + [
        [True]
    ] * 3


def test_r1_a_lease_of_one_scope_gives_nothing_to_another() -> None:
    world = World()
    world.store(K)
    lease = world.lease(K)
    assert world.load(K, lease, scope=b"other") == [None]
    assert world.load(K, lease, ns="other") == [None]


def test_r2_an_object_is_visible_only_when_its_record_is_durable() -> None:
    world = World()
    plans = world.plans(K)
    assert world.held(K) == [False]
    world.commit(plans, durable=False)
    assert world.held(K) == [False]
    assert world.load(K) == [None]
    world.persist()
    assert world.held(K) == [True]


def test_r3_extents_wait_for_the_tombstone() -> None:
    world = World(capacity_au=1)
    world.store(K)
    world.delete(K)
    assert world.begin([b"new"]) == [None]
    world.persist()
    assert isinstance(world.begin([b"new"])[0], WritePlan)


@pytest.mark.parametrize("guard", ["lease", "pin"])
def test_r3_extents_wait_for_leases_and_reads_also_when_the_tombstone_is_durable(guard: str) -> None:
    world = World(capacity_au=1)
    world.store(K)
    lease = world.lease(K) if guard == "lease" else None
    pins = world.pinned(K) if guard == "pin" else []
    world.delete(K)
    world.persist()
    assert world.begin([b"new"]) == [StoreStatus.NO_SPACE]
    if lease is not None:
        world.engine.release(lease, world.now_ns)
    else:
        world.end_load(pins)
    assert isinstance(world.begin([b"new"])[0], WritePlan)


def test_r3_what_is_freed_is_recorded_after_its_tombstone() -> None:
    world = World()
    world.store(K)
    world.delete(K)
    world.persist()
    puts, deletes, freed = (
        [record for record in world.records if isinstance(record, kind)]
        for kind in (PutBatch, DeleteBatch, FreedBatch)
    )
    assert puts[0].lsn < deletes[0].lsn < freed[0].lsn
    assert deletes[0].cause is DeleteCause.DELETED
    assert puts[0].slots.tolist() == deletes[0].slots.tolist() == freed[0].slots.tolist()
    assert puts[0].generations.tolist() == freed[0].generations.tolist()


def test_r4_units_of_a_failed_write_stay_in_quarantine_until_it_settles() -> None:
    world = World(capacity_au=2)
    plans = world.plans(K)
    world.engine.abort_store(plans, world.now_ns, world.now_ns + 5 * SECOND_NS)
    assert world.engine.usage().quarantined_au == 1
    assert world.engine.next_deadline() == world.now_ns + 5 * SECOND_NS
    retry = world.plans(K)
    assert {e.start_au for e in retry[0].extents}.isdisjoint({e.start_au for e in plans[0].extents})
    assert world.begin([b"other"]) == [StoreStatus.NO_SPACE]
    world.wait(5 * SECOND_NS)
    assert world.engine.usage().quarantined_au == 0
    assert isinstance(world.begin([b"other"])[0], WritePlan)


def test_r4_a_cancelled_writer_may_write_until_it_says_that_it_ended() -> None:
    world = World(capacity_au=1)
    plans = world.plans(K)
    assert world.delete(K) == 0
    world.persist()
    assert world.begin([b"other"]) == [StoreStatus.NO_SPACE]
    assert world.commit(plans) == [StoreStatus.CANCELLED]
    assert isinstance(world.begin([b"other"])[0], WritePlan)
    assert world.held(K) == [False]


def test_r5_an_audit_finds_totals_that_do_not_follow_from_the_entries() -> None:
    world = World()
    world.store(keys(3))
    world.engine._state.slots.units_in[0] += 1
    with pytest.raises(BrokenInvariant, match="units by state"):
        world.engine.audit()


def test_r6_an_object_with_a_wrong_checksum_is_removed_counted_and_its_units_held() -> None:
    world = World(corrupt_hold_ns=10 * SECOND_NS)
    world.store(K)
    pins = world.pinned(K)
    assert pins[0].checksum == 7 + pins[0].slot
    world.end_load(pins, pins)
    assert world.held(K) == [False]
    assert world.engine.counters.corrupt == 1
    world.persist()
    assert world.engine.usage().quarantined_au == 1
    assert not any(isinstance(record, FreedBatch) for record in world.records)
    world.wait(10 * SECOND_NS)
    world.persist()
    assert world.engine.usage().free_au == world.limits.capacity_au
    assert isinstance(world.records[-1], FreedBatch)


def test_r7_a_corrupt_read_removes_only_the_generation_that_it_read() -> None:
    world = World()
    world.store(K)
    pins = world.pinned(K)
    world.delete(K)
    world.persist()
    world.store(K)
    world.end_load(pins, pins)
    assert world.held(K) == [True]
    with pytest.raises(StalePlan):
        world.end_load(pins, pins)


def test_r7_a_plan_that_was_ended_means_nothing_for_the_next_object_in_its_slot() -> None:
    world = World(capacity_au=1, max_objects=1)
    old = world.plans(K)
    world.engine.abort_store(old, world.now_ns, None)
    new = world.plans(K)
    assert new[0].slot == old[0].slot
    assert world.commit(old) == [StoreStatus.CANCELLED]
    world.engine.abort_store(old, world.now_ns, None)
    assert world.commit(new) == [StoreStatus.STORED]


@pytest.mark.parametrize("bulk", ["evict", "watermark", "wipe", "batch delete"])
def test_r8_bulk_paths_respect_the_guards_of_single_ones(bulk: str) -> None:
    world = World(capacity_au=8, rules=EvictionRules(trigger_watermark=0.9, eviction_ratio=0.67))
    names = keys(8)
    world.store(names)
    world.lease(names[:2], 30 * SECOND_NS)
    pins = world.pinned(names[2:4])
    covered = np.concatenate([world.engine._state.slots.start_au[:4]])
    match bulk:
        case "evict":
            assert world.begin(keys(8, "n")) == [None] * 4 + [StoreStatus.NO_SPACE] * 4
        case "watermark":
            world.wait(1)
        case "wipe":
            assert world.engine.wipe("n", None, world.now_ns).objects == 8
        case _:
            assert world.delete(names) == 8
    world.persist()
    world.engine.audit()
    taken = world.engine._state.allocator.taken()
    assert taken[covered].all()
    assert world.engine.usage().free_au >= 4
    world.end_load(pins)
    world.wait(30 * SECOND_NS)


def test_r9_a_store_under_way_is_neither_held_nor_absent() -> None:
    world = World()
    world.plans(K)
    assert world.begin(K) == [StoreStatus.IN_PROGRESS]
    assert world.held(K) == [False]


def test_r10_a_wiped_object_gives_no_bytes_even_under_its_lease_while_the_space_is_held() -> None:
    world = World(capacity_au=1)
    world.store(K)
    lease = world.lease(K)
    outcome = world.engine.wipe("n", b"s", world.now_ns)
    assert (outcome.objects, outcome.bytes) == (1, 1024)
    assert world.load(K, lease) == [None]
    world.persist()
    assert world.begin([b"new"]) == [StoreStatus.NO_SPACE]
    world.wait(SECOND_NS)
    assert isinstance(world.begin([b"new"])[0], WritePlan)


def test_r11_next_deadline_is_when_something_ends_and_none_when_nothing_does() -> None:
    world = World()
    assert world.engine.next_deadline() is None
    world.store(K)
    world.lease(K, 3 * SECOND_NS)
    assert world.engine.next_deadline() == world.now_ns + 3 * SECOND_NS
    world.wait(3 * SECOND_NS)
    assert world.engine.next_deadline() is None
