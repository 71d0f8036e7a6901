"""Quotas: who may store what, what is evicted for it, and what a cycle takes back."""

from __future__ import annotations

import pytest

from xkv_gateway.core.records import DeleteBatch, DeleteCause
from xkv_gateway.core.tenancy import Enforcement, EvictionPolicy, EvictionRules
from xkv_gateway.core.types import StoreStatus, WritePlan

from .helpers import NEVER, SECOND_NS, World, keys

A, B = b"a", b"b"
KIB = 1024
HARD = EvictionRules(trigger_watermark=NEVER)
ISOLATED = EvictionRules(EvictionPolicy.ISOLATED_LRU, trigger_watermark=NEVER)
SOFT = EvictionRules(trigger_watermark=0.8, eviction_ratio=0.25, enforcement=Enforcement.SOFT)
OVER = StoreStatus.OVER_QUOTA


def limited(rules: EvictionRules = HARD, limit_units: int = 10, **limits: float) -> World:
    world = World(rules, **{"capacity_au": 100, "max_objects": 400, **limits})
    world.engine.quotas.set(A, limit_units * KIB, None)
    world.persist()
    return world


def charged(world: World, scope: bytes = A) -> int:
    return world.engine.inspection.tenant(scope).held.charged_bytes // KIB


def settle(world: World) -> None:
    """Let the cycle that is due run to its end."""
    for _ in range(64):
        world.wait(0)
        world.persist()


# --- hard ---------------------------------------------------------------------------------------------------


def test_a_store_beyond_the_quota_evicts_the_scopes_own_oldest_and_nothing_else() -> None:
    world = limited()
    world.store(keys(5), scope=B)
    for name in keys(10):
        world.store([name], scope=A)
    world.store(keys(3, "n"), scope=A)
    assert world.held(keys(10), scope=A) == [False] * 3 + [True] * 7
    assert world.held(keys(5), scope=B) == [True] * 5
    counters = world.engine.counters
    assert (counters.evicted_quota, counters.evicted_quota_bytes, counters.evicted_demand) == (3, 3 * KIB, 0)
    causes = {record.cause for record in world.records if isinstance(record, DeleteBatch)}
    assert causes == {DeleteCause.EVICTED_QUOTA}
    assert charged(world) == 10


def test_a_batch_beyond_the_quota_keeps_what_it_was_told_is_stored() -> None:
    world = limited()
    world.store(keys(4, "old"), scope=A)
    entries = world.begin(keys(256), scope=A)
    assert sum(isinstance(entry, WritePlan) for entry in entries) == 6
    assert entries[6:10] == [None] * 4
    assert entries[10:] == [OVER] * 246
    world.commit([entry for entry in entries if isinstance(entry, WritePlan)])
    world.store(keys(256)[6:10], scope=A)
    assert world.held(keys(10), scope=A) == [True] * 10
    assert world.engine.counters.over_quota == 246
    assert world.engine.counters.evicted_quota == 4


def test_what_a_batch_has_stored_is_not_evicted_when_it_asks_again() -> None:
    world = limited()
    world.store(keys(6, "old"), scope=A)
    plans = world.plans(keys(4), scope=A)
    world.commit(plans)
    # Somebody else of the tenant uses the old ones, so that the members of the batch are the oldest.
    world.end_load([plan for plan in world.load(keys(6, "old"), scope=A) if plan is not None])
    from xkv_gateway.core.types import BeginStore  # noqa: PLC0415

    request = BeginStore("n", A, keys(8)[4:], [KIB] * 4, plans)
    assert world.engine.begin_store(request, world.now_ns).entries == [None] * 4
    world.persist()
    assert world.held(keys(4), scope=A) == [True] * 4
    assert world.held(keys(6, "old"), scope=A) == [True] * 2 + [False] * 4


def test_what_can_never_fit_is_refused_and_nothing_is_evicted_for_it() -> None:
    world = limited(object_bytes_max=64 * KIB)
    world.store(keys(10), scope=A)
    assert world.begin([b"big"], 11 * KIB, scope=A) == [OVER]
    assert world.held(keys(10), scope=A) == [True] * 10
    assert world.engine.counters.evicted_quota == 0


