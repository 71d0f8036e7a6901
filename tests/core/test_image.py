"""An engine that is rebuilt from rows and records is the engine that made them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from xkv_gateway.core.engine import Engine
from xkv_gateway.core.restore import Restored
from xkv_gateway.core.types import (
    BeginLoad,
    BeginStore,
    Delete,
    EngineLimits,
    Lookup,
    LookupMode,
    Lsn,
    WritePlan,
)

if TYPE_CHECKING:
    from xkv_gateway.core.records import Record

LIMITS = EngineLimits(
    capacity_au=256,
    au_bytes=4096,
    max_objects=128,
    object_bytes_max=1 << 20,
    lease_ttl_max_ns=60_000_000_000,
    leases_per_scope_max=100,
    leased_bytes_per_scope_max=1 << 40,
)
SECRET = bytes(range(32))
HOMES = [("a", b""), ("a", b"s"), ("b", b"s"), ("", b"")]


def new_engine(restored: Restored | None = None) -> Engine:
    rng = random.Random(7)
    return Engine(LIMITS, digest_secret=SECRET, entropy=rng.randbytes, restored=restored)


class Driver:
    """Plays random operations on an engine; everything recorded is durable at the end of each step."""

    def __init__(self, seed: int) -> None:
        self.engine = new_engine()
        self.rng = random.Random(seed)
        self.records: list[Record] = []
        self.now_ns = 0

    def step(self) -> None:
        self.now_ns += 1
        home = self.rng.choice(HOMES)
        keys = self.rng.sample([b"k%d" % i for i in range(60)], self.rng.randrange(1, 9))
        match self.rng.randrange(5):
            case 0 | 1:
                sizes = [self.rng.randrange(0, 40_000) for _ in keys]
                outcome = self.engine.begin_store(BeginStore(*home, keys, sizes), self.now_ns)
                plans = [plan for plan in outcome.entries if isinstance(plan, WritePlan)]
                self.engine.commit_store(plans, [self.rng.getrandbits(64) for _ in plans], self.now_ns)
            case 2:
                self.engine.delete(Delete(*home, keys), self.now_ns)
            case 3:
                plans_or_none = self.engine.begin_load(BeginLoad(*home, keys, None), self.now_ns)
                plans_read = [plan for plan in plans_or_none if plan is not None]
                corrupt = plans_read[:1] if self.rng.random() < 0.1 else []
                self.engine.end_load(plans_read, corrupt, self.now_ns)
            case _:
                if self.rng.random() < 0.1:
                    self.engine.wipe(home[0], home[1] if self.rng.random() < 0.5 else None, self.now_ns)
        self.settle()

    def settle(self) -> None:
        while True:
            records = self.engine.take_records()
            self.records += records
            self.engine.persisted(self.engine.last_lsn, self.now_ns)
            if not records:
                return


def contents(engine: Engine) -> dict[tuple[str, bytes, bytes], tuple[int, int]]:
    found = {}
    for home in HOMES:
        keys = [b"k%d" % i for i in range(60)]
        plans = engine.begin_load(BeginLoad(*home, keys, None), 10**6)
        for key, plan in zip(keys, plans, strict=True):
            if plan is not None:
                found[*home, key] = (plan.size_bytes, plan.checksum)
        engine.end_load([plan for plan in plans if plan is not None], [], 10**6)
    return found


def from_checkpoint(driver: Driver, steps_between: int) -> Restored:
    """A fuzzy checkpoint: the engine goes on between the parts."""
    image = driver.engine.image
    restored = Restored(LIMITS, driver.now_ns)
    start_lsn = driver.engine.last_lsn + 1
    parts = []
    for first in range(0, LIMITS.max_objects, 16):
        parts.append(image.rows(first, min(LIMITS.max_objects, first + 16), driver.now_ns))
        for _ in range(steps_between):
            driver.step()
    names = image.names()
    restored.begin(start_lsn, image.used_stamp_max, image.generation_max())
    restored.add_names(names.namespaces, names.scopes)
    for objects, extents in parts:
        restored.add_objects(objects)
        restored.add_extents(extents)
    for record in driver.records:
        if record.lsn >= start_lsn:
            restored.apply(record)
    return restored


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("steps_between", [0, 3])
def test_a_fuzzy_checkpoint_and_the_records_since_its_start_give_the_same_engine(
    seed: int, steps_between: int
) -> None:
    driver = Driver(seed)
    for _ in range(120):
        driver.step()
    restored = from_checkpoint(driver, steps_between)
    engine = new_engine(restored)
    engine.audit()
    assert restored.dropped_objects == 0
    assert engine.last_lsn == driver.engine.last_lsn + (1 if engine.take_records() else 0)
    assert contents(engine) == contents(driver.engine)


@pytest.mark.parametrize("seed", range(6))
def test_all_records_from_the_first_give_the_same_engine(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(200):
        driver.step()
    restored = Restored(LIMITS, driver.now_ns)
    for record in driver.records:
        restored.apply(record)
    engine = new_engine(restored)
    engine.audit()
    assert contents(engine) == contents(driver.engine)
    usage, before = engine.usage(), driver.engine.usage()
    assert (usage.live_au, usage.live_objects) == (before.live_au, before.live_objects)


def test_the_order_of_use_survives_a_checkpoint() -> None:
    driver = Driver(1)
    keys = [b"k%d" % i for i in range(8)]
    for key in keys:
        outcome = driver.engine.begin_store(BeginStore("a", b"", [key], [4096]), 1)
        driver.engine.commit_store([p for p in outcome.entries if isinstance(p, WritePlan)], [1], 1)
    driver.settle()
    driver.engine.lookup(Lookup("a", b"", [b"k0"], LookupMode.EACH, 1), 2)
    engine = new_engine(from_checkpoint(driver, 0))
    big = BeginStore("b", b"", [b"big"], [(LIMITS.capacity_au - 7) * 4096])
    assert engine.begin_store(big, 10**12).entries == [None]
    engine.persisted(Lsn(engine.last_lsn), 10**12)
    left = engine.lookup(Lookup("a", b"", keys, LookupMode.EACH, 0), 10**12)
    assert [key for key, size in zip(keys, left.sizes_bytes, strict=True) if size] == [
        b"k0",
        *keys[2:],
    ]


def test_objects_that_share_units_are_given_up_together_and_the_others_stay() -> None:
    driver = Driver(3)
    for _ in range(60):
        driver.step()
    restored = from_checkpoint(driver, 0)
    live = np.flatnonzero(restored._row_state == 1)
    table = restored.table
    one, other = [int(s) for s in live if table.count_au[s] == 1][:2]
    table.start_au[one] = table.start_au[other]
    before = restored.live_objects
    engine = new_engine(restored)
    engine.audit()
    assert restored.dropped_objects == 2
    assert engine.usage().live_objects == before - 2


def test_a_restored_engine_goes_on_working() -> None:
    driver = Driver(5)
    for _ in range(100):
        driver.step()
    again = Driver(6)
    again.engine = new_engine(from_checkpoint(driver, 1))
    again.now_ns = driver.now_ns
    again.settle()
    for _ in range(200):
        again.step()
        again.engine.audit()
