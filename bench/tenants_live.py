"""Eviction on the real daemon: how long its loop is held up while 5 million objects of 1,000 tenants go, and others are served.

A card with so many objects in its checkpoint is served by the daemon with a stopwatch (`bench.turn_watch`). One after the other
a cycle evicts, quotas are lowered, the page of metrics is read, and the namespace is wiped; a client looks up and stores all the while.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import uvloop

from bench.gateway import running_gateway
from bench.harness import BenchError, at_most, child, core_split, work_folder
from bench.recovery import AU_BYTES, card_bytes, durable_long_ago, new_card, persist
from bench.softcard import running_softcard
from bench.tenants_admin import Admin
from bench.turn_watch import TURNS_TO
from xkv_gateway.clock import monotonic_ns
from xkv_gateway.core.types import BeginStore, WritePlan
from xkv_rpc.client import Client
from xkv_rpc.errors import XkvRpcError
from xkv_rpc.messages import LookupMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.gateway import RunningGateway
    from xkv_gateway.core.engine import Engine

OBJECTS: Final = 5_000_000
TENANTS: Final = 1000
LOWERED: Final = 100
"""Tenants whose quotas are lowered to almost nothing."""
KEYS: Final = 16
FILL_BATCH: Final = 500
LIMIT_BYTES: Final = 2 * OBJECTS // TENANTS * AU_BYTES
BUILD_SECONDS_MAX: Final = 600
PHASE_SECONDS_MAX: Final = 120.0
TURN_MS_MAX: Final = 20
POLICIES: Final = ("LRU", "IsolatedLRU")


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.tenants_live", description=__doc__)
    parser.add_argument("--objects", type=int, default=OBJECTS)
    parser.add_argument("--policies", nargs="*", default=POLICIES, choices=POLICIES)
    parser.add_argument("--build", type=Path, help="only make the card, in this folder")
    arguments = parser.parse_args(list(argv))
    if arguments.build is not None:
        return _build(arguments.build, arguments.objects)
    results: dict[str, Any] = {"objects": arguments.objects, "tenants": TENANTS, "bars": []}
    for policy in arguments.policies:
        results[policy] = part = _live(policy, arguments.objects)
        results["bars"].append(
            at_most(f"longest turn, {policy} (ms)", part["longest_turn_cpu_ms"], TURN_MS_MAX)
        )
    return results


def _live(policy: str, objects: int) -> dict[str, Any]:
    with work_folder() as folder, ExitStack() as stack:
        command = [sys.executable, "-m", "bench.tenants_live", "--objects", str(objects)]
        with child("build", [*command, "--build", str(folder)], folder) as process:
            if process.process.wait(BUILD_SECONDS_MAX):
                raise BenchError(f"the card could not be made:\n{process.log_tail()}")
        turns = folder / "turns.json"
        gateway = stack.enter_context(
            running_gateway(
                folder,
                f"soft:{folder}/tenants.img",
                cores=core_split()[1],
                ready_seconds=120.0,
                options=("--eviction-policy", policy),
                module="bench.turn_watch",
                variables={TURNS_TO: str(turns)},
            )
        )
        phases, delays_ms = _phases(gateway, objects)
        gateway.process.stop()
        noted = json.loads(turns.read_text(encoding="utf-8"))
        return _summary(noted, phases, delays_ms)


def _phases(
    gateway: RunningGateway, objects: int
) -> tuple[list[tuple[str, float, float]], dict[str, list[float]]]:
    phases: list[tuple[str, float, float]] = []
    admin = Admin(gateway.admin_port)
    begin_s = time.monotonic()

    def phase(name: str, over: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        while not over():
            if time.monotonic() > began_s + PHASE_SECONDS_MAX:
                raise BenchError(f"{name} did not end: {admin.ask('GET', '/v1/status')}")
            time.sleep(0.2)
        phases.append((name, began_s, time.monotonic()))

    with _Others(gateway.port, objects) as others:
        phase("cycle", lambda: admin.count("evicted_watermark") >= objects // 6)
        for number in range(LOWERED):
            admin.set_tenant(number, _scope(number), AU_BYTES)
        lowered = [f"/v1/tenants/t{number}" for number in range(LOWERED)]
        phase("quotas", lambda: all(admin.ask("GET", each)["objects"] <= 1 for each in lowered))
        began_s = time.monotonic()
        admin.page("/metrics")
        phases.append(("metrics", began_s, time.monotonic()))
        wipe = admin.ask("DELETE", "/v1/namespaces/bench?wait_s=0")
        phase("wipe", lambda: admin.count("wiped") >= wipe["objects"] and admin.count("erased") > 0)
    phases.insert(0, ("all", begin_s, time.monotonic()))
    return phases, others.delays_ms


def _summary(
    noted: dict[str, Any], phases: list[tuple[str, float, float]], delays_ms: dict[str, list[float]]
) -> dict[str, Any]:
    result: dict[str, Any] = {"turns": noted["turns"]}
    for name, begin_s, end_s in phases:
        inside = [turn for turn in noted["noted"] if begin_s <= turn["at_s"] <= end_s]
        worst = sorted(inside, key=lambda turn: -float(turn["cpu_ms"]))
        result[name] = {
            "seconds": end_s - begin_s,
            "longest_turn_cpu_ms": worst[0]["cpu_ms"] if worst else 0.0,
            "longest_turn_wall_ms": max((turn["wall_ms"] for turn in inside), default=0.0),
            "over_10_ms": sum(turn["cpu_ms"] > 10 for turn in inside),
            "longest_gc_ms": max((turn["gc_ms"] for turn in inside), default=0.0),
            "worst": worst[:5],
        }
    result["longest_turn_cpu_ms"] = result["all"]["longest_turn_cpu_ms"]
    for name, delays in delays_ms.items():
        result[f"{name}_ms"] = {
            "count": len(delays),
            "p50": sorted(delays)[len(delays) // 2],
            "p99": sorted(delays)[len(delays) * 99 // 100],
            "max": max(delays),
        }
    return result


class _Others:
    """A client that looks up and stores in turns, in a thread of its own, until the block ends."""

    def __init__(self, port: int, objects: int) -> None:
        self._port = port
        self._objects = objects
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="others")
        self._error: Exception | None = None
        self.delays_ms: dict[str, list[float]] = {"lookup": [], "store": []}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise BenchError(f"the client beside it failed: {self._error}")

    def _run(self) -> None:
        try:
            self._work()
        except (XkvRpcError, OSError) as error:
            self._error = error

    def _work(self) -> None:
        dice, numbers = random.Random(1), itertools.count(1 << 40)
        payloads = [bytes(AU_BYTES)] * KEYS
        with Client(f"tcp://127.0.0.1:{self._port}") as client:
            while not self._over.wait(0.004):
                tenant = dice.randrange(TENANTS)
                first = dice.randrange(self._objects // FILL_BATCH) * FILL_BATCH
                keys = [_key(first + place) for place in range(KEYS)]
                scope = _scope(first // FILL_BATCH % TENANTS)
                began_s = time.perf_counter()
                client.lookup("bench", scope, keys, mode=LookupMode.EACH, lease_ms=100, timeout_ms=30_000)
                self.delays_ms["lookup"].append((time.perf_counter() - began_s) * 1e3)
                keys = [_key(next(numbers)) for _ in range(KEYS)]
                began_s = time.perf_counter()
                client.store("others", _scope(tenant), keys, payloads, timeout_ms=30_000)
                self.delays_ms["store"].append((time.perf_counter() - began_s) * 1e3)


# --- making the card --------------------------------------------------------------------------------------


def _build(folder: Path, objects: int) -> dict[str, Any]:
    with running_softcard(folder, "tenants", card_bytes(objects)) as card:

        async def made() -> None:
            async with new_card(card, objects, lambda engine: _store_all(engine, objects)) as (session, *_):
                await session.stop()

        uvloop.run(made())
    return {"objects": objects}


def _store_all(engine: Engine, objects: int) -> None:
    """All tenants in turn, in batches, so that each has objects of every age."""
    with durable_long_ago(engine):
        for number in range(TENANTS):
            engine.quotas.set(_scope(number), LIMIT_BYTES, f"t{number}")
        persist(engine)
        for first in range(0, objects, FILL_BATCH):
            keys = [_key(number) for number in range(first, min(objects, first + FILL_BATCH))]
            request = BeginStore("bench", _scope(first // FILL_BATCH % TENANTS), keys, [AU_BYTES] * len(keys))
            entries = engine.begin_store(request, monotonic_ns()).entries
            plans = [entry for entry in entries if isinstance(entry, WritePlan)]
            engine.commit_store(plans, [7] * len(plans), monotonic_ns())
            persist(engine)


def _scope(tenant: int) -> bytes:
    return b"tenant %d" % tenant


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
