"""Tenants on the engine alone: the longest pause of any call while 5 million objects of 1,000 tenants are evicted and wiped, and what
IsolatedLRU costs a store over LRU on a full card.

Each part runs in a process of its own. A pause is the CPU time of one call: on a loop nothing else runs during it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from bench.harness import BenchError, at_most
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.tenancy import EvictionPolicy, EvictionRules
from xkv_gateway.core.types import BeginStore, EngineLimits, Lookup, LookupMode, WritePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OBJECTS: Final = 5_000_000
TENANTS: Final = 1000
UNIT_BYTES: Final = 65_536
BATCH: Final = 16
FILL_BATCH: Final = 500
SHORT_OBJECTS: Final = 200_000
ROUNDS: Final = 9
STORES_A_ROUND: Final = 400
NS_PER_MS: Final = 1_000_000
PAUSE_MS_MAX: Final = 20
COST_PERCENT_MAX: Final = 5
NEVER: Final = 2.0


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Measure everything; `--part NAME` measures one part in this process."""
    parser = argparse.ArgumentParser(prog="python -m bench.tenants", description=__doc__)
    parser.add_argument("--part", choices=("pauses-LRU", "pauses-IsolatedLRU", "cost"))
    arguments = parser.parse_args(list(argv))
    if arguments.part == "cost":
        return cost()
    if arguments.part is not None:
        return pauses(EvictionPolicy(arguments.part.removeprefix("pauses-")))
    lru, isolated, both = (_apart(part) for part in ("pauses-LRU", "pauses-IsolatedLRU", "cost"))
    return {
        "objects": OBJECTS,
        "tenants": TENANTS,
        "LRU": lru,
        "IsolatedLRU": isolated,
        "cost": both,
        "bars": [
            at_most("longest pause, LRU (ms)", lru["longest_ms"], PAUSE_MS_MAX),
            at_most("longest pause, IsolatedLRU (ms)", isolated["longest_ms"], PAUSE_MS_MAX),
            at_most("a store under IsolatedLRU over LRU (% more)", both["percent_more"], COST_PERCENT_MAX),
        ],
    }


