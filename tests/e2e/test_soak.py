"""A soak: mixed load for a long time, clients killed at random; nothing may grow, and nothing may be left.

XKV_SOAK_MINUTES=30 python -m pytest -m soak -n 0 -s tests/e2e/test_soak.py
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.gateway import environment, serving
from tests.e2e.soak_client import LEASE_MS

if TYPE_CHECKING:
    from tests.e2e.gateway import Gateway

MINUTES = float(os.environ.get("XKV_SOAK_MINUTES", "30"))
CLIENTS = 4
KILL_EVERY_S = 2.0
SAMPLE_EVERY_S = 10.0
WARM_SHARE = 0.3
"""Of the time: until then caches and buffers fill."""
GROWTH_BYTES_MAX = 16 << 20
"""Beyond what there was when it was warm: heaps breathe."""
GROWTH_SHARE_MAX = 0.05


@dataclass(frozen=True)
class Sample:
    at_s: float
    resident_bytes: int
    descriptors: int
    threads: int


def sample(pid: int, began_s: float) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    resident_bytes = int(status["VmRSS"].split()[0]) * 1024
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(time.monotonic() - began_s, resident_bytes, descriptors, int(status["Threads"]))


async def client_of(gateway: Gateway, home: Path, seed: int) -> asyncio.subprocess.Process:
    endpoint = f"tcp://127.0.0.1:{gateway.control_port}"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.soak_client", endpoint, str(seed),
        cwd=Path(__file__).parents[2],
        env=environment(home),
        stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def load(gateway: Gateway, home: Path, samples: list[Sample]) -> None:
    """Keep clients busy and kill them at random."""
    rng = random.Random(7)
    began_s, seeds = time.monotonic(), iter(range(1, 1 << 30))
    clients = [await client_of(gateway, home, next(seeds)) for _ in range(CLIENTS)]
    try:
        sample_at_s = 0.0
        while (at_s := time.monotonic() - began_s) < MINUTES * 60:
            await asyncio.sleep(rng.uniform(0, 2 * KILL_EVERY_S))
            place = rng.randrange(CLIENTS)
            assert clients[place].returncode is None, "a client ended by itself"
            clients[place].kill()
            await clients[place].wait()
            clients[place] = await client_of(gateway, home, next(seeds))
            if at_s >= sample_at_s:
                samples.append(sample(gateway.process.pid, began_s))
                sample_at_s = at_s + SAMPLE_EVERY_S
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
            await client.wait()


@pytest.mark.soak
async def test_nothing_grows_and_nothing_is_left_behind_by_clients_that_die(home: Path) -> None:
    samples: list[Sample] = []
    async with serving(home / "state") as gateway:
        idle = sample(gateway.process.pid, time.monotonic())
        await load(gateway, home, samples)
        left = await gateway.until(
            lambda status: not status["usage"]["leases"] and not any(status["queues"].values())
        )
        await asyncio.sleep(LEASE_MS / 1000)
        left = await gateway.status()
        done = sample(gateway.process.pid, time.monotonic())
        requests = left["requests"]
        assert await gateway.end() == 0
    warm = [each for each in samples if each.at_s >= WARM_SHARE * MINUTES * 60]
    half = len(warm) // 2
    before, after = (max(each.resident_bytes for each in part) for part in (warm[:half], warm[half:]))
    print(  # noqa: T201 - the measurement
        f"idle {idle}",
        f"first {samples[0]}",
        f"last {samples[-1]}",
        f"end {done}",
        f"requests {requests}",
        sep="\n",
    )
    assert after <= before + max(GROWTH_BYTES_MAX, GROWTH_SHARE_MAX * before)
    assert (
        max(each.descriptors for each in warm[half:])
        <= max(each.descriptors for each in warm[:half]) + CLIENTS
    )
    # Threads and their wake-ups are made at first use, and stay.
    assert done.descriptors <= idle.descriptors + 12
    assert done.threads <= idle.threads + 16
    assert left["usage"]["reserved_bytes"] == left["usage"]["leases"] == left["usage"]["leased_bytes"] == 0
    assert left["errors"].get("internal", 0) == 0
    assert requests["store"] > 0 < requests["load"]
