"""The block device contract on the device that goes through Linux, on a file; and on a loop device, where there is one."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.contract import BlockDeviceContract, read
from xkv_nvmeof.blockdev import (
    ByteRange,
    CommandFailed,
    DeviceOffline,
    DeviceState,
    OutcomeUnknown,
)
from xkv_nvmeof.initiator_errors import ConnectUnanswered, NamespaceUnusable
from xkv_nvmeof.kernel.device import KernelDevice
from xkv_nvmeof.kernel.ways import NodeWay

from .devices import BACK_S, SIZE, FileWay, connect, options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from xkv_nvmeof.blockdev import BlockDevice


class TestFile(BlockDeviceContract):
    @pytest.fixture
    async def device(self, way: FileWay) -> AsyncIterator[KernelDevice]:
        device = await connect(way)
        yield device
        await device.aclose()
        assert way.left == 1

    async def lose_connection(self, device: BlockDevice) -> None:
        assert isinstance(device, KernelDevice)
        folder = device._keeper.seen.root / "class/nvme/nvme0/state"
        states: asyncio.Queue[DeviceState] = asyncio.Queue()
        device.add_state_listener(lambda state, _reason: states.put_nowait(state))
        folder.write_text("connecting\n", encoding="ascii")
        assert await following(states) is DeviceState.OFFLINE
        folder.write_text("live\n", encoding="ascii")


class TestLoop(BlockDeviceContract):
    @pytest.fixture
    async def device(self, loop: Path) -> AsyncIterator[KernelDevice]:
        device = await connect(NodeWay(loop, options(), read_only=False))
        yield device
        await device.aclose()

    async def test_the_identity_names_the_namespace(self, device: object) -> None:
        """A loop device is no namespace, and has no name of its own."""


async def test_a_device_in_use_is_refused_but_can_be_looked_at(loop: Path) -> None:
    device = await connect(NodeWay(loop, options(), read_only=False))
    with pytest.raises(NamespaceUnusable, match="in use"):
        await connect(NodeWay(loop, options(), read_only=False))
    looking = await connect(NodeWay(loop, options(), read_only=True))
    assert await read(looking, 0, 4096) == bytes(4096)
    with pytest.raises((CommandFailed, OutcomeUnknown)):
        await looking.write_from(0, [memoryview(bytes(4096))])
    await looking.aclose()
    await device.aclose()


@pytest.mark.parametrize("kind", ["none", "file", "folder", "character device"])
async def test_what_is_no_block_device_is_never_opened_or_made(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nvme0n1"
    match kind:
        case "file":
            path.write_bytes(b"mine")
        case "folder":
            path.mkdir()
        case "character device":
            path = Path("/dev/null")
    with pytest.raises(ConnectUnanswered if kind == "none" else NamespaceUnusable):
        await connect(NodeWay(path, options(), read_only=False))
    assert kind != "none" or not path.exists()
    assert kind != "file" or path.read_bytes() == b"mine"


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def device(way: FileWay) -> AsyncIterator[KernelDevice]:
    device = await connect(way)
    yield device
    await device.aclose()


@pytest.fixture
def states(device: KernelDevice) -> asyncio.Queue[DeviceState]:
    states: asyncio.Queue[DeviceState] = asyncio.Queue()
    device.add_state_listener(lambda state, _reason: states.put_nowait(state))
    return states


async def following(states: asyncio.Queue[DeviceState]) -> DeviceState:
    async with asyncio.timeout(BACK_S):
        return await states.get()


async def test_while_no_controller_is_live_calls_are_refused_at_once(
    way: FileWay, device: KernelDevice, states: asyncio.Queue[DeviceState]
) -> None:
    way.fake.controller(state="connecting")
    assert await following(states) is DeviceState.OFFLINE
    assert "nvme0 is connecting" in device.reason
    assert device.settles_at_ns > time.monotonic_ns()
    with pytest.raises(DeviceOffline):
        await device.flush()
    way.fake.controller(state="live")
    assert await following(states) is DeviceState.ONLINE
    assert await read(device, 0, 4096) == bytes(4096)
    assert device.counters.reconnects == 1


async def test_one_of_two_ways_is_enough(
    way: FileWay, device: KernelDevice, states: asyncio.Queue[DeviceState]
) -> None:
    way.fake.controller("nvme1")
    way.fake.controller("nvme0", state="deleting")
    way.fake.controller("nvme1", state="connecting")
    assert await following(states) is DeviceState.OFFLINE
    way.fake.controller("nvme1", state="live")
    assert await following(states) is DeviceState.ONLINE


async def test_a_device_that_is_gone_is_opened_again_when_it_is_back(
    way: FileWay, device: KernelDevice, states: asyncio.Queue[DeviceState]
) -> None:
    await device.write_from(0, [memoryview(b"\x07" * 4096)])
    way.fake.remove("block/nvme0n1")
    assert await following(states) is DeviceState.OFFLINE
    way.fake.namespace(size_bytes=SIZE)
    assert await following(states) is DeviceState.ONLINE
    assert await read(device, 0, 4096) == b"\x07" * 4096


async def test_another_namespace_in_its_place_is_not_used(
    way: FileWay, device: KernelDevice, states: asyncio.Queue[DeviceState]
) -> None:
    way.fake.namespace(size_bytes=SIZE, nguid=b"\x55" * 16)
    assert await following(states) is DeviceState.OFFLINE
    way.fake.namespace(size_bytes=SIZE)
    assert await following(states) is DeviceState.ONLINE
    assert device.identity.nguid == b"\x11" * 16


async def test_a_device_that_was_replaced_by_its_like_between_two_looks_is_opened_again(
    way: FileWay, device: KernelDevice, states: asyncio.Queue[DeviceState]
) -> None:
    """The same namespace under the same name: what is open is the device that is gone, which never answers again."""
    before = way.file
    assert before is not None
    before.fails = errno.EIO
    block = way.fake.root / "block/nvme0n1"
    block.rename(block.with_name("gone"))
    way.fake.namespace(size_bytes=SIZE)
    assert await following(states) is DeviceState.OFFLINE
    assert await following(states) is DeviceState.ONLINE
    assert way.file is not before
    assert await read(device, 0, 4096) == bytes(4096)
    assert device.incarnation


async def test_a_namespace_that_was_formatted_otherwise_is_not_used(
    way: FileWay, device: KernelDevice, states: asyncio.Queue[DeviceState]
) -> None:
    reported: asyncio.Queue[int] = asyncio.Queue()
    device.add_geometry_listener(lambda _before, now: reported.put_nowait(now.block_bytes))
    way.fake.namespace(size_bytes=SIZE, block_bytes=512)
    assert await following(states) is DeviceState.OFFLINE
    async with asyncio.timeout(BACK_S):
        while "blocks of 512 bytes" not in device.reason:  # noqa: ASYNC110 - it gives no other sign
            await asyncio.sleep(0.01)
    way.fake.namespace(size_bytes=SIZE)
    assert await following(states) is DeviceState.ONLINE
    assert device.geometry.block_bytes == 4096
    assert reported.empty()


async def test_growth_and_shrinking_are_told_and_the_device_stays_online(
    way: FileWay, device: KernelDevice, states: asyncio.Queue[DeviceState]
) -> None:
    sizes: asyncio.Queue[int] = asyncio.Queue()
    device.add_geometry_listener(lambda _before, now: sizes.put_nowait(now.size_bytes))
    for size in (SIZE * 2, SIZE * 3, SIZE // 2):
        way.fake.write("block/nvme0n1/size", size // 512)
        async with asyncio.timeout(BACK_S):
            assert await sizes.get() == size
    assert states.empty()
    with pytest.raises(CommandFailed):
        await device.write_zeroes(ByteRange(SIZE // 2, 4096))
    assert await read(device, SIZE // 2 - 4096, 4096) == bytes(4096)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.ETIMEDOUT, errno.ENOLINK])
async def test_an_error_that_may_be_a_lost_connection_leaves_the_outcome_unknown(
    way: FileWay, device: KernelDevice, number: int
) -> None:
    assert way.file is not None
    way.file.fails = number
    with pytest.raises(OutcomeUnknown) as caught:
        await device.write_from(0, [memoryview(bytes(4096))])
    assert caught.value.settles_at_ns > time.monotonic_ns()
    assert device.settles_at_ns >= caught.value.settles_at_ns
    assert device.counters.errors == 1


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENODATA, 0x281), (errno.EREMOTEIO, 0x006), (errno.EBADE, 0x083), (errno.ENOSPC, 0x081)]
)  # fmt: skip
async def test_an_answer_of_the_controller_is_a_failed_command(
    way: FileWay, device: KernelDevice, number: int, status: int
) -> None:
    assert way.file is not None
    way.file.fails = number
    with pytest.raises(CommandFailed) as caught:
        await device.read_into(0, [memoryview(bytearray(4096))])
    assert caught.value.status_code_type << 8 | caught.value.status_code == status


async def test_a_command_that_does_not_come_back_takes_the_card_offline_but_not_its_buffers(
    way: FileWay,
) -> None:
    device = await connect(way, command_timeout_ms=100)
    states: asyncio.Queue[DeviceState] = asyncio.Queue()
    device.add_state_listener(lambda state, _reason: states.put_nowait(state))
    assert way.file is not None
    way.file.answers.clear()
    reading = asyncio.create_task(read(device, 0, 4096))
    assert await following(states) is DeviceState.OFFLINE
    assert not reading.done()
    with pytest.raises(DeviceOffline):
        await device.write_zeroes(ByteRange(0, 4096))
    way.file.answers.set()
    assert await reading == bytes(4096)
    assert await following(states) is DeviceState.ONLINE
    await device.aclose()


async def test_closing_does_not_wait_for_a_command_that_hangs(way: FileWay) -> None:
    device = await connect(way, close_timeout_ms=200)
    assert way.file is not None
    way.file.answers.clear()
    reading = asyncio.create_task(read(device, 0, 4096))
    assert await asyncio.to_thread(way.file.asked.wait, BACK_S)
    await device.aclose()
    assert not reading.done()
    way.file.answers.set()
    # It ends when Linux has ended it, and only then the file is closed.
    assert await reading == bytes(4096)
    [closing] = (task for task in asyncio.all_tasks() if task.get_name() == "card-close")
    await closing
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(way.file.descriptor)
