"""(1) Lookups of 200 keys with a lease against the gateway, beside Redis MGET of 200 keys, in turns.

One blocking client each, over loopback TCP: `xkv_rpc.client.Client` and redis-py with hiredis. Redis is Debian's
redis-server on a port of its own without persistence, and holds values of one byte, so that its replies
are as small as they can be. Both servers share one core, and the client has the others. The gateway's lookups take a lease each; giving it back is not timed
(but it is part of the server's processor time, which is told for the record).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import redis

from bench.gateway import running_gateway
from bench.harness import (
    BenchError,
    CpuClock,
    accepts,
    alternate,
    at_most,
    child,
    core_split,
    free_port,
    on_cores,
    wait_until,
    work_folder,
)
from xkv_rpc.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.harness import Child

KEYS: Final = 200
BATCHES: Final = 20
"""Different batches of keys, so that no one batch stays in the caches of the processor."""
CALLS_PER_ROUND: Final = 400
ROUNDS: Final = 15
OBJECT_BYTES: Final = 4096
LEASE_MS: Final = 10_000
RATIO_MAX: Final = 1.5
NAMESPACE: Final = "bench"


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.lookups", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args(list(argv))
    batches = [_keys(number) for number in range(BATCHES)]
    server_cores, client_cores = core_split()
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        with on_cores(server_cores):
            server, server_process = stack.enter_context(_redis(folder))
            gateway = stack.enter_context(running_gateway(folder, f"soft:{folder}/card.img?size=1GiB"))
        stack.enter_context(on_cores(client_cores))
        client = stack.enter_context(Client(f"tcp://127.0.0.1:{gateway.port}"))
        for keys in batches:
            client.store(NAMESPACE, b"", keys, [bytes(OBJECT_BYTES)] * KEYS)
            server.mset(dict.fromkeys(keys, b"x"))
        samples: dict[str, list[float]] = {"gateway": [], "redis": []}
        clocks = {
            "gateway": CpuClock(gateway.process.process.pid),
            "redis": CpuClock(server_process.process.pid),
        }
        before = {name: clock.seconds() for name, clock in clocks.items()}
        rounds = alternate(
            arguments.rounds,
            {
                "gateway": lambda: _round(samples["gateway"], _gateway_call(client), batches),
                "redis": lambda: _round(samples["redis"], _redis_call(server), batches),
            },
        )
        used = {name: clock.seconds() - before[name] for name, clock in clocks.items()}
    results = _results(samples, rounds)
    results["server_cpu_us_call"] = {name: used[name] * 1e6 / len(samples[name]) for name in used}
    return results


def _keys(number: int) -> list[bytes]:
    return [hashlib.blake2b(b"%d/%d" % (number, n), digest_size=32).digest() for n in range(KEYS)]


def _gateway_call(client: Client) -> Callable[[list[bytes]], int]:
    def call(keys: list[bytes]) -> int:
        begin_ns = time.perf_counter_ns()
        reply = client.lookup(NAMESPACE, b"", keys, lease_ms=LEASE_MS)
        elapsed_ns = time.perf_counter_ns() - begin_ns
        if reply.hits != len(keys) or reply.lease is None:
            raise BenchError(
                f"a lookup of held keys found {reply.hits} of {len(keys)}, lease: {reply.lease is not None}"
            )
        client.release(reply.lease)
        return elapsed_ns

    return call


def _redis_call(server: redis.Redis) -> Callable[[list[bytes]], int]:
    def call(keys: list[bytes]) -> int:
        begin_ns = time.perf_counter_ns()
        values = server.mget(keys)
        elapsed_ns = time.perf_counter_ns() - begin_ns
        if None in values:
            raise BenchError("Redis lost a key")
        return elapsed_ns

    return call


def _round(samples: list[float], call: Callable[[list[bytes]], int], batches: list[list[bytes]]) -> float:
    times_us = [call(batches[number % BATCHES]) / 1e3 for number in range(CALLS_PER_ROUND)]
    samples.extend(times_us)
    return statistics.median(times_us)


def _results(samples: dict[str, list[float]], rounds: dict[str, list[float]]) -> dict[str, Any]:
    p50_us = {name: statistics.median(values) for name, values in samples.items()}
    ratios = [ours / theirs for ours, theirs in zip(rounds["gateway"], rounds["redis"], strict=True)]
    return {
        "keys": KEYS,
        "calls": len(samples["gateway"]),
        "p50_us": p50_us,
        "p99_us": {name: statistics.quantiles(values, n=100)[98] for name, values in samples.items()},
        "ratio_of_each_round": ratios,
        "bars": [at_most("lookup p50 / Redis MGET p50", p50_us["gateway"] / p50_us["redis"], RATIO_MAX)],
    }


@contextmanager
def _redis(folder: Path) -> Iterator[tuple[redis.Redis, Child]]:
    binary = shutil.which("redis-server")
    if binary is None:
        raise BenchError("redis-server is not installed (Debian: apt-get install redis-server)")
    port = free_port()
    command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with child("redis-server", [*command, "--dir", str(folder)], folder) as process:
        wait_until(lambda: accepts(port), "accepting connections", process)
        with redis.Redis(host="127.0.0.1", port=port) as server:
            yield server, process


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(main(sys.argv[1:]), indent=2))
