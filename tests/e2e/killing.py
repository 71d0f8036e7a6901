"""Clients that keep a gateway busy, and an account of what each key may hold when the gateway is killed under them.

What was acknowledged is certain. What was under way when the gateway died may have happened or not: then a key has two
possible values, until the next look at it tells which.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Final

from xkv_rpc.errors import RpcError

if TYPE_CHECKING:
    from tests.e2e.gateway import Gateway
    from xkv_rpc.async_client import AsyncClient

UNIT_BYTES: Final = 64 << 10
PAYLOAD_BYTES_MAX: Final = 200_000
KEYS_PER_WORKER: Final = 30
BATCH_MAX: Final = 8
LOOKS_MAX: Final = 5
ABSENT: Final = 0
"""The version of a key that is not there; others count from 1."""


def payload_of(key: bytes, version: int) -> bytes:
    """Return the bytes of that version of the key; no other has them."""
    rng = random.Random(key + version.to_bytes(8, "little"))
    return rng.randbytes(rng.randrange(1, PAYLOAD_BYTES_MAX))


class Worker:
    """One client with keys of its own, so that what happens to a key is a sequence."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self._rng = rng
        self._namespace = f"namespace {number % 2}"
        self._scope = b"scope %d" % (number % 3)
        self._version = 0
        self.possible = {b"%d/%d" % (number, i): {ABSENT} for i in range(KEYS_PER_WORKER)}
        """Key to the versions that it may have."""
        self.acknowledged = 0
        self.wrong: list[str] = []

    async def work(self, client: AsyncClient) -> None:
        """Store, delete and load, until cancelled."""
        while True:
            keys = self._rng.sample(sorted(self.possible), self._rng.randint(1, BATCH_MAX))
            await self._rng.choice((self._store, self._store, self._delete, self._load))(client, keys)

    async def _store(self, client: AsyncClient, keys: list[bytes]) -> None:
        self._version += 1
        payloads = [payload_of(key, self._version) for key in keys]
        before = {key: set(self.possible[key]) for key in keys}
        for key in keys:
            self.possible[key] |= {self._version} if ABSENT in before[key] else set()
        try:
            statuses = await client.store(self._namespace, self._scope, keys, payloads)
        except RpcError:
            return  # refused, or refused half way: both remains possible
        for key, status in zip(keys, statuses, strict=True):
            match status:
                case "stored":
                    self.possible[key] = {self._version}
                    if ABSENT not in before[key]:
                        self.wrong.append(f"{key!r} was there, and was stored all the same")
                case "exists":
                    self.possible[key] = before[key] - {ABSENT}
                    if not self.possible[key]:
                        self.wrong.append(f"{key!r} was not there, and was not stored")
                case _:
                    self.possible[key] = before[key]
        self.acknowledged += 1

    async def _delete(self, client: AsyncClient, keys: list[bytes]) -> None:
        for key in keys:
            self.possible[key] |= {ABSENT}
        try:
            await client.delete(self._namespace, self._scope, keys)
        except RpcError:
            return
        for key in keys:
            self.possible[key] = {ABSENT}
        self.acknowledged += 1

    async def _load(self, client: AsyncClient, keys: list[bytes]) -> None:
        """Load and judge; where that is refused, or not answered in time, nothing is known."""
        with contextlib.suppress(RpcError):
            await self._look_at(client, keys)

    async def _look_at(self, client: AsyncClient, keys: list[bytes]) -> None:
        loaded = await client.load(self._namespace, self._scope, keys)
        for key, status, payload in zip(keys, loaded.statuses, loaded.payloads, strict=True):
            self._judge(key, status, payload)
        self.acknowledged += 1

    def _judge(self, key: bytes, status: str, payload: memoryview | None) -> None:
        """Compare what came with what may be; from then on it is certain."""
        if status == "miss":
            found = ABSENT
        elif status == "ok" and payload is not None:
            versions = self.possible[key] - {ABSENT}
            found = next((v for v in versions if payload_of(key, v) == bytes(payload)), -1)
        else:
            found = -1
        if found not in self.possible[key]:
            told = "bytes of no version that it may have" if status == "ok" else status
            self.wrong.append(f"{key!r}: {told}, where one of {sorted(self.possible[key])} was possible")
        else:
            self.possible[key] = {found}

    async def verify(self, client: AsyncClient) -> None:
        """Look at every key, however long the answers take on a busy machine: afterwards all is certain."""
        keys = sorted(self.possible)
        for first in range(0, len(keys), BATCH_MAX):
            for attempt in range(LOOKS_MAX):
                try:
                    await self._look_at(client, keys[first : first + BATCH_MAX])
                except RpcError:
                    if attempt == LOOKS_MAX - 1:
                        raise
                else:
                    break
        assert all(len(versions) == 1 for versions in self.possible.values()) or self.wrong

    def holds(self) -> list[int]:
        """Return the sizes of the objects that are there, after `verify`."""
        held = [(key, next(iter(versions))) for key, versions in self.possible.items()]
        return [len(payload_of(key, version)) for key, version in held if version != ABSENT]


class Crowd:
    """The workers, over all lives of the gateway."""

    def __init__(self, seed: int, workers: int) -> None:
        self.rng = random.Random(seed)
        self.workers = [Worker(number, random.Random(f"{seed}/{number}")) for number in range(workers)]

    @property
    def wrong(self) -> list[str]:
        """What must not be."""
        return [line for worker in self.workers for line in worker.wrong]

    @property
    def acknowledged(self) -> int:
        """Answers of success so far."""
        return sum(worker.acknowledged for worker in self.workers)

    async def busy_until(self, gateway: Gateway, answers: int) -> list[asyncio.Task[None]]:
        """Start the clients; return once so many more answers have come, the clients still at work."""
        wanted = self.acknowledged + answers
        tasks = [asyncio.create_task(self._client(worker, gateway)) for worker in self.workers]
        while self.acknowledged < wanted:
            done, _ = await asyncio.wait(tasks, timeout=0.001, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return tasks

    @staticmethod
    async def _client(worker: Worker, gateway: Gateway) -> None:
        client = gateway.client()
        try:
            await worker.work(client)
        finally:
            await client.aclose()

    async def verify_keys(self, gateway: Gateway) -> None:
        """Look at every key of every worker."""
        client = gateway.client()
        try:
            for worker in self.workers:
                await worker.verify(client)
        finally:
            await client.aclose()

    async def verify(self, gateway: Gateway) -> None:
        """Look at every key of every worker, and at the sums."""
        await self.verify_keys(gateway)
        sizes = [size for worker in self.workers for size in worker.holds()]
        # What was on its way to be freed is freed by and by.
        status = await gateway.until(lambda status: not status["usage"]["doomed_bytes"])
        usage = status["usage"]
        assert usage["objects"] == len(sizes), (usage, len(sizes), self.wrong)
        assert usage["live_bytes"] == sum(-(-size // UNIT_BYTES) * UNIT_BYTES for size in sizes)
        assert (usage["reserved_bytes"], usage["quarantined_bytes"]) == (0, 0)
        assert usage["free_bytes"] + usage["live_bytes"] == usage["capacity_bytes"]
        assert status["card"]["recovery"]["damage"] == []
        assert status["card"]["recovery"]["dropped_objects"] == 0
