"""Plays a trace against a gateway: what a connector does for each request, in the order of the trace.

For each request: `lookup` of the prompt's blocks by prefix, with a lease; `load` of the hits under that lease, every
byte of which is compared; at the same time `store` of the blocks behind them; then the lease is given back. A request
is over when all its stores were answered, so with one request at a time the next lookup sees them, and the
hits of a cold cache with room for everything are exactly the leading blocks that the trace has shown before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from xkv_gateway.replay.payload import PayloadPattern, derive_keys
from xkv_gateway.replay.stats import Mismatch, Operation
from xkv_gateway.replay.tenants import tenant_of
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from xkv_gateway.replay.link import Link
    from xkv_gateway.replay.stats import ReplayStats
    from xkv_gateway.replay.trace import Trace, TraceRequest
    from xkv_rpc.messages import LookupReply

T = TypeVar("T")

BUSY_PAUSE_MIN_MS: Final = 2
BUSY_PAUSE_MAX_MS: Final = 250


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How to play. `speed`: multiple of real time, None = as fast as possible."""

    block_bytes: int
    lease_ms: int
    concurrency: int
    speed: float | None
    busy_timeout_ns: int
    """How long one message may be turned away as `busy` before the replay gives up."""
    scopes: Sequence[bytes] = (b"",)
    """Of the tenants that the trace is split over."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One request of the trace with the keys of its blocks."""

    number: int
    tenant: int
    scope: bytes
    hash_ids: Sequence[int]
    keys: list[bytes]


