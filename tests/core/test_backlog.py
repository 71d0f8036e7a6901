"""What goes in the background while the journal is slow: one `persisted` must not have to free all of it."""

from __future__ import annotations

import itertools

import pytest

from xkv_gateway.core.engine import Engine
from xkv_gateway.core.removal import BACKLOG_MAX
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import BeginStore, EngineLimits, WritePlan

OBJECTS = 2 * BACKLOG_MAX
BATCH = 4096
UNIT = 4096
LATER_NS = 10**9


def full_engine() -> Engine:
    numbers = itertools.count()
    limits = EngineLimits(
        capacity_au=OBJECTS,
        au_bytes=UNIT,
        max_objects=OBJECTS,
        object_bytes_max=UNIT,
        lease_ttl_max_ns=LATER_NS,
        leases_per_scope_max=8,
        leased_bytes_per_scope_max=1 << 40,
        eviction=EvictionRules(eviction_ratio=1.0),
    )
    engine = Engine(limits, digest_secret=bytes(32), entropy=lambda n: next(numbers).to_bytes(n, "big"))
    for first in range(0, OBJECTS, BATCH):
        request = BeginStore("ns", b"", [b"%d" % n for n in range(first, first + BATCH)], [UNIT] * BATCH)
        plans = [entry for entry in engine.begin_store(request, 0).entries if isinstance(entry, WritePlan)]
        engine.commit_store(plans, [0] * BATCH, 0)
        settle(engine)
    return engine


def settle(engine: Engine) -> None:
    while engine.take_records():
        engine.persisted(engine.last_lsn, 0)


@pytest.mark.parametrize("work", ["eviction", "wipe", "lifetimes"])
def test_while_the_journal_is_slow_no_more_goes_in_the_background_than_one_turn_can_free(work: str) -> None:
    engine = full_engine()
    if work == "wipe":
        engine.wipe("ns", None, 0)
    if work == "lifetimes":
        engine.lifetimes.set("ns", 1, 0)
    now_ns = 5 * LATER_NS
    while engine.usage().live_objects:
        for _ in range(100):
            engine.tick(now_ns)
        # As much as one turn frees goes at a time, and what waits for the journal does not ask for the clock.
        assert 0 < engine.usage().doomed_au < BACKLOG_MAX + 2 * BATCH
        if engine.usage().live_objects:
            assert engine.usage().doomed_au >= BACKLOG_MAX
            assert engine.next_deadline() is None
        settle(engine)
        now_ns += 5 * LATER_NS
    assert engine.usage().free_au == OBJECTS
    engine.audit()
