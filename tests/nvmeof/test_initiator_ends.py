"""Cancelled calls, the orderly end, and settings that are refused."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any

import pytest

from xkv_nvmeof.blockdev import DeviceOffline, DeviceState
from xkv_nvmeof.initiator import InitiatorOptions, TargetAddress
from xkv_nvmeof.spec import AdminOpcode, IoOpcode, Register

from .fake_target import BLOCK, HANG_S, FakeConnection, Script
from .hosts import HOST_ID, HOST_NQN, States, connected, eventually, pattern, swallow

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry


async def test_a_cancelled_read_never_touches_its_buffer_again() -> None:
    held: list[SubmissionEntry] = []

    def hold(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid <= 0 or entry.opcode != IoOpcode.READ or held:
            return None
        held.append(entry)
        return [conn.data(entry.cid, 0, b"\xff" * 1024)[:500]]

    async with connected(Script(on_command=hold), io_queues=1) as (target, device):
        target.store[:] = b"\xff" * len(target.store)
        buffer = bytearray(2048)
        call = asyncio.ensure_future(device.read_into(0, [memoryview(buffer)]))
        await eventually(lambda: any(buffer))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        buffer[:] = bytes(2048)
        conn, entry = target.connection_of(1), held[0]
        conn.send(
            conn.data(entry.cid, 0, b"\xff" * 1024)[500:],
            conn.data(entry.cid, 1024, b"\xff" * 1024, last=True),
        )
        conn.send(conn.response(entry.cid))
        other = bytearray(2048)
        await device.read_into(0, [memoryview(other)])
        assert not any(buffer)
        assert other == target.store[:2048]
        assert device.counters.reconnects == 0


async def test_a_cancelled_read_whose_connection_ends_later_is_nobodys_error() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    async with connected(Script(on_command=swallow(qid=1, opcode=IoOpcode.READ)), io_queues=1) as (
        target,
        device,
    ):
        states = States(device)
        reading = asyncio.create_task(device.read_into(0, [memoryview(bytearray(512))]))
        await target.until(
            lambda: any(entry.opcode == IoOpcode.READ for _, entry in target.seen.commands[-1:])
        )
        reading.cancel()
        await asyncio.wait((reading,))
        target.connection_of(1).drop()
        await states.until(lambda: bool(states.seen))
        del reading
        gc.collect()
    assert complaints == []


async def test_a_cancelled_read_is_not_repeated_for_its_digest() -> None:
    held: list[SubmissionEntry] = []

    def hold(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid <= 0 or entry.opcode != IoOpcode.READ or held:
            return None
        held.append(entry)
        return []

    script = Script(on_command=hold, grant_data_digest=True)
    async with connected(script, io_queues=1, data_digest="required") as (target, device):
        target.store[:] = b"\xff" * len(target.store)
        buffer = bytearray(BLOCK)
        call = asyncio.ensure_future(device.read_into(0, [memoryview(buffer)]))
        await target.until(lambda: bool(held))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        conn, cid = target.connection_of(1), held[0].cid
        conn.send(conn.data(cid, 0, b"\xff" * BLOCK, last=True, flip=True), conn.response(cid))
        await device.read_into(BLOCK, [memoryview(bytearray(BLOCK))])
        reads = [entry for qid, entry in target.seen.commands if qid and entry.opcode == IoOpcode.READ]
        assert len(reads) == 2
        assert not any(buffer)


async def test_a_cancelled_write_concludes_first() -> None:
    held: list[SubmissionEntry] = []

    def hold(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid <= 0 or entry.opcode != IoOpcode.WRITE:
            return None
        held.append(entry)
        return []

    async with connected(Script(on_command=hold), io_queues=1) as (target, device):
        call = asyncio.ensure_future(device.write_from(0, [memoryview(pattern(BLOCK))]))
        await target.until(lambda: bool(held))
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        conn = target.connection_of(1)
        conn.send(conn.response(held[0].cid))
        with pytest.raises(asyncio.CancelledError):
            await call
        assert device.state is DeviceState.ONLINE


async def test_a_cancelled_write_that_does_not_conclude_ends_its_association() -> None:
    script = Script(on_command=swallow(qid=1, opcode=IoOpcode.WRITE))
    async with connected(script, io_queues=1, cancel_grace_ms=50) as (target, device):
        call = asyncio.ensure_future(device.write_from(0, [memoryview(pattern(BLOCK))]))
        await target.until(
            lambda: any(entry.opcode == IoOpcode.WRITE for qid, entry in target.seen.commands if qid)
        )
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert device.settles_at_ns > time.monotonic_ns()


async def test_closing_tells_the_controller_and_is_done_once() -> None:
    async with connected() as (target, device):
        await device.aclose()
        await device.aclose()
        sets = [
            entry.cdw12 >> 14 & 3
            for qid, entry in target.seen.commands
            if qid == 0 and entry.opcode == AdminOpcode.FABRICS and entry.cdw11 == Register.CC
        ]
        assert sets == [0, 1]
        await target.until(lambda: not target.connections)
        with pytest.raises(DeviceOffline):
            await device.flush()


async def test_closing_does_not_wait_for_a_silent_controller() -> None:
    def silent(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        shutdown = (
            entry.opcode == AdminOpcode.FABRICS and entry.cdw11 == Register.CC and entry.cdw12 >> 14 & 3
        )
        return [] if conn.qid == 0 and shutdown else None

    async with connected(Script(on_command=silent), close_timeout_ms=50, command_timeout_ms=600_000) as (
        _target,
        device,
    ):
        async with asyncio.timeout(HANG_S):
            await device.aclose()
        assert device.state is DeviceState.OFFLINE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_nqn", ""),
        ("host_nqn", "n" * 224),
        ("host_nqn", "nqn with space"),
        ("host_id", bytes(16)),
        ("host_id", b"short"),
        ("io_queues", 0),
        ("queue_depth", 0),
        ("keep_alive_ms", 0),
        ("command_timeout_ms", -1),
        ("header_digest", "maybe"),
        ("data_digest", "ON"),
        ("reconnect_delay_max_ms", 1),
    ],
)
def test_a_bad_option_is_refused_by_name(field: str, value: object) -> None:
    fields: dict[str, object] = {"host_nqn": HOST_NQN, "host_id": HOST_ID}
    with pytest.raises(ValueError, match=field):
        InitiatorOptions(**(fields | {field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("host", ""), ("port", 0), ("port", 65_536), ("nqn", "a b"), ("nsid", 0), ("nsid", 2**32 - 1)],
)
def test_a_bad_address_is_refused_by_name(field: str, value: object) -> None:
    fields: dict[str, object] = {"host": "::1", "port": 4420, "nqn": "nqn.x", "nsid": 1}
    with pytest.raises(ValueError, match=field):
        TargetAddress(**(fields | {field: value}))  # type: ignore[arg-type]
