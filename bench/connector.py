"""The connector's own share of an engine's time, without an engine: what the scheduler waits for and what it computes.

(a) `match` of a prompt of 32,768 tokens (256 chunks, one key each) against a gateway on this machine: all held, nothing held.
(b) One step of 1,000 requests that decode: the connector's part of the scheduler's and of the worker's step, nothing to do.
(c) 256 requests that wait while the gateway stands still: what they add to one step, all together.
(d) Importing the connector in an interpreter that has what an engine has.
(e) 1,000 new prompts at once, of which a step takes 29, and which find nothing: time of the processor a prompt, from its coming to
    its end, in the engine's thread and in the connector's own; all of one tenant, and each of another.
"""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bench.gateway import running_gateway
from bench.harness import BenchError, at_most, work_folder
from xkv_rpc.client import Client
from xkv_rpc.session import ClientOptions
from xkv_vllm_connector.groups import GroupFacts, Kind, plan_groups
from xkv_vllm_connector.keys import key_of, stem_of
from xkv_vllm_connector.lookups import Lookups
from xkv_vllm_connector.metrics import Stats
from xkv_vllm_connector.scheduler import SchedulerSide
from xkv_vllm_connector.settings import Settings
from xkv_vllm_connector.stores import Stores

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS: Final = 32_768
HASH_TOKENS: Final = 16
CALLS: Final = 300
STEPS: Final = 200
DECODING: Final = 1000
WAITING: Final = 256
CROWD: Final = 1000
CROWDS: Final = 5
ADMITTED: Final = 29
"""Prompts of 140 tokens that fit into a step of 4,096."""
IMPORTS: Final = 7
LOOKUP_MS_MAX: Final = 1.0
STANDSTILL_MS_MAX: Final = 5.0
IMPORT_MS_MAX: Final = 150.0
FINGERPRINT: Final = bytes(16)
OBJECT_BYTES: Final = 4096


@dataclass
class Request:
    """As much of an engine's request as the connector looks at."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_prompt_tokens: int = TOKENS
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False


@dataclass
class Tables:
    """An engine's tables of a step in which nothing is to be stored."""

    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        raise BenchError(f"nothing is to be stored of {req_id}")


