"""What controllers tell of access comes late: who can still be asked is asked before a call fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.fake_target import BLOCK, FakeConnection, FakeTarget, Script
from tests.nvmeof.hosts import States, eventually
from tests.nvmeof.test_multipath import connect
from xkv_nvmeof.blockdev import DeviceOffline, DeviceState
from xkv_nvmeof.logpages import AccessGroup, encode_access_log
from xkv_nvmeof.multipath import Access
from xkv_nvmeof.spec import AdminOpcode, Status

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry


def tells(access: list[Access]) -> Script:
    """A controller that gives the access that is in the list just now, and says so only when it is asked."""

    def hook(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid == 0 and entry.opcode == AdminOpcode.GET_LOG_PAGE and entry.cdw10 & 0xFF == 0x0C:
            page = encode_access_log(1, [AccessGroup(1, access[0])])[: entry.sgl.length_bytes]
            page = page.ljust(entry.sgl.length_bytes, b"\0")
            return [conn.data(entry.cid, 0, page, last=True), conn.response(entry.cid)]
        if conn.qid > 0 and access[0] is Access.INACCESSIBLE:
            return [conn.response(entry.cid, Status.ASYMMETRIC_ACCESS_INACCESSIBLE)]
        return None

    return Script(on_command=hook, multipath=8, access_group=1)


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "lost"])
async def test_a_path_that_is_open_again_and_has_not_said_so_yet_is_asked_before_anything_fails(
    lost: bool,
) -> None:
    first, second = [Access.OPTIMIZED], [Access.INACCESSIBLE]
    async with FakeTarget(tells(first)) as one, FakeTarget(tells(second)) as two:
        device = await connect(one.port, two.port)
        states = States(device)
        await eventually(lambda: all(path.connected for path in device.paths))
        first[0], second[0] = second[0], first[0]
        if lost:
            one.stop_listening()
            for connection in list(one.connections):
                connection.drop()
            await eventually(lambda: not device.paths[0].connected)
        await device.read_into(0, [memoryview(bytearray(BLOCK))])
        assert (device.counters.errors, states.seen) == (0, [])
        # Where no path is open, it is said after a few questions.
        first[0] = second[0] = Access.INACCESSIBLE
        with pytest.raises(DeviceOffline):
            await device.read_into(0, [memoryview(bytearray(BLOCK))])
        await eventually(lambda: device.state is DeviceState.OFFLINE)
        await device.aclose()
