"""Deadlines, keep-alive, reconnection, identity, namespace events, cancellation and the orderly end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.ports import held_port
from xkv_nvmeof import initiator_socket
from xkv_nvmeof.blockdev import DeviceOffline, DeviceState, OutcomeUnknown
from xkv_nvmeof.initiator import TargetAddress, TcpInitiator
from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectRefused, ConnectUnanswered, NamespaceUnusable
from xkv_nvmeof.spec import AdminOpcode, FabricsType, IoOpcode, Status

from .fake_target import BLOCK, HANG_S, NQN, FakeConnection, FakeTarget, Script
from .hosts import States, at_once, connect, connected, eventually, options, pattern, swallow

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry


def silent_identify(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
    return [] if conn.qid == 0 and entry.opcode == AdminOpcode.IDENTIFY else None


def silent_connect(_conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
    return [] if entry.opcode == AdminOpcode.FABRICS and entry.fabrics_type == FabricsType.CONNECT else None


@pytest.mark.parametrize(
    "script",
    [Script(answer_setup=False), Script(on_command=silent_connect), Script(on_command=silent_identify)],
    ids=["no ICResp", "no answer to Connect", "no answer to Identify"],
)
async def test_a_controller_that_falls_silent_while_connecting_is_given_up_in_time(script: Script) -> None:
    async with FakeTarget(script) as target:
        async with asyncio.timeout(HANG_S):
            with pytest.raises(ConnectUnanswered, match="no answer in time"):
                await connect(target.port, connect_timeout_ms=200)
        await target.until(lambda: not target.connections)


async def test_nobody_listening_is_said_with_the_address() -> None:
    with held_port() as port, pytest.raises(ConnectUnanswered, match=f"127.0.0.1:{port} .*TCP connect"):
        await connect(port)


async def test_a_name_is_tried_by_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def look_up(host: str, port: int) -> list[tuple[object, ...]]:
        asked.append(host)
        # The first of them is no address of this machine's network; nobody listens at the second.
        places = ("203.0.113.1", "127.0.0.9", "127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, port)) for place in places]

    monkeypatch.setattr(initiator_socket, "look_up", look_up)
    async with FakeTarget() as target:
        address = TargetAddress("card.example", target.port, NQN)
        settings = options(io_queues=1, admits=lambda ip: ip.startswith("127."))
        device = await TcpInitiator.connect(address, settings, clock=time.monotonic_ns, entropy=bytes)
        assert device.state is DeviceState.ONLINE
        assert asked == ["card.example"] * 2
        await device.aclose()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status.CONNECT_INVALID_HOST, "does not allow this host"),
        (Status.CONNECT_INVALID_PARAMETERS, "no such subsystem"),
    ],
)
async def test_a_refused_connect_keeps_its_status(status: Status, text: str) -> None:
    async with FakeTarget(Script(on_connect=lambda _command, _data: status)) as target:
        with pytest.raises(ConnectRefused, match=text) as caught:
            await connect(target.port)
        assert caught.value.status == status


async def test_a_controller_that_has_no_room_may_have_some_in_a_moment() -> None:
    left = [Status.CONNECT_CONTROLLER_BUSY]
    async with FakeTarget(Script(on_connect=lambda _command, _data: left.pop() if left else 0)) as target:
        with pytest.raises(ConnectUnanswered, match="no room for another connection"):
            await connect(target.port)
        await (await connect(target.port)).aclose()


async def test_a_controller_that_wants_authentication_is_refused_with_that_reason() -> None:
    def wants(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        connect_it = entry.opcode == AdminOpcode.FABRICS and entry.fabrics_type == FabricsType.CONNECT
        return [conn.response(entry.cid, 0, 1 << 17 | 5)] if connect_it else None

    async with FakeTarget(Script(on_command=wants)) as target:
        with pytest.raises(ConnectFailed, match="authentication"):
            await connect(target.port)


async def test_a_namespace_that_is_not_there_is_said() -> None:
    async with FakeTarget() as target:
        target.size_blocks = 0
        with pytest.raises(NamespaceUnusable, match="does not exist"):
            await connect(target.port)


async def test_a_swallowed_write_ends_the_association_at_its_deadline() -> None:
    script = Script(on_command=swallow(qid=1, opcode=IoOpcode.WRITE))
    async with connected(script, io_queues=1, command_timeout_ms=200) as (target, device):
        states = States(device)
        started_ns = time.monotonic_ns()
        async with asyncio.timeout(HANG_S):
            with pytest.raises(OutcomeUnknown) as caught:
                await device.write_from(0, [memoryview(pattern(BLOCK))])
        assert caught.value.settles_at_ns >= started_ns + 11_000_000_000
        assert device.settles_at_ns == caught.value.settles_at_ns
        await states.until(lambda: device.state is DeviceState.OFFLINE)
        target.stop_listening()


async def test_the_keep_alive_time_that_the_controller_rounds_up_counts_for_settling() -> None:
    script = Script(on_command=swallow(qid=1, opcode=IoOpcode.WRITE), keep_alive_ms=30_000)
    async with connected(script, io_queues=1, command_timeout_ms=100, keep_alive_ms=5_000) as (
        _target,
        device,
    ):
        started_ns = time.monotonic_ns()
        with pytest.raises(OutcomeUnknown) as caught:
            await device.write_from(0, [memoryview(pattern(BLOCK))])
        assert caught.value.settles_at_ns >= started_ns + 31_000_000_000


async def test_a_controller_that_never_lets_go_of_a_lost_host_is_refused() -> None:
    async with FakeTarget(Script(keep_alive_ms=0xFFFF_FFFF)) as target:
        with pytest.raises(ConnectFailed, match=r"4294967 s \(KATO\)"):
            await connect(target.port)


async def test_unanswered_keep_alives_end_the_association() -> None:
    script = Script(on_command=swallow(qid=0, opcode=AdminOpcode.KEEP_ALIVE))
    async with connected(script, keep_alive_ms=150) as (target, device):
        states = States(device)
        await states.until(lambda: bool(states.seen))
        assert states.seen[0][0] is DeviceState.OFFLINE
        target.stop_listening()


async def test_keep_alive_goes_on_while_the_data_path_is_saturated() -> None:
    async with connected(keep_alive_ms=6_000) as (target, device):

        def beats() -> int:
            return sum(
                entry.opcode == AdminOpcode.KEEP_ALIVE for qid, entry in target.seen.commands if qid == 0
            )

        async def load() -> None:
            buffer = [memoryview(bytearray(128 * 1024))]
            while beats() < 2:
                await device.read_into(0, buffer)

        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(load() for _ in range(16)))
        assert device.counters.reconnects == 0


async def test_a_host_that_was_stopped_too_long_rebuilds_its_association() -> None:
    leap_ns = [0]
    async with FakeTarget() as target:
        device = await TcpInitiator.connect(
            TargetAddress("127.0.0.1", target.port, "nqn.2026-01.org.example:fake"),
            options(keep_alive_ms=600),
            clock=lambda: time.monotonic_ns() + leap_ns[0],
            entropy=bytes,
        )
        states = States(device)
        leap_ns[0] = 20_000_000_000
        await states.until(lambda: len(states.seen) >= 2)
        assert [state for state, _ in states.seen[:2]] == [DeviceState.OFFLINE, DeviceState.ONLINE]
        await device.aclose()


async def test_while_offline_every_call_is_refused_at_once_and_the_log_stays_calm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with connected(reconnect_delay_min_ms=1, reconnect_delay_max_ms=2) as (target, device):
        states = States(device)
        target.stop_listening()
        for connection in list(target.connections):
            connection.drop()
        await states.until(lambda: device.state is DeviceState.OFFLINE)
        for call in (
            device.read_into(0, [memoryview(bytearray(BLOCK))]),
            device.write_from(0, [memoryview(bytearray(BLOCK))]),
            device.flush(),
        ):
            with pytest.raises(DeviceOffline):
                at_once(call)
        await eventually(lambda: "TCP connect" in device.reason)
        assert len(caplog.records) < 5


async def test_the_device_follows_its_target_to_another_port() -> None:
    late_ms = 60_000
    async with (
        FakeTarget() as second,
        connected(reconnect_delay_min_ms=late_ms, reconnect_delay_max_ms=late_ms) as (first, device),
    ):
        states = States(device)
        first.stop_listening()
        for connection in list(first.connections):
            connection.drop()
        await states.until(lambda: device.state is DeviceState.OFFLINE)
        device.retarget("127.0.0.1", second.port)
        await states.until(lambda: device.state is DeviceState.ONLINE)
        await device.write_from(0, [memoryview(pattern(BLOCK))])
        assert second.store[:BLOCK] == pattern(BLOCK)


@pytest.mark.parametrize("field", ["nguid", "uuid"])
async def test_another_namespace_keeps_the_device_offline(field: str) -> None:
    async with connected() as (target, device):
        states = States(device)
        before = device.identity
        setattr(target.script, field, b"\x77" * 16)
        for connection in list(target.connections):
            connection.drop()
        await eventually(lambda: f"another namespace answers: {field}" in device.reason)
        assert [state for state, _ in states.seen] == [DeviceState.OFFLINE]
        assert device.identity == before
        with pytest.raises(DeviceOffline, match="another namespace"):
            await device.flush()
        setattr(target.script, field, getattr(before, field))
        await states.until(lambda: device.state is DeviceState.ONLINE)


async def test_growth_shrink_removal_and_return_are_all_noticed() -> None:
    async with connected() as (target, device):
        states = States(device)
        sizes: list[tuple[int, int]] = []
        device.add_geometry_listener(lambda before, now: sizes.append((before.block_count, now.block_count)))
        first = target.size_blocks
        sizes_in_order = (first * 2, first * 3, first, first // 2)
        for blocks in sizes_in_order:
            target.size_blocks = blocks
            await target.until(lambda: bool(target.connection_of(0).event_cids))
            target.connection_of(0).namespace_event()
            await states.until(lambda blocks=blocks: device.geometry.block_count == blocks)  # type: ignore[misc]
        assert sizes == list(itertools.pairwise((first, *sizes_in_order)))
        logs = [
            entry
            for qid, entry in target.seen.commands
            if qid == 0 and entry.opcode == AdminOpcode.GET_LOG_PAGE
        ]
        assert [entry.cdw10 & 0xFF for entry in logs] == [4, 4, 4, 4]
        assert states.seen == []
        await target.until(lambda: bool(target.connection_of(0).event_cids))
        assert [len(conn.event_cids) for conn in target.connections if conn.qid == 0] == [1]


@pytest.mark.parametrize("event", [0x0004_0002, 0x000C_0302, 0x0001_0000, 0x00FF_0007])
async def test_a_controller_with_events_without_end_does_not_keep_the_host_busy(event: int) -> None:
    asked_ns: list[int] = []

    def storm(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid or entry.opcode != AdminOpcode.ASYNC_EVENT_REQUEST:
            return None
        asked_ns.append(time.monotonic_ns())
        return [conn.response(entry.cid, 0, event)]

    async with connected(Script(on_command=storm)) as (target, device):
        await target.until(lambda: len(asked_ns) > 5)
        assert asked_ns[5] - asked_ns[0] >= 200_000_000
        assert device.state is DeviceState.ONLINE


async def test_a_namespace_that_is_gone_is_offline_until_it_is_back() -> None:
    async with connected() as (target, device):
        states = States(device)
        first = target.size_blocks

        async def becomes(blocks: int, state: DeviceState) -> None:
            target.size_blocks = blocks
            await target.until(lambda: bool(target.connection_of(0).event_cids))
            target.connection_of(0).namespace_event()
            await states.until(lambda: device.state is state)

        await becomes(0, DeviceState.OFFLINE)
        with pytest.raises(DeviceOffline, match="does not exist"):
            await device.read_into(0, [memoryview(bytearray(BLOCK))])
        assert not [entry for qid, entry in target.seen.commands if qid]
        assert device.geometry.block_count == first
        await becomes(first, DeviceState.ONLINE)
        await device.read_into(0, [memoryview(bytearray(BLOCK))])
        assert device.counters.reconnects == 0


async def test_a_namespace_that_returns_as_another_one_stays_offline() -> None:
    async with connected() as (target, device):
        states = States(device)
        first, uuid = target.size_blocks, target.script.uuid
        for blocks, found, state in (
            (0, uuid, DeviceState.OFFLINE),
            (first, b"\x77" * 16, DeviceState.OFFLINE),
            (first, uuid, DeviceState.ONLINE),
        ):
            target.size_blocks, target.script.uuid = blocks, found
            await target.until(lambda: bool(target.connection_of(0).event_cids))
            target.connection_of(0).namespace_event()
            if found != uuid:
                await eventually(lambda: "another namespace answers: uuid" in device.reason)
            await states.until(lambda state=state: device.state is state)  # type: ignore[misc]
        assert len(states.seen) == 2


async def test_a_namespace_that_shrank_or_grew_while_it_was_away_has_its_new_size() -> None:
    async with connected() as (target, device):
        states = States(device)
        first = target.size_blocks
        for blocks in (first - 1, first + 1):
            target.size_blocks = blocks
            for connection in list(target.connections):
                connection.drop()
            await states.until(lambda blocks=blocks: device.geometry.block_count == blocks)  # type: ignore[misc]
            await states.until(lambda: device.state is DeviceState.ONLINE)