def hashes(seed: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{seed}/{number}".encode()).digest() for number in range(count)]


class Side:
    """A scheduler's side that asks a gateway on `port`."""

    def __init__(self, port: int, **changes: int) -> None:
        settings = Settings(xkv_gateway_port=port, **changes)  # type: ignore[arg-type] # numbers only
        self.geometry = plan_groups(
            (GroupFacts(0, Kind.FULL, 16, OBJECT_BYTES // 8),), 128, HASH_TOKENS, (0,)
        )
        stats = Stats()
        client = Client(settings.endpoint, ClientOptions(backoff_min_ms=10, backoff_max_ms=50))
        self.lookups = Lookups(
            client, self.geometry, FINGERPRINT, "", lease_ms=settings.lease_ms, timeout_ms=settings.lookup_timeout_ms,
            step_wait_ms=settings.lookup_step_wait_ms, clock=time.monotonic_ns,
        )  # fmt: skip
        stores = Stores(self.geometry, 0, 1, stats, time.monotonic_ns)
        self.scheduler = SchedulerSide(
            settings, self.geometry, FINGERPRINT, self.lookups, stores, stats, time.monotonic_ns, print, sync=False
        )  # fmt: skip

    def ask(self, request: Request) -> tuple[int, float]:
        """Begin a request, ask until there is an answer, end it; return tokens found and milliseconds."""
        self.scheduler.begin(request)
        begin_ns = time.perf_counter_ns()
        found, _ = self.scheduler.match(request, 0)
        while found is None:
            self.scheduler.plan({}, None)
            found, _ = self.scheduler.match(request, 0)
        elapsed_ms = (time.perf_counter_ns() - begin_ns) / 1e6
        self.scheduler.finished(request, (), aborted=True)
        self.scheduler.plan({}, None)
        return found, elapsed_ms


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    if argv:
        raise BenchError("takes no arguments")
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        gateway = stack.enter_context(running_gateway(folder, f"soft:{folder}/card.img?size=1GiB"))
        side = Side(gateway.port)
        stack.callback(side.scheduler.close)
        held_ms, missed_ms = _lookups(side, gateway.port)
        step_us = _step(side)
        crowd_us = {tenants: _crowd(side, tenants) for tenants in (1, CROWD)}
        still_ms, later_ms = _standstill(gateway.port, gateway.process.process.pid)
    import_ms = _import_ms()
    return {
        "lookup_32k_hit_ms": _quantiles(held_ms),
        "lookup_32k_miss_ms": _quantiles(missed_ms),
        "idle_step_1000_requests_us": step_us,
        "crowd_us_a_prompt": {
            f"{tenants} tenants": {"engine's thread": engine, "own threads": own}
            for tenants, (engine, own) in crowd_us.items()
        },
        "standstill_first_step_256_requests_ms": still_ms,
        "standstill_later_steps_ms": later_ms,
        "import_ms": import_ms,
        "bars": [
            at_most("lookup of a 32k-token prompt, hit, p50, ms", statistics.median(held_ms), LOOKUP_MS_MAX),
            at_most(
                "lookup of a 32k-token prompt, miss, p50, ms", statistics.median(missed_ms), LOOKUP_MS_MAX
            ),
            at_most("gateway stands still: one step, 256 waiting, ms", still_ms, STANDSTILL_MS_MAX),
            at_most("import, ms", import_ms, IMPORT_MS_MAX),
        ],
    }


def _lookups(side: Side, port: int) -> tuple[list[float], list[float]]:
    chunks = TOKENS // side.geometry.chunk_tokens
    per_chunk = side.geometry.hashes_per_chunk
    known = hashes("held", TOKENS // HASH_TOKENS)
    stem = stem_of(FINGERPRINT, 0, 0)
    keys = [key_of(stem, chunk, known[(chunk + 1) * per_chunk - 1]) for chunk in range(chunks)]
    with Client(f"tcp://127.0.0.1:{port}") as client:
        client.store("", b"", keys, [bytes(OBJECT_BYTES)] * chunks, timeout_ms=20_000)
    held, missed = [], []
    for call in range(CALLS):
        found, elapsed_ms = side.ask(Request(f"h{call}", TOKENS + 1, known))
        if found != TOKENS:
            raise BenchError(f"{found} of {TOKENS} stored tokens were found")
        held.append(elapsed_ms)
        found, elapsed_ms = side.ask(Request(f"m{call}", TOKENS + 1, hashes(f"other {call}", len(known))))
        if found:
            raise BenchError(f"{found} tokens were found that nobody stored")
        missed.append(elapsed_ms)
    return held, missed


def _step(side: Side) -> float:
    """Return what one step of requests that decode costs, in microseconds."""
    scheduled = {}
    for number in range(DECODING):
        request = Request(f"d{number}", 130, [], num_computed_tokens=100, num_prompt_tokens=100)
        side.scheduler.begin(request)
        scheduled[request.request_id] = 1
    tables = Tables()
    times = []
    for _ in range(STEPS):
        begin_ns = time.perf_counter_ns()
        side.scheduler.plan(scheduled, tables)
        times.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return statistics.median(times)


def _crowd(side: Side, tenants: int) -> tuple[float, float]:
    """Return microseconds of the engine's thread and of the connector's threads for each prompt; the least of some rounds."""
    best: list[tuple[float, float]] = []
    for number in range(CROWDS):
        crowd = [
            Request(
                f"c{at}",
                140,
                hashes(f"{tenants}/{number}/{at}", 8),
                num_prompt_tokens=140,
                cache_salt=f"t{at % tenants}",
            )
            for at in range(CROWD)
        ]
        engine_s, process_s = time.thread_time(), time.process_time()
        _admit(side, crowd)
        engine_s = time.thread_time() - engine_s
        best.append((1e6 * engine_s / CROWD, 1e6 * (time.process_time() - process_s - engine_s) / CROWD))
    return min(best)


def _admit(side: Side, crowd: list[Request]) -> None:
    for request in crowd:
        side.scheduler.begin(request)
    left = crowd
    while left:
        waiting, room = [], ADMITTED
        for at, request in enumerate(left):
            if not room:
                waiting += left[at:]
                break
            if side.scheduler.match(request, 0)[0] is None:
                waiting.append(request)
                continue
            side.scheduler.allocated(request, (), 0)
            room -= 1
        left = waiting
        side.scheduler.plan({}, None)
        time.sleep(0.01)  # the engine computes meanwhile
    for request in crowd:
        request.num_computed_tokens = request.num_tokens
        side.scheduler.finished(request, ([],), aborted=False)


def _standstill(port: int, gateway_pid: int) -> tuple[float, float]:
    """Return what the first step and the worst later one cost while the gateway stands still, in milliseconds."""
    side = Side(port, lookup_timeout_ms=200)
    waiting = [Request(f"w{number}", TOKENS + 1, hashes(f"w{number}", 256)) for number in range(WAITING)]
    os.kill(gateway_pid, signal.SIGSTOP)
    try:
        for request in waiting:
            side.scheduler.begin(request)
        times = []
        left = waiting
        while left:
            begin_ns = time.perf_counter_ns()
            left = [request for request in left if side.scheduler.match(request, 0)[0] is None]
            side.scheduler.plan({}, None)
            times.append((time.perf_counter_ns() - begin_ns) / 1e6)
            time.sleep(0.01)  # the engine computes meanwhile
    finally:
        os.kill(gateway_pid, signal.SIGCONT)
        side.scheduler.close()
    return times[0], max(times[1:], default=0.0)


def _import_ms() -> float:
    """Return the median time of importing all but what needs an engine; what any engine has is there before."""
    program = (
        "import asyncio, logging, time, zmq, msgpack, concurrent.futures, dataclasses, prometheus_client;"
        "begin = time.perf_counter(); import xkv_vllm_connector.assembly; print((time.perf_counter() - begin) * 1e3)"
    )
    times = [
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(IMPORTS)
    ]
    return statistics.median(times)


def _quantiles(samples: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(samples, n=100)
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}
