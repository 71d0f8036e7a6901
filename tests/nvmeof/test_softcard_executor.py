"""Order and failures of the soft card's commands on a store whose disk can be made to fail or to wait."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from xkv_nvmeof.blockdev import ByteRange
from xkv_nvmeof.controller_types import (
    DeallocateCommand,
    FlushCommand,
    IoCommand,
    ReadCommand,
    WriteCommand,
    WriteZeroesCommand,
)
from xkv_nvmeof.softcard.executor import SLOW_WRITE_NS, Executor
from xkv_nvmeof.softcard.store import Store, new_identity
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SIZE = 1 << 20


class FaultyStore(Store):
    """A real store; `error` makes calls fail, `gate` holds flushes until it is set, `uncached` hides the cache."""

    error: int | None = None
    uncached = False
    flushes = 0
    write_threads: list[int]

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, SIZE)
        super().__init__(descriptor, new_identity(SIZE, 4096, os.urandom))
        self.gate = threading.Event()
        self.gate.set()
        self.write_threads = []

    def _fail(self) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))

    def read_now(self, offset_bytes: int, view: memoryview) -> bool:
        if self.uncached:
            return False
        self._fail()
        return super().read_now(offset_bytes, view)

    def read(self, offset_bytes: int, view: memoryview) -> None:
        self._fail()
        super().read(offset_bytes, view)

    def write(self, offset_bytes: int, view: memoryview, *, durable: bool) -> None:
        self.write_threads.append(threading.get_ident())
        self._fail()
        super().write(offset_bytes, view, durable=durable)

    def zero(self, offset_bytes: int, length_bytes: int) -> None:
        self._fail()
        super().zero(offset_bytes, length_bytes)

    def flush(self) -> None:
        self.flushes += 1
        assert self.gate.wait(30)
        self._fail()
        super().flush()


class Rig:
    """An executor, its store, and a clock that goes on by `step_ns` at each look."""

    def __init__(self, path: Path) -> None:
        self.store = FaultyStore(path)
        self.step_ns = 0
        self.now_ns = time.monotonic_ns()
        self.executor = Executor(self.store, self._clock)

    def _clock(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns

    def begin(self, command: IoCommand, buffer: memoryview | None = None) -> asyncio.Future[Status]:
        future: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.executor.execute(command, buffer, future.set_result)
        return future

    async def run(self, command: IoCommand, buffer: memoryview | None = None) -> Status:
        async with asyncio.timeout(30):
            return await self.begin(command, buffer)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "blocks")
    yield made
    made.store.gate.set()
    await made.executor.aclose()
    made.store.close()


def write(data: bytes = b"x" * 4096, *, durable: bool = False) -> WriteCommand:
    return WriteCommand(1, 0, memoryview(data), durable, pooled=False)


ALL = ByteRange(0, 8192)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    "command",
    [
        write(),
        write(durable=True),
        WriteZeroesCommand(1, ALL, False, False),
        DeallocateCommand(1, (ALL,)),
        FlushCommand(1),
    ],
)
async def test_a_failing_disk_becomes_a_status(rig: Rig, command: IoCommand, number: int) -> None:
    rig.store.error = number
    expected = Status.CAPACITY_EXCEEDED if number == errno.ENOSPC else Status.WRITE_FAULT
    assert await rig.run(command) is expected


@pytest.mark.parametrize("uncached", [False, True])
async def test_a_failing_read_becomes_a_status(rig: Rig, uncached: bool) -> None:
    rig.store.uncached = uncached
    buffer = memoryview(bytearray(4096))
    assert await rig.run(ReadCommand(1, 0, 4096, False), buffer) is Status.SUCCESS
    rig.store.error = errno.EIO
    assert await rig.run(ReadCommand(1, 0, 4096, False), buffer) is Status.UNRECOVERED_READ_ERROR


async def test_a_flush_that_failed_once_never_succeeds_again(rig: Rig) -> None:
    rig.store.error = errno.EIO
    assert await rig.run(FlushCommand(1)) is Status.WRITE_FAULT
    rig.store.error = None
    assert await rig.run(FlushCommand(2)) is Status.WRITE_FAULT
    assert await rig.run(write()) is Status.SUCCESS


async def test_one_flush_stands_for_all_that_wait_but_not_for_later_ones(rig: Rig) -> None:
    rig.store.gate.clear()
    first = rig.begin(FlushCommand(1))
    assert await rig.run(write()) is Status.SUCCESS
    others = [rig.begin(FlushCommand(cid)) for cid in range(2, 9)]
    assert not first.done()
    rig.store.gate.set()
    async with asyncio.timeout(30):
        assert await asyncio.gather(first, *others) == [Status.SUCCESS] * 8
    assert rig.store.flushes == 2


async def test_reads_and_writes_go_on_while_a_flush_waits_for_the_disk(rig: Rig) -> None:
    rig.store.gate.clear()
    flush = rig.begin(FlushCommand(1))
    assert await rig.run(write(b"y" * 4096)) is Status.SUCCESS
    buffer = memoryview(bytearray(4096))
    assert await rig.run(ReadCommand(2, 0, 4096, False), buffer) is Status.SUCCESS
    assert buffer == b"y" * 4096
    assert not flush.done()


async def test_writes_leave_the_loop_while_the_disk_is_slow(rig: Rig) -> None:
    here = threading.get_ident()
    rig.step_ns = SLOW_WRITE_NS + 1
    assert await rig.run(write()) is Status.SUCCESS
    rig.step_ns = 0
    assert await rig.run(write()) is Status.SUCCESS
    rig.now_ns += 2_000_000_000
    assert await rig.run(write()) is Status.SUCCESS
    assert [thread == here for thread in rig.store.write_threads] == [True, False, True]


async def test_a_deallocation_of_nothing_and_of_ranges(rig: Rig) -> None:
    assert await rig.run(write()) is Status.SUCCESS
    assert await rig.run(DeallocateCommand(1, ())) is Status.SUCCESS
    assert await rig.run(DeallocateCommand(1, (ByteRange(0, 4096),))) is Status.SUCCESS
    assert (
        await rig.run(WriteZeroesCommand(1, ALL, deallocate=True, force_unit_access=True)) is Status.SUCCESS
    )
    buffer = memoryview(bytearray(b"z" * 4096))
    assert await rig.run(ReadCommand(1, 0, 4096, False), buffer) is Status.SUCCESS
    assert not any(buffer)
