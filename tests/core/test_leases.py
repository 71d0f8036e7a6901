from __future__ import annotations

import pytest

from xkv_gateway.core.errors import UnknownLease
from xkv_gateway.core.types import LeaseId, StoreStatus

from .helpers import SECOND_NS, World, keys

K = [b"k"]


def test_a_lease_gives_the_old_bytes_after_delete_and_a_new_store() -> None:
    world = World()
    world.store(K)
    lease = world.lease(K)
    old = world.pinned(K, lease)
    world.delete(K)
    world.persist()
    world.store(K, 2048)
    assert world.pinned(K, lease)[0][:2] == old[0][:2]
    assert world.pinned(K)[0].size_bytes == 2048


@pytest.mark.parametrize("tick", [False, True])
def test_a_lease_is_over_by_the_clock_whether_or_not_anyone_cleaned_up(tick: bool) -> None:
    world = World()
    world.store(K)
    lease = world.lease(K)
    world.now_ns += SECOND_NS
    if tick:
        world.engine.tick(world.now_ns)
    assert world.load(K, lease) == [None]
    for call in (
        lambda: world.engine.renew(lease, 1, world.now_ns),
        lambda: world.engine.release(lease, world.now_ns),
    ):
        with pytest.raises(UnknownLease):
            call()


def test_an_unknown_lease_and_a_key_that_is_not_covered_are_a_miss() -> None:
    world = World()
    world.store(keys(3))
    assert world.load(keys(1), LeaseId(bytes(16))) == [None]
    lease = world.lease(keys(2))
    assert [plan is not None for plan in world.load(keys(3)[::-1], lease)] == [False, True, True]


def test_renew_prolongs_and_is_refused_once_an_object_is_doomed() -> None:
    world = World()
    world.store(keys(2))
    lease = world.lease(keys(2))
    assert world.engine.renew(lease, 100 * SECOND_NS, world.now_ns) == 60 * SECOND_NS
    world.wait(50 * SECOND_NS)
    assert world.engine.usage().leases == 1
    assert world.engine.renew(lease, SECOND_NS, world.now_ns) == SECOND_NS
    assert world.engine.next_deadline() == world.now_ns + SECOND_NS
    world.delete(keys(1))
    with pytest.raises(UnknownLease):
        world.engine.renew(lease, SECOND_NS, world.now_ns)
    assert len(world.pinned(keys(1), lease)) == 1


def test_leases_are_bounded_in_number_and_bytes_for_each_scope_and_hits_are_still_told() -> None:
    world = World(leases_per_scope_max=2, leased_bytes_per_scope_max=3 * 1024)
    world.store(keys(4))
    world.store(keys(1), scope=b"other")
    assert world.lookup(keys(4), SECOND_NS).lease is None
    assert world.lookup(keys(4), SECOND_NS).hits == 4
    world.lease(keys(1))
    world.lease(keys(1))
    assert world.lookup(keys(1), SECOND_NS).lease is None
    assert world.lookup(keys(1), SECOND_NS, scope=b"other").lease is not None
    assert world.engine.counters.leases_refused == 3
    world.now_ns += SECOND_NS
    assert world.lookup(keys(1), SECOND_NS).lease is not None


def test_a_key_twice_in_a_lookup_or_load_is_leased_once_and_pinned_twice() -> None:
    world = World()
    world.store(K)
    lease = world.lease(K * 3)
    assert world.engine.usage().leased_au == 1
    pins = world.pinned(K * 3, lease)
    world.end_load(pins[:2])
    world.engine.release(lease, world.now_ns)
    world.delete(K)
    world.persist()
    assert world.engine.usage().doomed_au == 1
    world.end_load(pins[2:])
    assert world.engine.usage().free_au == world.limits.capacity_au


def test_prefix_mode_counts_leading_hits_and_each_mode_all() -> None:
    world = World()
    names = keys(4)
    world.store([names[0], names[1], names[3]], [1, 2, 4])
    assert world.lookup(names).sizes_bytes == [1, 2]
    assert world.lookup(names, each=True).sizes_bytes == [1, 2, None, 4]
    assert world.lookup(names, each=True).hits == 3
    assert world.lookup([b"no"], SECOND_NS).lease is None


def test_only_leased_lookups_and_loads_make_an_object_look_used() -> None:
    world = World(capacity_au=3)
    names = keys(3)
    world.store(names[::-1])  # of one batch the first key is the youngest
    world.lookup(names)
    world.engine.release(world.lease(names[:1]), world.now_ns)
    world.end_load(world.pinned(names[1:2]))
    world.store([b"new"])
    assert world.held(names) == [True, True, False]


def test_ten_thousand_leases_that_nobody_ends_leave_nothing_behind() -> None:
    world = World(capacity_au=8, leases_per_scope_max=200)
    names = keys(8)
    world.store(names)
    engine = world.engine
    audit, engine.audit = engine.audit, lambda: None  # type: ignore[method-assign]
    for _ in range(10_000):
        world.lookup(names, SECOND_NS)
        world.now_ns += SECOND_NS // 100
    audit()
    assert len(engine._state.leases._heap) <= 2 * 200 + 65
    world.now_ns += SECOND_NS
    while engine.usage().leases:
        engine.tick(world.now_ns)
    audit()
    assert engine.usage().leased_au == 0
    world.store(keys(8, "new"))
    assert world.held(keys(8, "new")) == [True] * 8
    assert world.begin(names) == [None] * 8
    assert StoreStatus.NO_SPACE not in world.begin(names)


def test_leases_over_many_keys_end_in_slices_though_all_are_over_at_once() -> None:
    world = World(capacity_au=8192, max_objects=8192, leases_per_scope_max=64)
    names = keys(4096)
    for begin in range(0, 4096, 512):
        world.store(names[begin : begin + 512])
    for _ in range(12):
        world.lease(names)
    world.now_ns += 2 * SECOND_NS
    left = []
    while (deadline_ns := world.engine.next_deadline()) is not None and deadline_ns <= world.now_ns:
        world.wait(0)
        left.append(world.engine.usage().leases)
    assert left == [8, 4, 0]
    assert world.engine.usage().leased_au == 0
