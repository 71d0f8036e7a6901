"""Transfers respect what the controller said: in-capsule room, MDTS with its page size, MAXH2CDATA, MQES."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from xkv_nvmeof.blockdev import ByteRange, CommandFailed
from xkv_nvmeof.initiator_errors import ConnectFailed, DeviceBusy
from xkv_nvmeof.spec import IoOpcode

from .fake_target import BLOCK, FakeConnection, FakeTarget, Script
from .hosts import connect, connected, pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_nvmeof.command import SubmissionEntry

KIB = 1024


@pytest.mark.parametrize("in_capsule", [0, 4096, 8192])
@pytest.mark.parametrize("mdts", [0, 3, 5])
async def test_what_is_written_comes_back_at_every_size(in_capsule: int, mdts: int) -> None:
    limit = 4096 << mdts if mdts else 0
    script = Script(in_capsule_bytes=in_capsule, mdts=mdts, store_bytes=2 << 20)
    base = limit or 64 * KIB
    sizes = {BLOCK, in_capsule or BLOCK, in_capsule + BLOCK, base - BLOCK, base, base + BLOCK, 10 * base}
    async with connected(script) as (target, device):
        for size in sorted(sizes):
            payload, found = pattern(size, seed=size), bytearray(size)
            await device.write_from(BLOCK, [memoryview(payload)])
            await device.read_into(BLOCK, [memoryview(found)])
            assert found == payload == target.store[BLOCK : BLOCK + size], size
        lengths = [entry.sgl.length_bytes for qid, entry in target.seen.commands if qid]
        assert max(lengths) == (limit or 10 * base)
        assert max(target.seen.capsule_data_bytes) <= in_capsule
        assert max(target.seen.data_pdu_bytes) <= script.max_h2c_data_bytes
        if in_capsule:
            assert in_capsule in target.seen.capsule_data_bytes


async def test_where_data_in_a_capsule_would_begin_elsewhere_none_is_put_there() -> None:
    async with connected(Script(in_capsule_offset_units=4)) as (target, device):
        payload = pattern(BLOCK)
        await device.write_from(0, [memoryview(payload)])
        assert target.store[:BLOCK] == payload
        assert max(target.seen.capsule_data_bytes) == 0


@pytest.mark.parametrize("blocks", [1, 20, 200])
async def test_the_callers_memory_is_its_own_again_at_the_end_of_a_call(blocks: int) -> None:
    """Not only once the collector has been there: a region that is to be unmapped does not wait for it."""
    async with connected(Script(in_capsule_bytes=BLOCK, mdts=3)) as (_target, device):
        gc.disable()
        try:
            for transfer in (device.write_from, device.read_into):
                memory = bytearray(blocks * BLOCK)
                await transfer(0, [memoryview(memory)])
                # Refused with a BufferError while there is a view of it.
                memory.append(0)
        finally:
            gc.enable()


async def test_mdts_counts_the_controllers_own_pages() -> None:
    async with connected(Script(mdts=2, min_page_bytes=16 * KIB)) as (_target, device):
        assert device.geometry.preferred_io_bytes == 64 * KIB


async def test_data_pdus_stay_below_maxh2cdata() -> None:
    script = Script(in_capsule_bytes=0, max_h2c_data_bytes=4096, mdts=0, grant_data_digest=True)
    async with connected(script, data_digest="preferred") as (target, device):
        payload = pattern(10_240)
        await device.write_from(0, [memoryview(payload)[:100], memoryview(payload)[100:]])
        assert target.store[:10_240] == payload
        assert target.seen.data_pdu_bytes == [4096, 4096, 2048]


async def test_the_queue_is_no_deeper_than_mqes_and_what_does_not_fit_waits_its_turn() -> None:
    held: list[tuple[FakeConnection, SubmissionEntry]] = []

    def hold(conn: FakeConnection, entry: SubmissionEntry) -> Sequence[bytes] | None:
        if conn.qid <= 0:
            return None
        held.append((conn, entry))
        return []

    async with connected(Script(max_queue_entries=7, on_command=hold), max_waiting_calls=5, io_queues=1) as (
        target,
        device,
    ):
        assert device.negotiated is not None
        assert device.negotiated.queue_entries == 7
        buffers = [bytearray(BLOCK) for _ in range(11)]
        calls = [
            asyncio.ensure_future(device.read_into(index * BLOCK, [memoryview(buffer)]))
            for index, buffer in enumerate(buffers)
        ]
        await target.until(lambda: len(held) == 6)
        with pytest.raises(DeviceBusy):
            await device.read_into(0, [memoryview(bytearray(BLOCK))])
        order: list[int] = []
        while len(order) < 11:
            await target.until(lambda: bool(held))
            conn, entry = held.pop(0)
            order.append(entry.cdw10)
            conn.answer_read(entry, conn.stored(entry))
        await asyncio.gather(*calls)
        assert order == list(range(11))


@pytest.mark.parametrize(("flow_control", "success"), [(False, False), (False, True), (True, False)])
async def test_many_commands_at_once_all_get_their_own_data(flow_control: bool, success: bool) -> None:
    script = Script(store_bytes=1 << 20, use_success_flag=success, max_queue_entries=16)
    async with connected(script, sq_flow_control=flow_control, io_queues=1) as (target, device):
        target.store[:] = pattern(len(target.store))
        buffers = [bytearray(1024) for _ in range(300)]
        await asyncio.gather(
            *(device.read_into(index * 1024, [memoryview(buffer)]) for index, buffer in enumerate(buffers))
        )
        assert b"".join(buffers) == target.store[: 300 * 1024]


async def test_ranges_beyond_the_end_are_refused_without_asking() -> None:
    async with connected() as (target, device):
        before = len(target.seen.commands)
        with pytest.raises(CommandFailed) as caught:
            await device.read_into(device.geometry.size_bytes, [memoryview(bytearray(BLOCK))])
        assert (caught.value.status_code_type, caught.value.status_code) == (0, 0x80)
        with pytest.raises(CommandFailed):
            await device.deallocate([ByteRange(0, BLOCK), ByteRange(device.geometry.size_bytes, BLOCK)])
        assert len(target.seen.commands) == before


async def test_deallocate_sends_at_most_256_ranges_a_command() -> None:
    async with connected(io_queues=1) as (target, device):
        await device.deallocate([ByteRange(index * BLOCK, BLOCK) for index in range(600)])
        counts = [
            e.cdw10 + 1 for qid, e in target.seen.commands if qid and e.opcode == IoOpcode.DATASET_MANAGEMENT
        ]
        assert counts == [256, 256, 88]


async def test_flush_is_sent_only_where_there_is_a_cache() -> None:
    for cache in (0, 1):
        async with connected(Script(volatile_write_cache=cache)) as (target, device):
            await device.flush()
            sent = [e for qid, e in target.seen.commands if qid and e.opcode == IoOpcode.FLUSH]
            assert len(sent) == device.counters.flush_commands == cache


async def test_commands_that_the_controller_does_not_know_are_not_sent() -> None:
    async with connected(Script(nvm_commands=0)) as (_target, device):
        assert not device.geometry.can_deallocate
        assert not device.geometry.can_write_zeroes
        for call in (device.deallocate([ByteRange(0, BLOCK)]), device.write_zeroes(ByteRange(0, BLOCK))):
            with pytest.raises(CommandFailed) as caught:
                await call
            assert caught.value.status_code == 1


@pytest.mark.parametrize(("asked", "granted", "used"), [(4, 64, 4), (4, 2, 2), (1, 64, 1), (2, 1, 1)])
async def test_the_granted_queues_are_used(asked: int, granted: int, used: int) -> None:
    async with connected(Script(granted_queues=granted), io_queues=asked) as (target, device):
        assert device.queues_granted == used
        qids = [command.qid for command, _ in target.seen.connects]
        assert qids == list(range(used + 1))


async def test_every_queue_connects_with_the_same_host_and_controller() -> None:
    async with connected(io_queues=3) as (target, _device):
        admin, *others = target.seen.connects
        assert admin[1].cntlid == 0xFFFF
        assert admin[0].kato_ms == 10_000
        for command, data in others:
            assert (data.hostnqn, data.hostid, data.subnqn) == (
                admin[1].hostnqn,
                admin[1].hostid,
                admin[1].subnqn,
            )
            assert data.cntlid == 5
            assert command.kato_ms == 0
            assert command.attributes == 4


async def test_a_refused_second_queue_is_done_without() -> None:
    script = Script(on_connect=lambda command, _data: 0x182 if command.qid > 1 else 0)
    async with connected(script, io_queues=3) as (target, device):
        assert device.queues_granted == 1
        await target.until(lambda: len(target.connections) == 2)
        await device.read_into(0, [memoryview(bytearray(BLOCK))])
        assert device.counters.reconnects == 0


async def test_queues_without_room_for_a_command_are_a_clear_failure() -> None:
    async with FakeTarget(Script(max_queue_entries=1)) as target:
        with pytest.raises(ConnectFailed, match="queues of one entry"):
            await connect(target.port)


@pytest.mark.parametrize("how", ["feature refused", "connect refused"])
async def test_no_io_queue_at_all_is_a_clear_failure(how: str) -> None:
    def refuse(conn: FakeConnection, entry: SubmissionEntry) -> Sequence[bytes] | None:
        if conn.qid == 0 and entry.opcode == 9 and entry.cdw10 == 7:
            return [conn.response(entry.cid, 6)]
        return None

    script = Script(on_command=refuse) if how == "feature refused" else Script()
    script.on_connect = lambda command, _data: 0x181 if command.qid else 0
    async with FakeTarget(script) as target:
        with pytest.raises(ConnectFailed, match="no I/O queue"):
            await connect(target.port)


async def test_larger_writes_share_a_queue_up_to_a_bound_and_reads_and_small_writes_spread() -> None:
    script = Script(store_bytes=4 << 20, mdts=0)

    def queues(target: FakeTarget) -> list[int]:
        used = [qid for qid, entry in target.seen.commands if qid and entry.opcode != IoOpcode.FLUSH]
        target.seen.commands.clear()
        return used

    async with connected(script, io_queues=2) as (target, device):
        target.seen.commands.clear()
        large, small = memoryview(bytearray(512 * KIB)), memoryview(bytearray(4 * KIB))
        await asyncio.gather(*(device.write_from(at * len(large), [large]) for at in range(5)))
        # Two fill the share of the first queue; from then on it goes by what is queued.
        assert sorted(queues(target)) == [1, 1, 1, 2, 2]
        await asyncio.gather(*(device.write_from(at * len(small), [small]) for at in range(4)))
        assert sorted(queues(target)) == [1, 1, 2, 2]
        await asyncio.gather(*(device.read_into(at * len(small), [small]) for at in range(4)))
        assert sorted(queues(target)) == [1, 1, 2, 2]
