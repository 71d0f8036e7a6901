"""Rules of eviction that change while the engine runs: they hold for what is there, from the next cycle on."""

from __future__ import annotations

from xkv_gateway.core.tenancy import Enforcement, EvictionPolicy, EvictionRules
from xkv_gateway.core.types import StoreStatus

from .helpers import NEVER, SECOND_NS, World, keys
from .test_quotas import HARD, ISOLATED, KIB, SOFT, A, B, charged, limited, settle


def change(world: World, rules: EvictionRules, bytes_per_day: int = 0) -> None:
    world.now_ns += SECOND_NS  # the next cycle is due
    world.engine.set_rules(rules, bytes_per_day)
    world.engine.audit()


def test_hard_becomes_soft_and_hard_again() -> None:
    world = limited(HARD, 10)
    change(world, SOFT)
    world.store(keys(20), scope=A)
    assert charged(world) == 20
    settle(world)
    assert charged(world) < 20
    change(world, HARD)
    settle(world)
    assert charged(world) <= 10
    world.store(keys(10, "n"), scope=A)
    assert charged(world) == 10


def test_a_policy_that_isolates_takes_from_who_is_most_over_its_share_and_lru_from_the_oldest() -> None:
    world = World(HARD, capacity_au=20, max_objects=100)
    world.store(keys(15), scope=A)
    world.store(keys(5), scope=B)
    world.load(keys(15), scope=A)
    change(world, EvictionRules(EvictionPolicy.ISOLATED_LRU, NEVER, unregistered_limit_bytes=100 * KIB))
    world.engine.end_load([plan for plan in world.load(keys(15), scope=A) if plan] * 2, [], world.now_ns)
    world.store(keys(5, "n"), scope=B)
    assert charged(world, B) == 10
    change(world, HARD)
    world.store(keys(5, "m"), scope=A)
    assert world.held(keys(5), scope=B) == [False] * 5


def test_noop_evicts_nothing_and_the_limit_of_the_unregistered_comes_and_goes() -> None:
    world = World(HARD, capacity_au=10, max_objects=100)
    world.store(keys(10), scope=A)
    change(world, EvictionRules(EvictionPolicy.NOOP))
    assert world.begin(keys(1, "n"), scope=A) == [StoreStatus.NO_SPACE]
    change(world, ISOLATED)
    settle(world)
    assert charged(world) == 0
    assert world.begin(keys(1, "n"), scope=A) == [StoreStatus.OVER_QUOTA]
    change(world, HARD)
    world.store(keys(1, "n"), scope=A)


def test_a_watermark_that_is_lowered_takes_effect_in_the_next_cycle() -> None:
    world = World(HARD, capacity_au=100, max_objects=400)
    world.store(keys(60), scope=A)
    settle(world)
    assert charged(world) == 60
    change(world, EvictionRules(trigger_watermark=0.5, eviction_ratio=0.5, enforcement=Enforcement.HARD))
    settle(world)
    assert charged(world) == 30


def test_a_budget_that_is_set_counts_what_was_written_before() -> None:
    world = World(HARD, capacity_au=100, max_objects=400)
    world.store(keys(5), scope=A)
    change(world, HARD, 6 * KIB)
    assert world.begin(keys(2, "n"), scope=A)[1] == StoreStatus.NO_SPACE
    change(world, HARD, 0)
    world.store(keys(9, "m"), scope=A)