def pauses(policy: EvictionPolicy) -> dict[str, Any]:
    """Fill a card with small batches of all tenants in turn, then let a cycle evict, a quota shrink, and a namespace go."""
    engine = _engine(OBJECTS, EvictionRules(policy, trigger_watermark=0.9, eviction_ratio=0.2))
    for tenant in range(TENANTS):
        engine.quotas.set(_scope(tenant), 2 * OBJECTS // TENANTS * UNIT_BYTES, None)
    _fill(engine, OBJECTS * 89 // 100, 1)
    gc.collect()
    gc.freeze()
    calls = _Calls(engine)
    # Every object was last used in its own moment: the oldest of all change from tenant to tenant with each object.
    calls.touch_singly()
    calls.fill_until_due()
    calls.time("cycle", lambda: engine.counters.evicted_watermark < OBJECTS // 8)
    for tenant in range(TENANTS):
        engine.quotas.set(_scope(tenant), OBJECTS // TENANTS // 2 * UNIT_BYTES, None)
    calls.time(
        "quotas", lambda: engine.next_deadline() is not None and engine.counters.evicted_quota < OBJECTS // 10
    )
    calls.one("wipe", lambda: engine.wipe("bench", None, calls.now_ns, erase=True))
    calls.time("wipe", lambda: engine.wiping.under_way)
    return {
        "longest_ms": round(max(calls.longest_ms.values()), 2),
        "by_what": {name: round(ms, 2) for name, ms in calls.longest_ms.items()},
        "evicted": engine.counters.evicted_watermark + engine.counters.evicted_quota,
        "wiped": engine.counters.wiped,
    }


class _Calls:
    """Times every call that the loop would make."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.now_ns = 10**9
        self.longest_ms: dict[str, float] = {}
        self._dice = random.Random(1)
        self._number = itertools.count(1 << 40)

    def one(self, name: str, call: Callable[[], object]) -> None:
        begin = time.process_time_ns()
        call()
        ms = (time.process_time_ns() - begin) / NS_PER_MS
        self.longest_ms[name] = max(self.longest_ms.get(name, 0.0), ms)

    def touch_singly(self) -> None:
        for _ in range(40_000):
            tenant = self._dice.randrange(TENANTS)
            lease = self._engine.lookup(
                Lookup(
                    "bench",
                    _scope(tenant),
                    [_key(self._dice.randrange(OBJECTS // 2))],
                    LookupMode.EACH,
                    10**9,
                ),
                self.now_ns,
            ).lease
            if lease is not None:
                self._engine.release(lease, self.now_ns)

    def fill_until_due(self) -> None:
        while self._engine.next_deadline() is None:
            _store(
                self._engine,
                _scope(self._dice.randrange(TENANTS)),
                [next(self._number) for _ in range(BATCH)],
            )

    def time(self, name: str, while_so: Callable[[], bool]) -> None:
        """Tick as the loop does, and store and look up in between."""
        engine = self._engine
        for turn in itertools.count():
            if not while_so() or turn > 1_000_000:
                return
            if turn % 50 == 0:
                self.now_ns += 10**9
            self.one(f"{name}: tick", lambda: engine.tick(self.now_ns))
            engine.take_records()
            self.one(f"{name}: persisted", lambda: engine.persisted(engine.last_lsn, self.now_ns))
            keys = [_key(self._dice.randrange(OBJECTS)) for _ in range(BATCH)]
            request = Lookup("bench", _scope(turn % TENANTS), keys, LookupMode.EACH, 0)
            self.one(f"{name}: lookup", lambda request=request: engine.lookup(request, self.now_ns))  # type: ignore[misc]


def cost() -> dict[str, Any]:
    """CPU time of a store on a full card, under both policies in turns."""
    engines = {
        policy: _engine(SHORT_OBJECTS, EvictionRules(policy, trigger_watermark=NEVER))
        for policy in (EvictionPolicy.LRU, EvictionPolicy.ISOLATED_LRU)
    }
    for engine in engines.values():
        for tenant in range(TENANTS):
            engine.quotas.set(_scope(tenant), 2 * SHORT_OBJECTS // TENANTS * UNIT_BYTES, None)
        _fill(engine, SHORT_OBJECTS, 1)
    gc.collect()
    gc.freeze()
    microseconds: dict[EvictionPolicy, list[float]] = {policy: [] for policy in engines}
    number = itertools.count(1 << 40)
    dice = random.Random(2)
    for _ in range(ROUNDS):
        work = [
            (_scope(dice.randrange(TENANTS)), [next(number) for _ in range(BATCH)])
            for _ in range(STORES_A_ROUND)
        ]
        for policy, engine in engines.items():
            begin = time.process_time()
            for scope, numbers in work:
                _store(engine, scope, numbers)
            microseconds[policy].append((time.process_time() - begin) / STORES_A_ROUND * 1e6)
    lru, isolated = (statistics.median(microseconds[policy]) for policy in engines)
    return {
        "batch": BATCH,
        "lru_store_us": round(lru, 1),
        "isolated_store_us": round(isolated, 1),
        "percent_more": round((isolated / lru - 1) * 100, 2),
    }


def _engine(objects: int, rules: EvictionRules) -> Engine:
    numbers = itertools.count(1)
    limits = EngineLimits(
        capacity_au=objects,
        au_bytes=UNIT_BYTES,
        max_objects=objects,
        object_bytes_max=64 << 20,
        lease_ttl_max_ns=60 * 10**9,
        leases_per_scope_max=4096,
        leased_bytes_per_scope_max=1 << 50,
        eviction=rules,
    )
    return Engine(limits, digest_secret=bytes(32), entropy=lambda n: next(numbers).to_bytes(n, "big"))


def _scope(tenant: int) -> bytes:
    return b"tenant %d" % tenant


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _fill(engine: Engine, objects: int, now_ns: int) -> None:
    """All tenants in turn, in batches."""
    for first in range(0, objects, FILL_BATCH):
        tenant = first // FILL_BATCH % TENANTS
        _store(engine, _scope(tenant), list(range(first, min(objects, first + FILL_BATCH))), now_ns)


def _store(engine: Engine, scope: bytes, numbers: Sequence[int], now_ns: int = 10**9) -> None:
    """Store a batch, asking again as a shell does."""
    keys = [_key(number) for number in numbers]
    for _ in range(100):
        outcome = engine.begin_store(BeginStore("bench", scope, keys, [UNIT_BYTES] * len(keys)), now_ns)
        plans = [entry for entry in outcome.entries if isinstance(entry, WritePlan)]
        if plans:
            engine.commit_store(plans, [1] * len(plans), now_ns)
        while engine.take_records():
            engine.persisted(engine.last_lsn, now_ns)
        keys = [key for key, entry in zip(keys, outcome.entries, strict=True) if entry is None]
        if not keys:
            return
    raise BenchError("the engine found no room")


def _apart(part: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.tenants", "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise BenchError(f"{part} failed: {done.stderr[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
