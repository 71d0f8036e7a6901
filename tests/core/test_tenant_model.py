"""Any history of tenants gives what the plain model gives, under every policy and enforcement."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from xkv_gateway.core.tenancy import Enforcement, EvictionPolicy, EvictionRules
from xkv_gateway.core.types import BeginStore, StoreStatus, WritePlan

from .helpers import NEVER, SECOND_NS, World, keys
from .tenant_model import Model

CAPACITY = 24
SCOPES = st.sampled_from([b"a", b"b", b"c"])
SPACES = st.sampled_from(["", "n"])
KEYS = st.sampled_from([b"%d" % i for i in range(14)])
RULES = st.builds(
    EvictionRules,
    policy=st.sampled_from(EvictionPolicy),
    trigger_watermark=st.sampled_from([0.5, 0.8, 1.0, NEVER]),
    eviction_ratio=st.sampled_from([0.1, 0.3, 1.0]),
    enforcement=st.sampled_from(Enforcement),
    unregistered_limit_bytes=st.sampled_from([0, 5 * 1024, 100 * 1024]),
)


class Tenants(RuleBasedStateMachine):
    """An engine beside the model."""

    @initialize(rules=RULES)
    def begin(self, rules: EvictionRules) -> None:
        self.world = World(rules, capacity_au=CAPACITY, max_objects=200)
        self.model = Model(rules, CAPACITY, self._ident)
        # The first cycle is behind us: the next ones come when the rule says so.
        self.world.now_ns += SECOND_NS

    def _ident(self, scope: bytes) -> int:
        return self.world.engine._state.names.scopes[scope].ident

    def _compare(self) -> None:
        for scope in (b"a", b"b", b"c"):
            held = self.model.held.get(scope, {})
            for space in ("", "n"):
                names = [b"%d" % i for i in range(14)]
                assert self.world.held(names, ns=space, scope=scope) == [(space, k) in held for k in names]
            info = self.world.engine.inspection.tenant(scope)
            assert info.held.charged_bytes == self.model.used(scope) * 1024
            assert info.held.objects == len(held)

    @rule(scope=SCOPES, space=SPACES, key=KEYS, units=st.sampled_from([1, 1, 2, 3, 9, 30]))
    def store(self, scope: bytes, space: str, key: bytes, units: int) -> None:
        request = BeginStore(space, scope, [key], [units * 1024])
        # Ties between scopes are broken by ids that the engine gives when the key is stored: the model first.
        expected = self.model.store(scope, (space, key), units)
        for _ in range(40):
            (entry,) = self.world.engine.begin_store(request, self.world.now_ns).entries
            if entry is not None:
                break
            self.world.persist()
        if isinstance(entry, WritePlan):
            (entry,) = self.world.commit([entry])
        assert isinstance(entry, StoreStatus)
        assert entry.value == expected
        self._compare()

    @rule(scope=SCOPES, space=SPACES, key=KEYS)
    def load(self, scope: bytes, space: str, key: bytes) -> None:
        (plan,) = self.world.load([key], ns=space, scope=scope)
        assert (plan is not None) == self.model.load(scope, (space, key))
        if plan is not None:
            self.world.end_load([plan])

    @rule(scope=SCOPES, units=st.sampled_from([0, 1, 4, 9, 16, 50]))
    def set_limit(self, scope: bytes, units: int) -> None:
        self.world.engine.quotas.set(scope, units * 1024, None)
        self.world.persist()
        self.model.limits[scope] = units
        self.model.leaving.pop(scope, None)

    @rule(scope=SCOPES)
    def clear_limit(self, scope: bytes) -> None:
        self.world.engine.quotas.set(scope, None, None)
        self.world.persist()
        self.model.clear_limit(scope)

    @rule()
    def cycle(self) -> None:
        self.world.now_ns += SECOND_NS
        due = self.world.engine.next_deadline()
        if due is not None:
            assert due <= self.world.now_ns
        self.model.cycle()
        for _ in range(100):
            if (due := self.world.engine.next_deadline()) is None or due > self.world.now_ns:
                break
            self.world.wait(0)
            self.world.persist()
        self._compare()


TestTenants = Tenants.TestCase
TestTenants.settings = settings(
    max_examples=60,
    phases=[Phase.generate],
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def hit_rate(policy: EvictionPolicy, noise: int, quota_units: int) -> float:
    """The victim's hit rate over a working set that fits its share, beside a neighbour that stores `noise` times as much."""
    world = World(EvictionRules(policy, trigger_watermark=NEVER), capacity_au=200, max_objects=400)
    world.engine.audit = lambda: None  # type: ignore[method-assign]
    for scope in (b"victim", b"noisy"):
        world.engine.quotas.set(scope, quota_units * 1024, None)
    dice = random.Random(5)
    hits = asked = stored = 0
    for turn in range(1500):
        key = b"%d" % int(dice.paretovariate(0.6) % 400)
        (plan,) = world.load([key], scope=b"victim")
        if turn >= 500:
            asked += 1
            hits += plan is not None
        if plan is not None:
            world.end_load([plan])
        else:
            world.store([key], scope=b"victim")
        for _ in range(noise):
            world.store([b"n%d" % (stored := stored + 1)], scope=b"noisy")
    return hits / asked


@pytest.mark.parametrize("quota_units", [100, 150, 1000], ids=["fitting", "oversold", "without effect"])
def test_a_noisy_neighbour_does_not_change_the_hit_rate_of_the_others(quota_units: int) -> None:
    alone = hit_rate(EvictionPolicy.ISOLATED_LRU, 1, quota_units)
    beside = hit_rate(EvictionPolicy.ISOLATED_LRU, 10, quota_units)
    assert 0.2 < alone < 0.95
    assert abs(alone - beside) <= 0.01


def test_without_isolation_it_does() -> None:
    alone = hit_rate(EvictionPolicy.LRU, 1, 1000)
    beside = hit_rate(EvictionPolicy.LRU, 10, 1000)
    assert alone - beside > 0.05


def test_the_fullest_scope_gives_first_in_proportion_to_its_quota() -> None:
    world = World(EvictionRules(EvictionPolicy.ISOLATED_LRU, trigger_watermark=NEVER), capacity_au=60)
    for scope, limit in ((b"large", 80), (b"small", 20), (b"new", 50)):
        world.engine.quotas.set(scope, limit * 1024, None)
    world.store(keys(44), scope=b"large")
    world.store(keys(16), scope=b"small")
    # 44/80 is less than 16/20: the small one gives, although it holds less.
    world.store(keys(4), scope=b"new")
    assert world.held(keys(16), scope=b"small") == [True] * 12 + [False] * 4
    # 12/20 is still more than 44/80; from 11/20 = 44/80 on both give, so that they stay level.
    world.store(keys(8, "n"), scope=b"new")
    held = {s: world.engine.inspection.tenant(s).held.objects for s in (b"large", b"small")}
    assert held == {b"large": 39, b"small": 9}


def test_a_scope_within_its_share_never_gives_for_one_that_is_not() -> None:
    world = World(EvictionRules(EvictionPolicy.ISOLATED_LRU, trigger_watermark=NEVER), capacity_au=20)
    for scope in (b"a", b"b"):
        world.engine.quotas.set(scope, 20 * 1024, None)
    world.store(keys(10), scope=b"a")
    for i in range(50):
        world.store([b"%d" % i], scope=b"b")
    assert world.held(keys(10), scope=b"a") == [True] * 10
