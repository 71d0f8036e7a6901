"""Draining: whatever a request had come to, it is answered once and its resources go back."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from tests.sim.faults import Faults
from tests.sim.gateway import RESERVED_BYTES, Gateway, Parts, Settings
from tests.sim.loop import SimLoop
from tests.sim.medium import Medium
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import EngineLimits
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from tests.sim.gateway import Answer

UNIT = 4096
LIMITS = EngineLimits(
    capacity_au=32,
    au_bytes=UNIT,
    max_objects=64,
    object_bytes_max=8 * UNIT,
    lease_ttl_max_ns=10_000_000_000,
    leases_per_scope_max=8,
    leased_bytes_per_scope_max=1 << 30,
    eviction=EvictionRules(trigger_watermark=1.0),
)
SETTINGS = Settings(LIMITS, Faults(), 100_000, store_wait_ns=10_000_000, inline_loads_bytes_max=1 << 20)


def _store(key: bytes) -> tuple[m.Store, list[bytes]]:
    return m.Store("", b"", [key], [UNIT]), [bytes(UNIT)]


async def _drained_after(loop: SimLoop, turns: int) -> None:
    breaches: list[str] = []
    medium = Medium(RESERVED_BYTES + 32 * UNIT, 512)
    gateway = Gateway(loop, medium, random.Random(1), SETTINGS, Parts(), breaches.append)
    (reply, _) = await gateway.ask(1, *_store(b"held"))
    assert reply == m.StoreReply(["stored"])
    open_: list[asyncio.Future[Answer]] = [
        gateway.ask(1, *_store(b"new")),
        gateway.ask(1, m.Load("", b"", [b"new"])),  # waits for the store
        gateway.ask(1, *_store(b"newer")),  # waits behind it
        gateway.ask(2, m.Load("", b"", [b"held"])),
        gateway.ask(2, *_store(b"other")),
    ]
    for _ in range(turns):
        await asyncio.sleep(0)
    await gateway.service.drain(0)
    for answer in await asyncio.gather(*open_):
        assert isinstance(answer[0], m.StoreReply | m.LoadReply) or _code(answer) is ErrorCode.DRAINING
    assert not gateway.service._tasks
    assert not gateway.service._orders
    assert gateway.service._inline_loads_bytes == 0
    late, _ = await gateway.ask(1, *_store(b"late"))
    assert isinstance(late, RpcError)
    assert late.code is ErrorCode.DRAINING
    await asyncio.sleep(100)
    gateway.engine.audit()
    usage = gateway.engine.usage()
    assert usage.reserved_au == usage.doomed_au == usage.quarantined_au == 0
    assert not gateway.engine._state.slots.pins.any()
    assert not breaches
    await gateway.kill()


def _code(answer: Answer) -> ErrorCode | None:
    return answer[0].code if isinstance(answer[0], RpcError) else None


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
def test_a_drain_answers_every_request_once_and_gives_everything_back(turns: int) -> None:
    for seed in range(5):
        loop = SimLoop(random.Random(seed))
        loop.run(_drained_after(loop, turns))
        loop.close()
