"""What a controller refuses while it is asked about the namespace is not known: neither is the namespace gone, nor are events over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from xkv_nvmeof.blockdev import DeviceState
from xkv_nvmeof.spec import AdminOpcode, Status

from .fake_target import FakeConnection, FakeTarget, Script
from .hosts import States, connected

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry


class Refusals:
    """Answers the next of some commands with a status; `left` says how many of them."""

    def __init__(self, opcode: AdminOpcode, status: Status, *, final: bool = False) -> None:
        self.left = 0
        self._opcode = opcode
        self._status = status
        self._final = final

    def __call__(self, conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid or entry.opcode != self._opcode or not self.left:
            return None
        self.left -= 1
        return [conn.response(entry.cid, self._status, do_not_retry=self._final)]


async def event(target: FakeTarget) -> None:
    await target.until(lambda: bool(target.connection_of(0).event_cids))
    target.connection_of(0).namespace_event()


@pytest.mark.parametrize("opcode", [AdminOpcode.GET_LOG_PAGE, AdminOpcode.IDENTIFY], ids=["log", "identify"])
@pytest.mark.parametrize(
    "status", [Status.INTERNAL_ERROR, Status.ABORT_REQUESTED, Status.NAMESPACE_NOT_READY]
)
@pytest.mark.parametrize("times", [1, 4])
async def test_a_look_that_is_refused_is_repeated_and_the_device_stays_online(
    opcode: AdminOpcode, status: Status, times: int
) -> None:
    refusals = Refusals(opcode, status)
    async with connected(Script(on_command=refusals)) as (target, device):
        states = States(device)
        for blocks in (target.size_blocks * 2, target.size_blocks * 3):
            target.size_blocks = blocks
            refusals.left = times
            await event(target)
            await states.until(lambda blocks=blocks: device.geometry.block_count == blocks)  # type: ignore[misc]
        assert states.seen == []
        assert device.counters.reconnects == 0


async def test_a_controller_without_the_log_is_looked_at_all_the_same() -> None:
    refusals = Refusals(AdminOpcode.GET_LOG_PAGE, Status.INVALID_LOG_PAGE, final=True)
    async with connected(Script(on_command=refusals)) as (target, device):
        states = States(device)
        refusals.left = 1
        target.size_blocks *= 2
        await event(target)
        await states.until(lambda: device.geometry.block_count == target.size_blocks)
        assert states.seen == []


@pytest.mark.parametrize("status", [Status.ASYNC_EVENT_LIMIT_EXCEEDED, Status.ABORT_REQUESTED])
async def test_a_request_for_events_that_is_refused_is_made_again(
    monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    monkeypatch.setattr("xkv_nvmeof.initiator_association._EVENT_REFUSED_PAUSE_S", 0.01)
    refusals = Refusals(AdminOpcode.ASYNC_EVENT_REQUEST, status)
    refusals.left = 2
    async with connected(Script(on_command=refusals)) as (target, device):
        states = States(device)
        target.size_blocks *= 2
        await event(target)
        await states.until(lambda: device.geometry.block_count == target.size_blocks)
        assert device.state is DeviceState.ONLINE


@pytest.mark.parametrize("what", ["not there", "another one", "rubbish"])
async def test_a_namespace_that_returns_without_a_word_is_found(what: str) -> None:
    rubbish: list[bool] = []

    def say(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid or entry.opcode != AdminOpcode.IDENTIFY or not rubbish:
            return None
        return [conn.data(entry.cid, 0, b"\xff" * 4096, last=True), conn.response(entry.cid)]

    async with connected(Script(on_command=say)) as (target, device):
        states = States(device)
        blocks, uuid = target.size_blocks, target.script.uuid
        match what:
            case "not there":
                target.size_blocks = 0
            case "another one":
                target.script.uuid = b"\x77" * 16
            case _:
                rubbish.append(True)
        for _ in range(3):
            await event(target)
        await states.until(lambda: device.state is DeviceState.OFFLINE)
        target.size_blocks, target.script.uuid = blocks, uuid
        rubbish.clear()
        await states.until(lambda: device.state is DeviceState.ONLINE)
        assert device.counters.reconnects == 0
