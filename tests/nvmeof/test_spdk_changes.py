"""With SPDK's target: namespaces that grow, go and return; several ways to one namespace, and what access they give."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.hosts import States, eventually, pattern
from tests.nvmeof.spdk_target import NQN, Spdk, spdk_process
from tests.nvmeof.test_multipath import connect
from xkv_nvmeof.blockdev import DeviceOffline, DeviceState
from xkv_nvmeof.multipath import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.spdk
MIB = 1 << 20


@pytest.fixture
def spdk() -> Iterator[Spdk]:
    if "XKV_SPDK_TGT" not in os.environ:
        pytest.skip("XKV_SPDK_TGT names no nvmf_tgt binary")
    with spdk_process() as process:
        process.transport()
        image = process.folder / "card.img"
        image.touch()
        os.truncate(image, 64 * MIB)
        process.call("bdev_aio_create", name="a0", filename=str(image), block_size=4096)
        process.subsystem("a0", allow_any_host=True, ana_reporting=True)
        yield process


async def test_growth_removal_and_return_are_noticed(spdk: Spdk) -> None:
    device = await connect(spdk.listen(), nqn=NQN)
    states = States(device)
    for size in (80, 96):
        os.truncate(spdk.folder / "card.img", size * MIB)
        spdk.call("bdev_aio_rescan", name="a0")
        await states.until(lambda size=size: device.geometry.size_bytes == size * MIB)  # type: ignore[misc]
    await device.write_from(95 * MIB, [memoryview(pattern(4096))])
    assert states.seen == []
    spdk.call("nvmf_subsystem_remove_ns", nqn=NQN, nsid=1)
    await states.until(lambda: device.state is DeviceState.OFFLINE)
    with pytest.raises(DeviceOffline):
        await device.flush()
    spdk.add_namespace("a0")
    await states.until(lambda: device.state is DeviceState.ONLINE)
    found = bytearray(4096)
    await device.read_into(95 * MIB, [memoryview(found)])
    assert found == pattern(4096)
    await device.aclose()


async def test_io_follows_the_access_and_survives_the_loss_of_a_listener(spdk: Spdk) -> None:
    ports = [spdk.listen(), spdk.listen()]
    device = await connect(*ports, nqn=NQN)
    await eventually(lambda: all(path.connected for path in device.paths))
    states = States(device)
    stop = asyncio.Event()

    async def load(slot: int) -> None:
        data, found = pattern(65536, slot), bytearray(65536)
        while not stop.is_set():
            await device.write_from(slot * MIB, [memoryview(data)])
            await device.read_into(slot * MIB, [memoryview(found)])
            assert found == data

    def give(port: int, state: str) -> None:
        call = "nvmf_subsystem_listener_set_ana_state"
        spdk.call(call, nqn=NQN, ana_state=state, listen_address=spdk.address(port))

    tasks = [asyncio.create_task(load(slot)) for slot in range(8)]
    for state, access in (
        ("inaccessible", Access.INACCESSIBLE),
        ("non_optimized", Access.NON_OPTIMIZED),
        ("optimized", Access.OPTIMIZED),
    ):
        await asyncio.to_thread(give, ports[0], state)
        await eventually(lambda access=access: device.paths[0].access is access)  # type: ignore[misc]
    stop.set()
    await asyncio.gather(*tasks)
    await asyncio.to_thread(
        spdk.call, "nvmf_subsystem_remove_listener", nqn=NQN, listen_address=spdk.address(ports[0])
    )
    await eventually(lambda: not device.paths[0].connected)
    for slot in range(8):
        found = bytearray(65536)
        await device.read_into(slot * MIB, [memoryview(found)])
        assert found == pattern(65536, slot)
    assert states.seen == []
    assert device.counters.errors == 0
    await device.aclose()
