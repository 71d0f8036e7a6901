"""Several paths to one namespace: which are used, what goes again when one is lost, and what must wait then."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nvmeof.card_process import CardProcess, running_card
from tests.nvmeof.fake_target import BLOCK, NQN, FakeConnection, FakeTarget, Script
from tests.nvmeof.hosts import States, eventually, options, pattern, swallow
from tests.nvmeof.relay import Relay
from xkv_nvmeof.blockdev import ByteRange, CommandFailed, DeviceOffline, DeviceState, OutcomeUnknown
from xkv_nvmeof.command import BlockRange
from xkv_nvmeof.host_command import Exchange
from xkv_nvmeof.initiator import TargetAddress, TcpInitiator
from xkv_nvmeof.initiator_calls import deallocations, flush, transfers, zeroing
from xkv_nvmeof.initiator_errors import ConnectFailed
from xkv_nvmeof.logpages import AccessGroup, LogFormatError, decode_access_log, encode_access_log
from xkv_nvmeof.multipath import Access, Blocks, Echoes, changes, choose, speaks_of_the_path
from xkv_nvmeof.spec import AdminOpcode, IoOpcode, Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from xkv_nvmeof.command import SubmissionEntry

MIB = 1 << 20


async def connect(*ports: int, nqn: str = NQN, **changed: Any) -> TcpInitiator:
    return await TcpInitiator.connect(
        TargetAddress("127.0.0.1", ports[0], nqn),
        options(**changed),
        clock=time.monotonic_ns,
        entropy=os.urandom,
        portals=[("127.0.0.1", port) for port in ports[1:]],
    )


# ---- the rules ---------------------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(0, 7), st.sampled_from(list(Access))))
def test_only_the_best_paths_that_give_access_are_used(paths: dict[int, Access]) -> None:
    chosen = choose(paths)
    best = min((access for access in paths.values() if access <= Access.NON_OPTIMIZED), default=None)
    assert set(chosen) == {path for path, access in paths.items() if access is best}


def exchange_of(commands: Iterator[Exchange]) -> Exchange:
    return next(commands)


def test_what_a_command_changes_is_read_from_its_entry() -> None:
    data = [memoryview(bytes(8192))]
    assert changes(exchange_of(transfers(IoOpcode.WRITE, 1, 4096, 40960, data, 8192, 8192))) == [
        Blocks(10, 12)
    ]
    assert changes(exchange_of(transfers(IoOpcode.READ, 1, 4096, 40960, data, 8192, 8192))) == []
    assert changes(exchange_of(zeroing(1, 7, 3, 100))) == [Blocks(7, 10)]
    assert changes(flush(1)) == []
    trimmed = deallocations(1, [BlockRange(1, 2), BlockRange(9, 1)], 256)
    assert changes(exchange_of(trimmed)) == [Blocks(1, 3), Blocks(9, 10)]
    registers = Exchange(bytearray([IoOpcode.RESERVATION_REGISTER]) + bytearray(63))
    assert changes(registers) is None


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(1, 20)), max_size=8),
    st.integers(0, 30),
    st.integers(1, 5),
    st.integers(0, 20),
)
def test_echoes_hold_back_exactly_what_overlaps_them(
    lost: list[tuple[int, int, int]], first: int, count: int, now_ns: int
) -> None:
    echoes = Echoes()
    for start, length, settles_at_ns in lost:
        echoes.add([Blocks(start, start + length)], settles_at_ns)
    live = [one for one in lost if one[2] > now_ns]
    assert echoes.any(now_ns) == bool(live)
    mine = set(range(first, first + count))
    expected = max((at for start, length, at in live if mine & set(range(start, start + length))), default=0)
    assert echoes.settled_at_ns([Blocks(first, first + count)]) == expected


@pytest.mark.parametrize("status", list(Status))
def test_statuses_of_the_path_are_those_of_their_type(status: Status) -> None:
    assert speaks_of_the_path(status) == (status.code_type == 3)


def test_the_access_log_is_read_back_with_and_without_namespaces() -> None:
    groups = [AccessGroup(1, 2, 5), AccessGroup(7, 0xF)]
    for nsids in ((), (1, 2, 3)):
        log = encode_access_log(9, groups, nsids)
        assert decode_access_log(log + bytes(64)) == groups
        with pytest.raises(LogFormatError):
            decode_access_log(log[:-1] if not nsids else log[:40])


# ---- loss of a path ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def two_ways(**changed: Any) -> AsyncIterator[tuple[CardProcess, Relay, Relay, TcpInitiator]]:
    with running_card("--memory", "--size", "64MiB") as card:
        async with Relay(card.ready["port"]) as one, Relay(card.ready["port"]) as two:
            device = await connect(one.port, two.port, nqn=card.ready["nqn"], **changed)
            await eventually(lambda: all(path.connected for path in device.paths))
            yield card, one, two, device
            await device.aclose()


async def test_all_paths_are_used_and_counted() -> None:
    async with two_ways() as (_card, one, two, device):
        assert device.queues_granted == 4
        await asyncio.gather(*(device.write_from(at * MIB, [memoryview(bytes(MIB))]) for at in range(32)))
        assert min(one.passed_bytes, two.passed_bytes) > 4 * MIB
        assert device.counters.reconnects == 0


async def test_a_path_that_is_lost_in_the_middle_of_io_is_nobodys_error() -> None:
    async with two_ways() as (_card, one, two, device):
        states = States(device)
        random = Random(1)
        model = bytearray(16 * MIB)

        async def work(slot: int) -> None:
            for _round in range(12):
                data = random.randbytes(256 * 1024)
                at = slot * MIB + random.randrange(3) * 256 * 1024
                # Nothing is written twice within the life of an echo here: each round takes a new place or reads.
                if any(model[at : at + 16]):
                    found = bytearray(len(data))
                    await device.read_into(at, [memoryview(found)])
                    assert found == model[at : at + len(data)]
                    continue
                await device.write_from(at, [memoryview(data)])
                model[at : at + len(data)] = data
                await device.flush()

        tasks = [asyncio.create_task(work(slot)) for slot in range(16)]
        await eventually(lambda: one.passed_bytes > MIB)
        one.cut()
        await asyncio.gather(*tasks)
        assert states.seen == []
        assert [path.connected for path in device.paths] == [False, True]
        found = bytearray(16 * MIB)
        await device.read_into(0, [memoryview(found)])
        assert found == model
        await one.mend()
        await eventually(lambda: all(path.connected for path in device.paths))
        two.cut()
        await device.read_into(0, [memoryview(found)])
        assert found == model
        assert states.seen == []
        assert device.counters.errors == 0


async def test_a_path_that_falls_silent_is_left_in_time() -> None:
    async with two_ways(command_timeout_ms=2_000, keep_alive_ms=60_000) as (_card, one, _two, device):
        one.silence()
        data = pattern(64 * 1024)
        await asyncio.gather(*(device.write_from(at * 65536, [memoryview(data)]) for at in range(8)))
        assert device.state is DeviceState.ONLINE
        found = bytearray(len(data))
        await device.read_into(7 * 65536, [memoryview(found)])
        assert found == data


async def test_the_last_path_that_is_lost_takes_the_device_offline() -> None:
    async with two_ways() as (_card, one, two, device):
        states = States(device)
        one.cut()
        await eventually(lambda: not device.paths[0].connected)
        two.cut()
        await states.until(lambda: device.state is DeviceState.OFFLINE)
        with pytest.raises(DeviceOffline):
            await device.flush()
        await two.mend()
        await states.until(lambda: device.state is DeviceState.ONLINE)
        await device.flush()


async def test_one_address_that_is_dead_from_the_start_does_not_matter() -> None:
    async with FakeTarget() as dead, FakeTarget() as target:
        dead.stop_listening()
        device = await connect(dead.port, target.port)
        assert [path.connected for path in device.paths] == [False, True]
        await device.flush()
        await device.aclose()


async def test_only_dead_addresses_are_said_to_be_dead() -> None:
    async with FakeTarget() as one, FakeTarget() as two:
        one.stop_listening()
        two.stop_listening()
        with pytest.raises(ConnectFailed, match=f"127.0.0.1:{one.port}"):
            await connect(one.port, two.port)


async def test_a_path_to_another_namespace_is_never_used() -> None:
    async with FakeTarget() as right, FakeTarget(Script(uuid=b"\x33" * 16)) as wrong:
        device = await connect(right.port, wrong.port)
        await eventually(lambda: "another namespace answers: uuid" in device.paths[1].reason)
        await device.write_from(0, [memoryview(pattern(BLOCK))])
        assert not any(entry.opcode == IoOpcode.WRITE for _qid, entry in wrong.seen.commands)
        await device.aclose()


def test_addresses_are_few_and_different() -> None:
    address = TargetAddress("127.0.0.1", 4420, NQN)
    for portals in ([("127.0.0.1", 4420)], [("127.0.0.1", port) for port in range(1, 10)]):
        with pytest.raises(ValueError, match="addresses"):
            TcpInitiator(address, options(), time.monotonic_ns, os.urandom, portals)


# ---- what was lost may still arrive --------------------------------------------------------------------------------


@asynccontextmanager
async def one_swallows(**changed: Any) -> AsyncIterator[tuple[FakeTarget, FakeTarget, TcpInitiator]]:
    """Two controllers; the first swallows writes. Both are alone with their blocks, so that a test sees who got what."""
    script = Script(on_command=swallow(qid=1, opcode=IoOpcode.WRITE))
    async with FakeTarget(script) as first, FakeTarget() as second:
        device = await connect(first.port, second.port, io_queues=1, **changed)
        await eventually(lambda: all(path.connected for path in device.paths))
        yield first, second, device
        await device.aclose()


def writes(target: FakeTarget) -> int:
    return sum(entry.opcode == IoOpcode.WRITE for qid, entry in target.seen.commands if qid)


async def lose_a_write(first: FakeTarget, device: TcpInitiator) -> None:
    """Write the first block so that the first controller swallows it and is then lost."""
    other = asyncio.ensure_future(device.read_into(0, [memoryview(bytearray(BLOCK))]))
    calls = [asyncio.ensure_future(device.write_from(0, [memoryview(pattern(BLOCK))])) for _ in range(1)]
    while not writes(first):
        await asyncio.sleep(0)
        if calls[-1].done():
            calls.append(asyncio.ensure_future(device.write_from(0, [memoryview(pattern(BLOCK))])))
    for connection in list(first.connections):
        connection.drop()
    await asyncio.gather(other, *calls)


async def test_a_lost_write_goes_by_the_other_path_and_its_blocks_are_held_back_until_it_is_over() -> None:
    async with one_swallows(keep_alive_ms=10_000, command_timeout_ms=1_000) as (first, second, device):
        await lose_a_write(first, device)
        assert second.store[:BLOCK] == pattern(BLOCK)
        before = writes(second)
        with pytest.raises(OutcomeUnknown, match="may still arrive") as caught:
            await device.write_from(0, [memoryview(pattern(BLOCK, 2))])
        assert caught.value.settles_at_ns > time.monotonic_ns() + 5_000_000_000
        with pytest.raises(OutcomeUnknown):
            await device.write_zeroes(ByteRange(0, 4 * BLOCK))
        assert writes(second) == before
        await device.write_from(BLOCK, [memoryview(pattern(BLOCK, 3))])
        found = bytearray(2 * BLOCK)
        await device.read_into(0, [memoryview(found)])
        assert found == pattern(BLOCK) + pattern(BLOCK, 3)


async def test_what_is_held_back_goes_on_as_soon_as_the_lost_write_is_over() -> None:
    short = {"keep_alive_ms": 3_000, "settle_margin_ms": 100, "command_timeout_ms": 20_000}
    async with one_swallows(**short) as (first, second, device):
        await lose_a_write(first, device)
        settled_ns = device.settles_at_ns
        await device.write_from(0, [memoryview(pattern(BLOCK, 2))])
        assert time.monotonic_ns() >= settled_ns
        assert second.store[:BLOCK] == pattern(BLOCK, 2)


async def test_a_lost_write_without_another_path_is_of_unknown_outcome() -> None:
    async with one_swallows() as (first, second, device):
        second.stop_listening()
        for connection in list(second.connections):
            connection.drop()
        await eventually(lambda: not device.paths[1].connected)
        call = asyncio.ensure_future(device.write_from(0, [memoryview(pattern(BLOCK))]))
        await first.until(lambda: writes(first) > 0)
        first.stop_listening()
        for connection in list(first.connections):
            connection.drop()
        with pytest.raises(OutcomeUnknown):
            await call


# ---- access --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def two_portals() -> AsyncIterator[tuple[CardProcess, TcpInitiator]]:
    listen = ("--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0")
    with running_card("--memory", "--size", "64MiB", *listen, "--exit-with-stdin") as card:
        ports = [port for _host, port in card.ready["portals"]]
        device = await connect(*ports, nqn=card.ready["nqn"])
        await eventually(lambda: all(path.connected for path in device.paths))
        yield card, device
        await device.aclose()


async def test_io_follows_the_access_that_the_card_gives() -> None:
    async with two_portals() as (card, device):
        states = States(device)
        for first, second, state in (
            ("inaccessible", "optimized", DeviceState.ONLINE),
            ("non-optimized", "inaccessible", DeviceState.ONLINE),
            ("change", "persistent-loss", DeviceState.OFFLINE),
            ("change", "non-optimized", DeviceState.ONLINE),
            ("optimized", "optimized", DeviceState.ONLINE),
        ):
            for number, name in enumerate((first, second)):
                card.tell(f"access {number} {name}")
            wanted = [Access[name.upper().replace("-", "_")] for name in (first, second)]
            await eventually(lambda wanted=wanted: [path.access for path in device.paths] == wanted)  # type: ignore[misc]
            await states.until(lambda state=state: device.state is state)  # type: ignore[misc]
            if state is DeviceState.ONLINE:
                await device.write_from(0, [memoryview(bytes(4096))])
        assert device.counters.reconnects == 0


async def test_commands_that_a_path_refuses_go_by_the_other_without_an_error() -> None:
    async with two_portals() as (card, device):
        stop = asyncio.Event()

        async def load(slot: int) -> None:
            buffer = memoryview(bytearray(65536))
            while not stop.is_set():
                await device.write_from(slot * MIB, [buffer])
                await device.read_into(slot * MIB, [buffer])

        tasks = [asyncio.create_task(load(slot)) for slot in range(8)]
        for round_ in range(6):
            card.tell(f"access {round_ % 2} optimized")
            card.tell(f"access {1 - round_ % 2} inaccessible")
            await eventually(lambda n=1 - round_ % 2: device.paths[n].access is Access.INACCESSIBLE)  # type: ignore[misc]
        stop.set()
        await asyncio.gather(*tasks)
        assert device.counters.errors == 0


async def test_two_paths_that_refuse_everything_end_in_an_error_and_not_in_a_loop() -> None:
    def refuses(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        io = conn.qid > 0 and entry.opcode == IoOpcode.READ
        return [conn.response(entry.cid, Status.INTERNAL_PATH_ERROR)] if io else None

    async with FakeTarget(Script(on_command=refuses)) as one, FakeTarget(Script(on_command=refuses)) as two:
        device = await connect(one.port, two.port)
        await eventually(lambda: all(path.connected for path in device.paths))
        with pytest.raises((CommandFailed, DeviceOffline)):
            await device.read_into(0, [memoryview(bytearray(BLOCK))])
        reads = sum(
            entry.opcode == IoOpcode.READ
            for target in (one, two)
            for qid, entry in target.seen.commands
            if qid
        )
        assert reads <= 10
        await device.aclose()


async def test_a_controller_whose_access_log_is_rubbish_is_refused() -> None:
    def rubbish(conn: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        if conn.qid == 0 and entry.opcode == AdminOpcode.GET_LOG_PAGE and entry.cdw10 & 0xFF == 0x0C:
            size = entry.sgl.length_bytes
            return [conn.data(entry.cid, 0, b"\xff" * size, last=True), conn.response(entry.cid)]
        return None

    async with FakeTarget(Script(on_command=rubbish, multipath=8, access_group=1)) as target:
        with pytest.raises(ConnectFailed, match="asymmetric namespace access"):
            await connect(target.port)


async def test_a_device_that_is_closed_while_an_address_is_still_being_tried_leaves_nothing_behind() -> None:
    async with FakeTarget() as target, FakeTarget(Script(answer_setup=False)) as silent:
        for turns in range(4):
            device = await connect(target.port, silent.port)
            for _ in range(turns):
                await asyncio.sleep(0)
            await device.aclose()
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("nvme-tcp")]
        await target.until(lambda: not target.connections)
        await silent.until(lambda: not silent.connections)
