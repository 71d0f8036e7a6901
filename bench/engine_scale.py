"""The engine alone: memory of an object, and the time of lookups, loads and stores, at 10 thousand to 5 million objects.

Each size runs in a process of its own, so that what one left in memory does not count for the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.harness import BenchError, at_most
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import (
    BeginLoad,
    BeginStore,
    EngineLimits,
    Lookup,
    LookupMode,
    ReadPlan,
    WritePlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES: Final = (10_000, 1_000_000, 5_000_000)
MEMORY_AT: Final = 1_000_000
BATCH: Final = 200
FILL_BATCH: Final = 4096
BATCHES: Final = 400
ROUNDS: Final = 5
OBJECT_BYTES: Final = 65_536
BYTES_PER_OBJECT_MAX: Final = 150
LOOKUP_RATIO_MAX: Final = 1.5


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Measure every size; `--size N` measures one in this process, `--json FILE` writes the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_scale", description=__doc__)
    parser.add_argument("--size", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(list(argv))
    if arguments.size is not None:
        return measure(arguments.size)
    sizes = {size: _measure_apart(size) for size in SIZES}
    smallest, largest = sizes[SIZES[0]], sizes[SIZES[-1]]
    ratio = largest["lookup_us"] / smallest["lookup_us"]
    results: dict[str, Any] = {
        "keys": BATCH,
        "sizes": {f"{size:,}": figures for size, figures in sizes.items()},
        "bars": [
            at_most("bytes an object, all in", sizes[MEMORY_AT]["bytes_per_object"], BYTES_PER_OBJECT_MAX),
            at_most("lookup at 5 million / at 10 thousand", ratio, LOOKUP_RATIO_MAX),
        ],
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def measure(size: int) -> dict[str, Any]:
    """Fill an engine made for `size` objects to nine tenths, and time batches of random keys on it."""
    numbers = itertools.count(1)
    before = _resident_bytes()
    engine = Engine(
        _limits(size), digest_secret=bytes(32), entropy=lambda n: next(numbers).to_bytes(n, "big")
    )
    held = size * 9 // 10
    begin = time.process_time()
    for first in range(0, held, FILL_BATCH):
        _store(engine, b"s%d" % (first // FILL_BATCH % 100), range(first, min(held, first + FILL_BATCH)))
    fill_seconds = time.process_time() - begin
    resident = _resident_bytes() - before
    dice = random.Random(size)
    groups = max(1, held // FILL_BATCH)
    batches = []
    for _ in range(BATCHES):
        group = dice.randrange(groups)
        first = group * FILL_BATCH
        chosen = dice.sample(range(first, min(held, first + FILL_BATCH)), BATCH)
        batches.append((b"s%d" % (group % 100), [_key(i) for i in chosen]))
    return {
        "bytes_per_object": resident / held,
        "fill_us_per_object": fill_seconds / held * 1e6,
        "lookup_us": _time(batches, lambda scope, keys: _lookup(engine, scope, keys)),
        "leased_lookup_and_release_us": _time(batches, lambda scope, keys: _leased(engine, scope, keys)),
        "load_us": _time(batches, lambda scope, keys: _load(engine, scope, keys)),
        "store_us": _time_stores(engine, held),
    }


def _limits(size: int) -> EngineLimits:
    return EngineLimits(
        capacity_au=size,
        au_bytes=OBJECT_BYTES,
        max_objects=size,
        object_bytes_max=64 << 20,
        lease_ttl_max_ns=60 * 10**9,
        leases_per_scope_max=4096,
        leased_bytes_per_scope_max=1 << 50,
        eviction=EvictionRules(trigger_watermark=2.0),
    )


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _store(engine: Engine, scope: bytes, numbers: range) -> None:
    keys, sizes = [_key(i) for i in numbers], [OBJECT_BYTES] * len(numbers)
    for _ in range(3):
        outcome = engine.begin_store(BeginStore("bench", scope, keys, sizes), 1)
        plans = [entry for entry in outcome.entries if isinstance(entry, WritePlan)]
        engine.commit_store(plans, [1] * len(plans), 1)
        engine.take_records()
        engine.persisted(engine.last_lsn, 1)
        if len(plans) == len(keys):
            return
        keys, sizes = keys[len(plans) :], sizes[len(plans) :]
    raise BenchError("the engine found no room")


def _lookup(engine: Engine, scope: bytes, keys: list[bytes]) -> None:
    if engine.lookup(Lookup("bench", scope, keys, LookupMode.PREFIX, 0), 1).hits != len(keys):
        raise BenchError("a stored key is not held")


def _leased(engine: Engine, scope: bytes, keys: list[bytes]) -> None:
    lease = engine.lookup(Lookup("bench", scope, keys, LookupMode.PREFIX, 10**9), 1).lease
    if lease is None:
        raise BenchError("no lease")
    engine.release(lease, 1)


def _load(engine: Engine, scope: bytes, keys: list[bytes]) -> None:
    plans = engine.begin_load(BeginLoad("bench", scope, keys, None), 1)
    engine.end_load([plan for plan in plans if isinstance(plan, ReadPlan)], (), 1)


def _time(batches: list[tuple[bytes, list[bytes]]], call: Callable[[bytes, list[bytes]], None]) -> float:
    """Median over rounds of the mean CPU time of a call, in us: the engine waits for nothing, and other processes do not count."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for scope, keys in batches:
            call(scope, keys)
        rounds.append((time.process_time() - begin) / len(batches) * 1e6)
    return statistics.median(rounds)


def _time_stores(engine: Engine, held: int) -> float:
    """Mean CPU time of storing a batch, evictions included once the engine is full, in us."""
    begin = time.process_time()
    for number in range(BATCHES):
        first = held + number * BATCH
        _store(engine, b"new", range(first, first + BATCH))
    return (time.process_time() - begin) / BATCHES * 1e6


def _measure_apart(size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.engine_scale", "--size", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise BenchError(f"measuring {size:,} objects failed: {done.stderr[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
