"""Devices that go through Linux, for these tests: a file in the place of one, and a loop device where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.nvmeof.hosts import HOST_ID, HOST_NQN
from xkv_nvmeof.blockdev import DeviceIdentity
from xkv_nvmeof.initiator_errors import ConnectFailed
from xkv_nvmeof.initiator_options import InitiatorOptions
from xkv_nvmeof.kernel import sysfs
from xkv_nvmeof.kernel.device import KernelDevice
from xkv_nvmeof.kernel.file import BlockFile
from xkv_nvmeof.kernel.ways import NodeWay, Opened, geometry_of

from .fake_sysfs import NQN, FakeSysfs

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        folder = sysfs.folder_of(block)
        return Opened(
            self.file, block, folder, identity, geometry, nvme=True, late_ms=5_000, root=self.fake.root
        )

    async def leave(self) -> None:
        self.left += 1


def options(**changes: Any) -> InitiatorOptions:
    return InitiatorOptions(HOST_NQN, HOST_ID, **{"reconnect_delay_min_ms": 5, **changes})


async def connect(way: FileWay | NodeWay, **changes: Any) -> KernelDevice:
    return await KernelDevice.connect(way, options(**changes), clock=time.monotonic_ns, entropy=os.urandom)


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
