"""The block device contract on the device that goes through Linux, on a file; and on a loop device, where there is one."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.nvmeof.contract import BlockDeviceContract, read
from tests.nvmeof.hosts import HOST_ID, HOST_NQN
from xkv_nvmeof.blockdev import (
    ByteRange,
    CommandFailed,
    DeviceIdentity,
    DeviceOffline,
    DeviceState,
    OutcomeUnknown,
)
from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectUnanswered, NamespaceUnusable
from xkv_nvmeof.initiator_options import InitiatorOptions
from xkv_nvmeof.kernel import sysfs
from xkv_nvmeof.kernel.device import KernelDevice
from xkv_nvmeof.kernel.file import BlockFile
from xkv_nvmeof.kernel.ways import NodeWay, Opened, geometry_of, tune

from .fake_sysfs import NQN, FakeSysfs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from xkv_nvmeof.blockdev import BlockDevice

SIZE = 16 << 20
BACK_S = 60.0


class FileOfBlocks(BlockFile):
    """A file instead of a device: it has other calls for discarding and zeroing."""

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        assert length_bytes

    def zero(self, offset_bytes: int, length_bytes: int) -> None:
        self.write(offset_bytes, [memoryview(bytes(length_bytes))], length_bytes)


class Broken(FileOfBlocks):
    """Fails with the errors that it is told, and answers when it may."""

    fails: int | None = None

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.closes = threading.Event()
        self.closes.set()

    def _transfer(self, *arguments: Any) -> None:
        self.asked.set()
        assert self.answers.wait(BACK_S)
        if self.fails is not None:
            raise OSError(self.fails, os.strerror(self.fails))
        super()._transfer(*arguments)

    def close(self) -> None:
        assert self.closes.wait(BACK_S)
        super().close()


class FileWay:
    """A way to a namespace that is a file, in a sysfs of its own."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeSysfs(folder / "sys")
        self.fake.subsystem()
        self.fake.controller()
        self.fake.namespace(size_bytes=SIZE)
        self.path = folder / "card"
        self.path.write_bytes(bytes(SIZE))
        self.file: Broken | None = None
        self.left = 0
        self.refuses = False

    async def open(self, expected: DeviceIdentity | None) -> Opened:
        block = self.fake.root / "block/nvme0n1"
        if self.refuses or not block.exists():
            raise ConnectFailed("nobody answers")
        # Where the file system has it, as with a device: then what is not aligned is not taken.
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            descriptor = os.open(self.path, os.O_RDWR)
        self.file = Broken(descriptor)
        nguid, own_uuid = sysfs.namespace_ids(block)
        identity = DeviceIdentity(NQN, 1, nguid, own_uuid, "0123", "Linux")
        geometry = geometry_of(sysfs.queue_of(block))
        return Opened(self.file, block, identity, geometry, nvme=True, late_ms=5_000, root=self.fake.root)

    async def leave(self) -> None:
        self.left += 1


def options(**changes: Any) -> InitiatorOptions:
    return InitiatorOptions(HOST_NQN, HOST_ID, **{"reconnect_delay_min_ms": 5, **changes})


async def connect(way: FileWay | NodeWay, **changes: Any) -> KernelDevice:
    return await KernelDevice.connect(way, options(**changes), clock=time.monotonic_ns, entropy=os.urandom)


@pytest.fixture
def way(tmp_path: Path) -> FileWay:
    return FileWay(tmp_path)


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


@contextmanager
def loop_device(file: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("loop devices need root and losetup")
    made = subprocess.run(
        ["losetup", "--find", "--show", "--sector-size", "4096", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    try:
        yield Path(made.stdout.strip())
    finally:
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "disk"
    file.write_bytes(bytes(SIZE))
    with loop_device(file) as path:
        yield path


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


# --- Linux is silent ----------------------------------------------------------------------------------------------------


def ended(name: str) -> None:
    """Wait for the threads of that name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(BACK_S)


async def test_a_node_that_linux_does_not_look_at_is_given_up_in_time_and_tried_by_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, released, stat = tmp_path / "nvme0n1", threading.Event(), os.stat

    def hanging(which: Any, **how: Any) -> os.stat_result:
        if which == path:
            assert released.wait(BACK_S)
        return stat(which, **how)

    monkeypatch.setattr(os, "stat", hanging)
    way = NodeWay(path, options(connect_timeout_ms=50), read_only=False)
    with pytest.raises(ConnectUnanswered, match="did not open it in time"):
        await way.open(None)
    with pytest.raises(ConnectUnanswered, match="an attempt from before"):
        await way.open(None)
    released.set()
    ended("card-open")
    with pytest.raises(ConnectUnanswered, match="No such file"):
        await way.open(None)


async def test_a_device_that_was_opened_too_late_is_given_back(
    loop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, opens = threading.Event(), os.open

    def hanging(which: Any, *how: Any, **more: Any) -> int:
        if which == loop:
            assert released.wait(BACK_S)
        return opens(which, *how, **more)

    monkeypatch.setattr(os, "open", hanging)
    way = NodeWay(loop, options(connect_timeout_ms=50), read_only=False)
    with pytest.raises(ConnectUnanswered, match="did not open it in time"):
        await way.open(None)
    released.set()
    ended("card-open")
    await asyncio.sleep(0)
    device = await connect(NodeWay(loop, options(), read_only=False))
    assert device.state is DeviceState.ONLINE
    await device.aclose()


async def test_a_device_that_linux_does_not_let_go_of_holds_up_no_end(way: FileWay) -> None:
    device = await connect(way, close_timeout_ms=100)
    assert way.file is not None
    way.file.closes.clear()
    await device.aclose()
    assert way.left == 1
    os.fstat(way.file.descriptor)
    way.file.closes.set()
    ended("card-close")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(way.file.descriptor)


async def test_times_that_linux_does_not_take_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeSysfs(tmp_path)
    fake.controller()
    place = tmp_path / "class/nvme/nvme0/fast_io_fail_tmo"
    place.unlink()
    os.mkfifo(place)
    monkeypatch.setattr(sysfs, "SYSFS", tmp_path)
    await tune("nvme0", options(connect_timeout_ms=50))
    assert "the times of nvme0 stay as they are" in caplog.text
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    ended("nvme-times")
    os.close(reader)


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