@pytest.mark.parametrize("limit_bytes", [0, 1, KIB - 1])
def test_a_limit_of_less_than_a_unit_may_store_nothing_not_even_nothing(limit_bytes: int) -> None:
    world = World(HARD, capacity_au=100)
    world.engine.quotas.set(A, limit_bytes, None)
    assert world.begin([b"k", b"empty"], [1, 0], scope=A) == [OVER, OVER]
    assert not world.engine._state.names.scopes


def test_usage_is_summed_over_namespaces_and_their_order_is_one() -> None:
    world = limited()
    for i in range(10):
        world.store([b"%d" % i], ns=f"n{i % 3}", scope=A)
    world.end_load([plan for plan in world.load([b"0"], ns="n0", scope=A) if plan])
    world.store(keys(3, "p"), ns="other", scope=A)
    gone = [i for i in range(10) if not world.held([b"%d" % i], ns=f"n{i % 3}", scope=A)[0]]
    assert gone == [1, 2, 3]


def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    world = limited()
    world.store(keys(10), scope=A)
    world.store([b"n"], scope=A)
    assert world.held(keys(10), scope=A) == [True] * 9 + [False]


def test_usage_charges_what_is_reserved_committing_and_doomed_but_not_what_is_in_quarantine() -> None:
    world = limited()
    plans = world.plans(keys(4), scope=A)
    assert charged(world) == 4
    world.commit(plans, durable=False)
    assert charged(world) == 4
    world.persist()
    lease = world.lookup(keys(1), 30 * SECOND_NS, scope=A).lease
    assert lease is not None
    world.delete(keys(4), scope=A)
    world.persist()
    assert charged(world) == 1
    world.engine.release(lease, world.now_ns)
    world.persist()
    assert charged(world) == 0
    world.engine.abort_store(world.plans(keys(2), scope=A), world.now_ns, world.now_ns + SECOND_NS)
    assert charged(world) == 0
    assert world.engine.usage().quarantined_au == 2


def test_when_all_of_a_tenant_is_leased_its_stores_are_over_quota_until_a_lease_ends() -> None:
    world = limited()
    world.store(keys(10), scope=A)
    lease = world.lookup(keys(10), 30 * SECOND_NS, scope=A).lease
    assert lease is not None
    assert world.begin([b"n"], scope=A) == [OVER]
    world.engine.release(lease, world.now_ns)
    world.store([b"n"], scope=A)


def test_two_stores_that_wait_evict_each_its_own() -> None:
    world = limited()
    world.store(keys(10), scope=A)
    assert world.begin([b"x"], 3 * KIB, scope=A) == [None]
    assert world.begin([b"y"], 3 * KIB, scope=A) == [None]
    assert world.engine.counters.evicted_quota == 6
    world.persist()
    assert isinstance(world.begin([b"x"], 3 * KIB, scope=A)[0], WritePlan)
    assert isinstance(world.begin([b"y"], 3 * KIB, scope=A)[0], WritePlan)


def test_a_quota_lowered_below_usage_is_enforced_by_the_next_cycle_or_store() -> None:
    world = limited()
    world.store(keys(10), scope=A)
    world.engine.quotas.set(A, 4 * KIB, None)
    assert world.engine.next_deadline() == world.now_ns
    settle(world)
    assert charged(world) == 4
    assert world.held(keys(10), scope=A) == [True] * 4 + [False] * 6
    world.engine.quotas.set(A, 2 * KIB, None)
    assert world.begin([b"n"], scope=A) == [None]
    world.persist()
    world.store([b"n"], scope=A)
    assert charged(world) == 2
    assert world.held([b"n"], scope=A) == [True]


