"""What the tests of the host side share: options, and devices connected to a fake target."""

from __future__ import annotations

import os
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from xkv_nvmeof.initiator import InitiatorOptions, TargetAddress, TcpInitiator

from .fake_target import NQN, FakeTarget, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST_NQN = "nqn.2026-01.org.example:host"
HOST_ID = bytes(range(1, 17))


def options(**changes: Any) -> InitiatorOptions:
    settings: dict[str, Any] = {"reconnect_delay_min_ms": 5, "reconnect_delay_max_ms": 20} | changes
    return InitiatorOptions(HOST_NQN, HOST_ID, **settings)


async def connect(port: int, nqn: str = NQN, **changes: Any) -> TcpInitiator:
    return await TcpInitiator.connect(
        TargetAddress("127.0.0.1", port, nqn), options(**changes), clock=time.monotonic_ns, entropy=os.urandom
    )


@asynccontextmanager
async def connected(
    script: Script | None = None, **changes: Any
) -> AsyncIterator[tuple[FakeTarget, TcpInitiator]]:
    async with FakeTarget(script) as target:
        device = await connect(target.port, **changes)
        try:
            yield target, device
        finally:
            await device.aclose()


def pattern(size: int, seed: int = 1) -> bytes:
    return bytes((index * 7 + index // 251 + seed) & 0xFF for index in range(size))
