"""What a broken controller sends in answer to a read or a write, on real sockets: nothing wrong ever reaches the caller.

Right means: the command fails, or succeeds bit-exact; the connection that lost its step is dropped, told why with a
TermReq; the buffer of a read that returned has every byte; and the device comes back by itself.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from xkv_nvmeof.blockdev import CommandFailed, DataCorrupted, DeviceOffline, DeviceState, OutcomeUnknown
from xkv_nvmeof.initiator_errors import ConnectFailed
from xkv_nvmeof.pdu import C2HTermReq, FatalStatus, encode
from xkv_nvmeof.spec import IoOpcode, Status

from .broken import BAD_READS, BAD_WRITES, Answer, changed
from .fake_target import BLOCK, HANG_S, FakeConnection, FakeTarget, Script
from .hosts import at_once, connect, connected, pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.initiator import TcpInitiator

SIZE = 2048


def once(
    opcode: IoOpcode, answer: Answer
) -> Callable[[FakeConnection, SubmissionEntry], Sequence[bytes] | None]:
    """Answer the first I/O command of that kind by hand, and the others as usual."""
    left = [answer]

    def hook(conn: FakeConnection, entry: SubmissionEntry) -> Sequence[bytes] | None:
        if conn.qid <= 0 or entry.opcode != opcode or not left:
            return None
        return left.pop()(conn, entry, conn.stored(entry))

    return hook


async def back_online(device: TcpInitiator) -> None:
    online = asyncio.Event()
    device.add_state_listener(lambda state, _reason: online.set() if state is DeviceState.ONLINE else None)
    async with asyncio.timeout(HANG_S):
        while device.state is not DeviceState.ONLINE:
            online.clear()
            await online.wait()


@pytest.mark.parametrize(
    ("answer", "status", "place"), [row[1:] for row in BAD_READS], ids=[row[0] for row in BAD_READS]
)
async def test_a_broken_answer_to_a_read_fails_it_and_drops_the_connection(
    answer: Answer, status: FatalStatus, place: int
) -> None:
    patient = {"io_queues": 1, "command_timeout_ms": 600_000}
    async with connected(Script(on_command=once(IoOpcode.READ, answer)), **patient) as (target, device):
        target.store[:] = pattern(len(target.store))
        started_ns = time.monotonic_ns()
        with pytest.raises(OutcomeUnknown) as caught:
            async with asyncio.timeout(HANG_S):
                await device.read_into(0, [memoryview(bytearray(SIZE))])
        assert caught.value.settles_at_ns > started_ns + 10_000_000_000
        await target.until(lambda: bool(target.seen.term_requests))
        told = target.seen.term_requests[0]
        assert (told.fatal_status, told.field_offset_bytes) == (status, place)
        await back_online(device)
        again = bytearray(SIZE)
        await device.read_into(0, [memoryview(again)])
        assert again == target.store[:SIZE]
        assert device.counters.reconnects == 1


@pytest.mark.parametrize(
    ("answer", "status", "place"), [row[1:] for row in BAD_WRITES], ids=[row[0] for row in BAD_WRITES]
)
async def test_a_broken_answer_to_a_write_leaves_its_outcome_unknown(
    answer: Answer, status: FatalStatus, place: int
) -> None:
    script = Script(on_command=once(IoOpcode.WRITE, answer), in_capsule_bytes=0)
    async with connected(script, io_queues=1) as (target, device):
        with pytest.raises(OutcomeUnknown):
            await device.write_from(0, [memoryview(pattern(SIZE))])
        await target.until(lambda: bool(target.seen.term_requests))
        told = target.seen.term_requests[0]
        assert (told.fatal_status, told.field_offset_bytes) == (status, place)
        await back_online(device)
        await device.write_from(0, [memoryview(pattern(SIZE))])
        assert target.store[:SIZE] == pattern(SIZE)


async def test_success_flag_and_a_response_complete_once_and_end_the_connection() -> None:
    def both(conn: FakeConnection, entry: SubmissionEntry, data: bytes) -> list[bytes]:
        return [conn.data(entry.cid, 0, data, last=True, success=True), conn.response(entry.cid)]

    async with connected(Script(on_command=once(IoOpcode.READ, both)), io_queues=1) as (target, device):
        target.store[:] = pattern(len(target.store))
        found = bytearray(SIZE)
        await device.read_into(0, [memoryview(found)])
        assert found == target.store[:SIZE]
        await target.until(lambda: bool(target.seen.term_requests))
        assert target.seen.term_requests[0].fatal_status == FatalStatus.INVALID_HEADER_FIELD


@pytest.mark.parametrize("success", [False, True])
@pytest.mark.parametrize("drip", [False, True])
@pytest.mark.parametrize("alignment", [1, 16])
async def test_good_reads_are_bit_exact_however_they_are_cut(
    success: bool, drip: bool, alignment: int
) -> None:
    def three(conn: FakeConnection, entry: SubmissionEntry) -> Sequence[bytes] | None:
        if conn.qid <= 0 or entry.opcode != IoOpcode.READ:
            return None
        data, cid = conn.stored(entry), entry.cid
        pdus = [
            conn.data(cid, 0, data[:4]),
            conn.data(cid, 4, data[4:1000]),
            conn.data(cid, 1000, data[1000:], last=True, success=success),
        ]
        return pdus if success else [*pdus, conn.response(cid)]

    script = Script(on_command=three, drip=drip, alignment_dwords=alignment)
    async with connected(script) as (target, device):
        target.store[:] = pattern(len(target.store))
        found = bytearray(SIZE)
        view = memoryview(found)
        await device.read_into(512, [view[:1], view[1:998], view[998:998], view[998:]])
        assert found == target.store[512 : 512 + SIZE]


async def test_a_failed_read_with_part_of_its_data_is_just_a_failed_read() -> None:
    def half(conn: FakeConnection, entry: SubmissionEntry, data: bytes) -> list[bytes]:
        return [conn.data(entry.cid, 0, data[:512]), conn.response(entry.cid, 0x281)]

    async with connected(Script(on_command=once(IoOpcode.READ, half))) as (_target, device):
        with pytest.raises(CommandFailed) as caught:
            await device.read_into(0, [memoryview(bytearray(SIZE))])
        assert (caught.value.status_code_type, caught.value.status_code) == (2, 0x81)
        assert device.state is DeviceState.ONLINE
        await device.read_into(0, [memoryview(bytearray(SIZE))])
        assert device.counters.reconnects == 0


async def test_a_termination_by_the_controller_ends_the_association() -> None:
    def terminate(_conn: FakeConnection, _entry: SubmissionEntry, _data: bytes) -> list[bytes]:
        return [encode(C2HTermReq(FatalStatus.LIMIT_EXCEEDED, 0, b"x" * 72))]

    async with connected(Script(on_command=once(IoOpcode.READ, terminate))) as (target, device):
        with pytest.raises(OutcomeUnknown, match="fatal error status 5"):
            await device.read_into(0, [memoryview(bytearray(SIZE))])
        await back_online(device)
        assert not target.seen.term_requests


async def test_other_devices_do_not_notice() -> None:
    bad = Script(on_command=once(IoOpcode.READ, lambda conn, entry, _data: [conn.response(entry.cid)]))
    async with connected(bad) as (_bad_target, broken), connected() as (_good_target, fine):
        with pytest.raises(OutcomeUnknown):
            await broken.read_into(0, [memoryview(bytearray(SIZE))])
        await fine.read_into(0, [memoryview(bytearray(SIZE))])
        assert fine.counters.reconnects == 0


@pytest.mark.parametrize(("header", "data"), [(False, False), (True, False), (False, True), (True, True)])
async def test_framing_follows_what_is_granted(header: bool, data: bool) -> None:
    script = Script(grant_header_digest=header, grant_data_digest=data)
    wanted = {"header_digest": "preferred", "data_digest": "preferred"}
    async with connected(script, **wanted) as (target, device):
        payload = pattern(20_480)
        await device.write_from(0, [memoryview(payload)])
        found = bytearray(20_480)
        await device.read_into(0, [memoryview(found)])
        assert found == payload == target.store[:20_480]
        assert device.negotiated is not None
        assert (device.negotiated.header_digest, device.negotiated.data_digest) == (header, data)


@pytest.mark.parametrize("kind", ["header", "data"])
async def test_a_required_digest_that_is_not_granted_is_refused_with_that_reason(kind: str) -> None:
    async with FakeTarget() as target:
        with pytest.raises(ConnectFailed, match=f"the {kind} digest is required"):
            await connect(target.port, **{f"{kind}_digest": "required"})


async def test_a_digest_granted_unasked_is_a_protocol_error() -> None:
    async with FakeTarget(Script(grant_data_digest=True)) as target:
        with pytest.raises(ConnectFailed, match="granted unasked"):
            await connect(target.port)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_flipped_bit_of_data_is_read_again_once(times: int) -> None:
    left = [True] * times

    def flip(conn: FakeConnection, entry: SubmissionEntry) -> Sequence[bytes] | None:
        if conn.qid <= 0 or entry.opcode != IoOpcode.READ or not left:
            return None
        left.pop()
        return [conn.data(entry.cid, 0, conn.stored(entry), last=True, flip=True), conn.response(entry.cid)]

    script = Script(on_command=flip, grant_data_digest=True)
    async with connected(script, data_digest="required") as (target, device):
        target.store[:] = pattern(len(target.store))
        found = bytearray(SIZE)
        if times == 1:
            await device.read_into(0, [memoryview(found)])
            assert found == target.store[:SIZE]
        else:
            with pytest.raises(DataCorrupted):
                await device.read_into(0, [memoryview(found)])
        reads = [entry for qid, entry in target.seen.commands if qid and entry.opcode == IoOpcode.READ]
        assert len(reads) == 2
        assert device.state is DeviceState.ONLINE
        assert device.counters.reconnects == 0


@pytest.mark.parametrize("status", [Status.TRANSIENT_TRANSPORT_ERROR, Status.COMMAND_INTERRUPTED])
@pytest.mark.parametrize("size", [BLOCK, 8192], ids=["in the capsule", "in PDUs of its own"])
@pytest.mark.parametrize(
    ("times", "do_not_retry", "sent"), [(1, False, 2), (2, False, 2), (1, True, 1)], ids=str
)
async def test_a_write_with_which_nothing_is_wrong_itself_is_sent_again_once(
    status: Status, size: int, times: int, do_not_retry: bool, sent: int
) -> None:
    left = [True] * times

    def damaged(conn: FakeConnection, entry: SubmissionEntry) -> Sequence[bytes] | None:
        if conn.qid <= 0 or entry.opcode != IoOpcode.WRITE or not left:
            return None
        left.pop()
        return [conn.response(entry.cid, status, do_not_retry=do_not_retry)]

    async with connected(Script(on_command=damaged)) as (target, device):
        payload = pattern(size)
        if times < sent:
            await device.write_from(0, [memoryview(payload)])
            assert target.store[:size] == payload
        else:
            with pytest.raises(CommandFailed, match=status.name):
                await device.write_from(0, [memoryview(payload)])
        writes = [entry for qid, entry in target.seen.commands if qid and entry.opcode == IoOpcode.WRITE]
        assert len(writes) == sent
        assert device.counters.reconnects == 0


async def test_a_flipped_bit_of_a_header_ends_the_connection_and_all_its_commands() -> None:
    held: list[SubmissionEntry] = []

    def hold_then_flip(conn: FakeConnection, entry: SubmissionEntry) -> Sequence[bytes] | None:
        if conn.qid <= 0 or entry.opcode != IoOpcode.READ or len(held) == 3:
            return None
        held.append(entry)
        return (
            []
            if len(held) < 3
            else [changed(conn.data(entry.cid, 0, conn.stored(entry), last=True), 12, b"\x01")]
        )

    script = Script(on_command=hold_then_flip, grant_header_digest=True)
    async with connected(script, header_digest="required", io_queues=1) as (target, device):
        reads = [device.read_into(0, [memoryview(bytearray(SIZE))]) for _ in range(3)]
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(result) for result in results] == [OutcomeUnknown] * 3
        await target.until(lambda: bool(target.seen.term_requests))
        assert target.seen.term_requests[0].fatal_status == FatalStatus.HEADER_DIGEST_ERROR


async def test_a_reset_in_the_middle_of_a_read_is_an_unknown_outcome() -> None:
    def reset(conn: FakeConnection, entry: SubmissionEntry, data: bytes) -> list[bytes]:
        pdu = conn.data(entry.cid, 0, data, last=True)
        conn.send(pdu[:700])
        asyncio.get_running_loop().call_soon(conn.drop)
        return []

    async with connected(Script(on_command=once(IoOpcode.READ, reset))) as (target, device):
        with pytest.raises(OutcomeUnknown):
            await device.read_into(0, [memoryview(bytearray(SIZE))])
        target.stop_listening()
        with pytest.raises(DeviceOffline):
            at_once(device.read_into(0, [memoryview(bytearray(SIZE))]))
