"""Our initiator against the target of Linux: the whole contract, digests, a target that goes away and comes back."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.nvmeof.contract import BlockDeviceContract, read
from tests.nvmeof.hosts import connect, options
from xkv_nvmeof.blockdev import ByteRange, DeviceOffline, DeviceState, OutcomeUnknown
from xkv_nvmeof.initiator_discovery import discover
from xkv_nvmeof.initiator_errors import ConnectRefused

from .nvmet import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from xkv_nvmeof.blockdev import BlockDevice
    from xkv_nvmeof.initiator import TcpInitiator

    from .machine import Guest
    from .nvmet import Target

pytestmark = pytest.mark.guest

NQN = "nqn.2014-08.com.example:initiator"
BACK_S = 120.0
PATIENT = {"connect_timeout_ms": 60_000, "command_timeout_ms": 60_000}
"""The guest is emulated, on a machine that may be busy."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "digests": {"header_digest": "required", "data_digest": "required"},
    "flow control": {"sq_flow_control": True, "queue_depth": 3},
    "one queue": {"io_queues": 1, "max_transfer_bytes": 65_536},
}


@pytest.fixture(scope="module")
def target(guest: Guest) -> Iterator[Target]:
    with serving(guest, NQN) as served:
        yield served


class TestLinux(BlockDeviceContract):
    @pytest.fixture(
        params=[pytest.param(name, marks=pytest.mark.smoke if name == "plain" else ()) for name in OPTIONS]
    )
    async def device(self, request: pytest.FixtureRequest, target: Target) -> AsyncIterator[TcpInitiator]:
        device = await connect(target.host_port, NQN, **PATIENT, **OPTIONS[request.param])
        yield device
        await device.aclose()

    async def test_deallocated_ranges_read_as_promised(self, device: BlockDevice) -> None:
        # A RAM disk behind it promises nothing, and keeps that promise: nothing but the neighbours counts.
        assert not device.geometry.deallocate_zeroes
        await super().test_deallocated_ranges_read_as_promised(device)

    async def test_the_namespace_is_the_one_that_was_declared(
        self, device: BlockDevice, target: Target
    ) -> None:
        identity = device.identity
        assert (identity.nqn, identity.nsid, identity.model) == (NQN, 1, "Linux")
        assert (identity.nguid, identity.uuid) == (target.nguid.bytes, target.uuid.bytes)
        assert device.geometry.can_write_zeroes


@pytest.mark.smoke
async def test_the_target_of_linux_is_discovered(target: Target) -> None:
    entries = await discover("127.0.0.1", target.host_port, options(**PATIENT), clock=time.monotonic_ns)
    assert NQN in {entry.subnqn for entry in entries}


async def test_a_host_that_is_not_allowed_is_told_so(target: Target) -> None:
    attribute = f"/sys/kernel/config/nvmet/subsystems/{NQN}/attr_allow_any_host"
    await asyncio.to_thread(target.guest.sh, f"echo 0 > {attribute}")
    try:
        with pytest.raises(ConnectRefused):
            await connect(target.host_port, NQN, **PATIENT)
    finally:
        await asyncio.to_thread(target.guest.sh, f"echo 1 > {attribute}")


@pytest.mark.smoke
async def test_a_target_that_goes_away_and_comes_back_is_used_again(target: Target) -> None:
    device = await connect(target.host_port, NQN, **PATIENT, keep_alive_ms=5_000)
    try:
        states: asyncio.Queue[DeviceState] = asyncio.Queue()
        device.add_state_listener(lambda state, _reason: states.put_nowait(state))
        await device.write_from(0, [memoryview(b"\x5a" * 65_536)])
        await device.flush()
        await asyncio.to_thread(target.leave)
        async with asyncio.timeout(BACK_S):
            assert await states.get() is DeviceState.OFFLINE
        with pytest.raises((DeviceOffline, OutcomeUnknown)):
            await device.write_zeroes(ByteRange(0, 4096))
        await asyncio.to_thread(target.come_back)
        async with asyncio.timeout(BACK_S):
            assert await states.get() is DeviceState.ONLINE
        assert await read(device, 0, 65_536) == b"\x5a" * 65_536
        assert device.counters.reconnects == 1
    finally:
        await device.aclose()
