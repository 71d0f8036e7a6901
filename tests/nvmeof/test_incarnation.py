"""Which losses make writes that were not flushed doubtful: of any path by which commands went, and of what nobody could watch."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.fake_target import BLOCK, FakeConnection, FakeTarget, Script
from tests.nvmeof.hosts import eventually, pattern, swallow
from tests.nvmeof.kernel.test_device import FileWay
from tests.nvmeof.kernel.test_device import options as kernel_options
from tests.nvmeof.test_multipath import connect
from xkv_nvmeof.blockdev import CommandFailed
from xkv_nvmeof.kernel.device import KernelDevice
from xkv_nvmeof.kernel.keeper import UNSEEN_MS_MAX
from xkv_nvmeof.spec import IoOpcode, Status

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_nvmeof.command import SubmissionEntry


def flushes(target: FakeTarget) -> int:
    return sum(entry.opcode == IoOpcode.FLUSH for _qid, entry in target.seen.commands)


async def test_a_flush_goes_to_each_controller_that_is_used() -> None:
    async with FakeTarget() as one, FakeTarget() as two:
        device = await connect(one.port, two.port)
        await eventually(lambda: all(path.connected for path in device.paths))
        before = device.incarnation
        await device.write_from(0, [memoryview(pattern(BLOCK))])
        await device.flush()
        assert (flushes(one), flushes(two)) == (1, 1)
        assert device.counters.flush_commands == 1
        assert device.incarnation == before
        await device.aclose()


@pytest.mark.parametrize("lost", [0, 1])
async def test_the_loss_of_any_path_is_another_incarnation_although_the_device_stays_online(
    lost: int,
) -> None:
    async with FakeTarget() as one, FakeTarget() as two:
        device = await connect(one.port, two.port)
        await eventually(lambda: all(path.connected for path in device.paths))
        before = device.incarnation
        targets = (one, two)
        targets[lost].stop_listening()
        for connection in list(targets[lost].connections):
            connection.drop()
        await eventually(lambda: not device.paths[lost].connected)
        assert device.incarnation > before
        settled = device.incarnation
        await device.flush()
        assert flushes(targets[1 - lost]) == 1
        assert device.incarnation == settled
        assert device.counters.errors == 0
        await device.aclose()


async def test_a_path_that_ends_during_a_flush_is_nobodys_error_but_another_incarnation() -> None:
    async with (
        FakeTarget(Script(on_command=swallow(qid=1, opcode=IoOpcode.FLUSH))) as one,
        FakeTarget() as two,
    ):
        device = await connect(one.port, two.port, io_queues=1)
        await eventually(lambda: all(path.connected for path in device.paths))
        before = device.incarnation
        flushing = asyncio.create_task(device.flush())
        await one.until(lambda: flushes(one) == 1)
        one.stop_listening()
        for connection in list(one.connections):
            connection.drop()
        await flushing
        assert flushes(two) >= 1
        assert device.incarnation > before
        assert device.counters.errors == 0
        await device.aclose()


async def test_a_flush_that_one_controller_refuses_has_failed() -> None:
    def refuse(connection: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if connection.qid == 1 and entry.opcode == IoOpcode.FLUSH:
            return [connection.response(entry.cid, Status.INTERNAL_ERROR)]
        return None

    async with FakeTarget(Script(on_command=refuse)) as one, FakeTarget() as two:
        device = await connect(one.port, two.port, io_queues=1)
        await eventually(lambda: all(path.connected for path in device.paths))
        with pytest.raises(CommandFailed):
            await device.flush()
        await device.aclose()


class Clock:
    """Stands still."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


async def test_with_linux_a_controller_that_was_lost_between_two_looks_at_the_device_is_noticed(
    tmp_path: Path,
) -> None:
    way, clock = FileWay(tmp_path), Clock()
    device = await KernelDevice.connect(way, kernel_options(), clock=clock, entropy=os.urandom)
    keeper = device._keeper
    assert keeper.use is not None
    before = device.incarnation
    for change in ({"state": "connecting"}, {"state": "live"}):
        way.fake.controller(**change)  # type: ignore[arg-type]
        keeper.look(keeper.use)
    after = device.incarnation
    assert after > before
    way.fake.write("class/nvme/nvme0/cntlid", 7)
    keeper.look(keeper.use)
    assert device.incarnation > after
    await device.aclose()


async def test_with_linux_time_in_which_nobody_looked_counts_as_a_loss(tmp_path: Path) -> None:
    way, clock = FileWay(tmp_path), Clock()
    device = await KernelDevice.connect(way, kernel_options(), clock=clock, entropy=os.urandom)
    before = device.incarnation
    clock.now_ns += UNSEEN_MS_MAX * 1_000_000
    assert device.incarnation == before
    clock.now_ns += 10**9
    assert device.incarnation == before + 1
    assert device.incarnation == before + 1
    await device.aclose()