class Player:
    """Plays one trace over one link. The stats it is given are up to date at every moment, also after a failure."""

    def __init__(
        self, link: Link, options: PlayOptions, stats: ReplayStats, *, clock: Callable[[], int]
    ) -> None:
        self.stats = stats
        self._link = link
        self._windows = link.windows
        self._options = options
        self._clock = clock
        self._pattern = PayloadPattern(options.block_bytes)

    async def play(self, trace: Trace, on_progress: Callable[[ReplayStats], None]) -> None:
        """Play the whole trace; `on_progress` is called after each request.

        Raises:
            RpcError: the gateway refused a message for good, or stayed busy beyond `busy_timeout_ns`.
            GatewayUnavailableError: the gateway does not answer.
        """
        requests = iter(enumerate(trace.requests, start=1))
        begin_ns = self._clock()

        async def worker() -> None:
            # All workers draw from one iterator: requests start in the order of the trace.
            for number, request in requests:
                await self._wait_for(request, begin_ns)
                await self._play_one(number, request)
                on_progress(self.stats)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.concurrency):
                group.create_task(worker())

    async def _wait_for(self, request: TraceRequest, begin_ns: int) -> None:
        if self._options.speed is not None:
            due_ns = begin_ns + int(request.timestamp_ms * 1e6 / self._options.speed)
            await asyncio.sleep(max(0.0, (due_ns - self._clock()) / 1e9))

    async def _play_one(self, number: int, request: TraceRequest) -> None:
        keys = derive_keys(request.hash_ids, self._options.block_bytes)
        tenant = tenant_of(request.hash_ids, len(self._options.scopes))
        prompt = _Prompt(number, tenant, self._options.scopes[tenant], request.hash_ids, keys)
        hits, leases = await self._lookup(prompt)
        self.stats.asked(tenant, len(keys), hits)
        # A block that a prompt repeats is stored once: a message may not name a key twice.
        rest = _first_sightings(keys, hits)
        async with asyncio.TaskGroup() as group:
            for lease, first, stop in leases:
                for positions in self._messages(range(first, stop)):
                    group.create_task(self._load(prompt, positions, lease))
            for positions in self._messages(rest):
                group.create_task(self._store(prompt, positions))
        for lease, _, _ in leases:
            if lease is not None:
                await self._release(lease)
        self.stats.requests += 1

    def _messages(self, positions: Sequence[int]) -> Iterator[Sequence[int]]:
        """Split blocks over as many messages as it takes."""
        for start in range(0, len(positions), self._windows.plan.slots):
            yield positions[start : start + self._windows.plan.slots]

    async def _lookup(self, prompt: _Prompt) -> tuple[int, list[tuple[bytes | None, int, int]]]:
        """Return the hits, and for each lookup with hits: its lease, and the first block and the one behind the last."""
        leases: list[tuple[bytes | None, int, int]] = []
        hits = 0
        for start in range(0, len(prompt.keys), self._link.keys_max):
            keys = prompt.keys[start : start + self._link.keys_max]
            reply = await self._lookup_message(prompt.scope, keys)
            if reply.hits:
                leases.append((reply.lease, start, start + reply.hits))
                self.stats.leases_refused += reply.lease is None
            hits += reply.hits
            if reply.hits < len(keys):
                break
        return hits, leases

    async def _lookup_message(self, scope: bytes, keys: list[bytes]) -> LookupReply:
        return await self._timed(
            Operation.LOOKUP, lambda: self._link.lookup(scope, keys, self._options.lease_ms)
        )

    async def _load(self, prompt: _Prompt, positions: Sequence[int], lease: bytes | None) -> None:
        keys = [prompt.keys[position] for position in positions]
        async with self._windows.window() as window:
            window.poison(len(keys))
            statuses, blocks = await self._timed(
                Operation.LOAD, lambda: self._link.load(prompt.scope, keys, lease, window)
            )
            self.stats.loads.update(statuses)
            for position, key, block in zip(positions, keys, blocks, strict=True):
                if block is None:
                    continue
                self.stats.bytes_loaded += len(block)
                difference = self._pattern.first_difference(key, block)
                if difference is None:
                    self.stats.blocks_verified += 1
                else:
                    self.stats.add_mismatch(Mismatch(prompt.number, prompt.hash_ids[position], difference))

    async def _store(self, prompt: _Prompt, positions: Sequence[int]) -> None:
        keys = [prompt.keys[position] for position in positions]
        async with self._windows.window() as window:
            for key, slot in zip(keys, window.slots, strict=False):
                self._pattern.fill(key, slot)
            statuses = await self._timed(
                Operation.STORE, lambda: self._link.store(prompt.scope, keys, window)
            )
            self.stats.stores.update(statuses)
            self.stats.of(prompt.tenant).stores.update(statuses)
            self.stats.bytes_stored += statuses.count("stored") * self._options.block_bytes

    async def _release(self, lease: bytes) -> None:
        try:
            await self._timed(Operation.RELEASE, lambda: self._link.release(lease))
        except RpcError as error:
            if error.code is not ErrorCode.UNKNOWN_LEASE:
                raise
            self.stats.leases_lost += 1

    async def _timed(self, operation: Operation, send: Callable[[], Awaitable[T]]) -> T:
        """Send a message, and again while the gateway is busy; each answered attempt is one latency sample."""
        begin_ns = self._clock()
        pause_ms = BUSY_PAUSE_MIN_MS
        while True:
            sent_ns = self._clock()
            try:
                reply = await send()
            except RpcError as error:
                if (
                    error.code is not ErrorCode.BUSY
                    or self._clock() - begin_ns > self._options.busy_timeout_ns
                ):
                    raise
                self.stats.busy_retries += 1
                await asyncio.sleep(min(max(pause_ms, error.retry_after_ms or 0), BUSY_PAUSE_MAX_MS) / 1e3)
                pause_ms = min(2 * pause_ms, BUSY_PAUSE_MAX_MS)
            else:
                self.stats.latencies[operation].add(self._clock() - sent_ns)
                return reply


def _first_sightings(keys: Sequence[bytes], start: int) -> list[int]:
    """Positions from `start` on where a key occurs for the first time in the whole prompt."""
    seen: set[bytes] = set(keys[:start])
    positions: list[int] = []
    for position in range(start, len(keys)):
        if keys[position] not in seen:
            seen.add(keys[position])
            positions.append(position)
    return positions