def test_a_quota_that_is_taken_away_holds_until_the_next_cycle() -> None:
    world = limited(ISOLATED)
    world.store(keys(5), scope=A)
    world.wait(0)
    world.engine.quotas.set(A, None, None)
    assert world.engine.inspection.tenant(A).effective_limit_bytes == 10 * KIB
    world.store([b"n"], scope=A)
    world.wait(SECOND_NS)
    settle(world)
    assert world.engine.inspection.tenant(A).effective_limit_bytes == 0
    assert charged(world) == 0
    assert world.begin([b"n"], scope=A) == [OVER]
    assert world.engine.next_deadline() is None


@pytest.mark.parametrize(
    ("rules", "limit"),
    [(HARD, None), (ISOLATED, 0), (EvictionRules(EvictionPolicy.NOOP, unregistered_limit_bytes=5), None)],
)
def test_an_unregistered_scope_has_the_limit_of_its_policy(rules: EvictionRules, limit: int | None) -> None:
    world = World(rules, capacity_au=100)
    assert world.engine.inspection.tenant(b"nobody").effective_limit_bytes == limit
    named = world.engine.quotas.set(b"named", None, "n")
    assert named
    assert world.engine.inspection.tenant(b"named").effective_limit_bytes == limit


def test_nothing_is_lost_for_having_no_quota_while_it_is_unknown_who_has_one() -> None:
    world = World(ISOLATED, capacity_au=20)
    world.engine.quotas.set_known(known=False)
    world.store(keys(5), scope=A)
    settle(world)
    world.wait(SECOND_NS)
    assert world.held(keys(5), scope=A) == [True] * 5
    world.engine.quotas.set_known(known=True)
    world.wait(SECOND_NS)
    settle(world)
    assert world.held(keys(5), scope=A) == [False] * 5


def test_under_noop_a_full_card_refuses_and_nothing_is_ever_evicted() -> None:
    world = World(EvictionRules(EvictionPolicy.NOOP, trigger_watermark=0.1), capacity_au=4)
    world.engine.quotas.set(A, 1, None)
    world.store(keys(4), scope=A)
    settle(world)
    assert world.begin([b"n"], scope=A) == [StoreStatus.NO_SPACE]
    assert world.held(keys(4), scope=A) == [True] * 4
    assert world.engine.next_deadline() is None


# --- soft ---------------------------------------------------------------------------------------------------


def test_soft_stores_are_accepted_and_a_cycle_takes_a_share_of_the_oldest() -> None:
    world = limited(SOFT, 20)
    for name in keys(30):
        world.store([name], scope=A)
    world.store(keys(30), scope=B)
    settle(world)
    # A quarter of 30, rounded up.
    assert world.held(keys(30), scope=A) == [False] * 8 + [True] * 22
    assert world.held(keys(30), scope=B) == [True] * 30
    assert world.engine.next_deadline() == world.now_ns + SECOND_NS
    world.wait(SECOND_NS)
    settle(world)
    assert charged(world) == 22 - 6
    world.wait(SECOND_NS)
    settle(world)
    # 16 is just the trigger: once more.
    assert charged(world) == 12
    world.wait(SECOND_NS)
    assert charged(world) == 12
    assert world.engine.next_deadline() is None


def test_below_the_trigger_a_soft_quota_costs_nothing() -> None:
    world = limited(SOFT, 20)
    world.store(keys(15), scope=A)
    assert world.engine.next_deadline() is None
    world.store(keys(1, "n"), scope=A)
    assert world.engine.next_deadline() == world.now_ns


def test_a_soft_limit_of_nothing_takes_everything_also_what_takes_no_units() -> None:
    world = World(
        EvictionRules(EvictionPolicy.ISOLATED_LRU, enforcement=Enforcement.SOFT),
        capacity_au=100,
        max_objects=400,
    )
    world.store(keys(20), scope=A)
    world.store(keys(2, "empty"), 0, scope=A)
    settle(world)
    assert world.engine.usage().live_objects == 0
    assert not world.engine._state.names.scopes
    assert world.engine.next_deadline() is None


