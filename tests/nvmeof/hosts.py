"""What the tests of the host side share: options, and devices connected to a fake target."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from xkv_nvmeof.initiator import InitiatorOptions, TargetAddress, TcpInitiator

from .fake_target import HANG_S, NQN, FakeConnection, FakeTarget, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from xkv_nvmeof.blockdev import DeviceState
    from xkv_nvmeof.command import SubmissionEntry

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


def at_once(call: Coroutine[Any, Any, object]) -> object:
    """Return what the call returns, or raises, without a single turn of the loop."""
    try:
        call.send(None)
    except StopIteration as ended:
        return ended.value
    call.close()
    raise AssertionError("the call waits for something")


def pattern(size: int, seed: int = 1) -> bytes:
    return bytes((index * 7 + index // 251 + seed) & 0xFF for index in range(size))


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds, for what gives no sign of its own."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)


def swallow(*, qid: int, opcode: int) -> Callable[[FakeConnection, SubmissionEntry], list[bytes] | None]:
    """Return a hook that never answers such commands."""
    return lambda conn, entry: [] if conn.qid == qid and entry.opcode == opcode else None


class States:
    """The states that a device went through, to be waited for."""

    def __init__(self, device: TcpInitiator) -> None:
        self.seen: list[tuple[DeviceState, str]] = []
        self._changed = asyncio.Event()
        device.add_state_listener(self._note)
        device.add_geometry_listener(lambda _before, _now: self._changed.set())

    def _note(self, state: DeviceState, reason: str) -> None:
        self.seen.append((state, reason))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()