def test_what_a_soft_cycle_cannot_take_now_it_takes_in_a_later_one() -> None:
    world = limited(SOFT, 8)
    world.store(keys(8), scope=A)
    lease = world.lookup(keys(8), 30 * SECOND_NS, scope=A).lease
    assert lease is not None
    settle(world)
    assert charged(world) == 8
    world.engine.release(lease, world.now_ns)
    world.wait(SECOND_NS)
    settle(world)
    assert charged(world) == 6


def test_what_quotas_take_in_a_cycle_counts_before_the_card_is_looked_at() -> None:
    world = limited(SOFT, 20, capacity_au=50)
    world.store(keys(30), scope=A)
    world.store(keys(10, "b"), scope=B)
    settle(world)
    assert charged(world, B) == 10
    assert world.engine.counters.evicted_watermark == 0


# --- who is counted -----------------------------------------------------------------------------------------


def test_a_million_scopes_leave_nothing_behind() -> None:
    world = World(ISOLATED, capacity_au=8)
    audit, world.engine.audit = world.engine.audit, lambda: None  # type: ignore[method-assign]
    for i in range(3000):
        scope = i.to_bytes(4, "big")
        world.engine.quotas.set(scope, KIB, None)
        world.store([b"k"], scope=scope)
        world.engine.quotas.set(scope, None, None)
        world.delete([b"k"], scope=scope)
        world.persist()
        world.wait(2 * SECOND_NS)
        world.engine.quotas.forget_removed(world.engine.last_lsn + 1)
    audit()
    state = world.engine._state
    assert not state.names.scopes
    assert not state.names.namespaces
    assert not state.quotas.by_scope
    assert not state.quotas.leaving
    assert not state.quotas.removed
    assert len(state.recency.heap) < 1000
    assert len(world.engine._eviction._fair._heap) < 1000


def test_only_named_tenants_are_counted_apart() -> None:
    world = limited()
    world.engine.quotas.set(A, 2 * KIB, "the tenant")
    world.store(keys(2), scope=A)
    world.store(keys(3), scope=B)
    world.store([b"n"], scope=A)
    assert world.begin(keys(3, "m"), scope=A)[2] is OVER
    world.persist()
    world.held(keys(2), scope=A)
    own = world.engine.inspection.tenant(A).counters
    assert own is not None
    assert (own.stored, own.stored_bytes, own.evicted_quota, own.over_quota) == (3, 3 * KIB, 3, 1)
    assert (own.lookup_hits, own.lookup_misses) == (0, 2)
    assert world.engine.inspection.tenant(B).counters is None
    assert world.engine.inspection.unnamed().objects == 3
    world.engine.quotas.set(A, 2 * KIB, None)
    assert world.engine.inspection.tenant(A).counters is None
    former = world.engine.inspection.former()
    assert (former.stored, former.evicted_quota) == (3, 3)
    world.engine.quotas.set(A, 2 * KIB, "another name")
    world.store([b"o"], scope=A)
    world.engine.quotas.set(A, 2 * KIB, "a third name")
    assert world.engine.inspection.former().stored == 4


def test_ten_thousand_tenants_with_quotas() -> None:
    world = World(ISOLATED, capacity_au=30_000, max_objects=30_000)
    audit, world.engine.audit = world.engine.audit, lambda: None  # type: ignore[method-assign]
    for i in range(10_000):
        world.engine.quotas.set(i.to_bytes(4, "big"), 2 * KIB, f"tenant {i}")
    world.persist()
    for i in range(10_000):
        assert set(world.commit(world.plans(keys(2), scope=i.to_bytes(4, "big")), durable=False)) == {
            StoreStatus.STORED
        }
    world.persist()
    world.store([b"n"], scope=(77).to_bytes(4, "big"))
    page = world.engine.inspection.tenants(9_000, 5_000)
    assert (len(page.items), page.total, page.next_cursor) == (1000, 10_000, None)
    assert page.items[0].held.charged_bytes == 2 * KIB
    assert world.engine.inspection.scopes_of("n", 0, 3).next_cursor == 3
    assert world.engine.counters.evicted_quota == 1
    world.engine.audit = audit  # type: ignore[method-assign]
