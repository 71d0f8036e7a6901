"""I/O commands and their data, without sockets: what works, whole and byte by byte, and every refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.nvmeof.card_bench import BLOCK_BYTES, BLOCKS, CardBench, make_config, read_entry, write_entry
from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import ByteRange
from xkv_nvmeof.command import BlockRange, Sgl, SubmissionEntry, encode_ranges
from xkv_nvmeof.controller_types import DeallocateCommand, WriteCommand, WriteZeroesCommand
from xkv_nvmeof.pdu import C2HData, CapsuleResp, FatalStatus, ICReq, encode, encode_command
from xkv_nvmeof.spec import NSID_BROADCAST, Status

PATTERN = bytes(range(256)) * 16


def pattern(blocks: int, seed: int = 0) -> bytes:
    return bytes((seed + index) % 256 for index in range(blocks)) * BLOCK_BYTES


@pytest.mark.parametrize("step_bytes", [0, 1, 7, 4096])
@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("in_capsule", [False, True])
def test_what_was_written_is_read_back_however_the_bytes_are_cut(
    step_bytes: int, digests: bool, in_capsule: bool
) -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin(), init=ICReq(2, digests, digests), step_bytes=step_bytes)
    data = pattern(2, 1)
    answer = queue.command(write_entry(9, 3, 2, in_capsule=in_capsule), data if in_capsule else b"")
    if not in_capsule:
        (r2t,) = answer.r2ts
        answer = queue.send(queue.h2c(r2t, data))
    assert [c.status for c in answer.completions] == [0]
    answer = queue.command(read_entry(10, 3, 2))
    assert answer.data[10] == data
    assert [c.cid for c in answer.completions] == [10]
    assert not queue.buffers.out


def test_without_flow_control_success_travels_with_the_data() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin(), attributes=4)
    (pdu,) = queue.command(read_entry(1, 0, 1)).pdus
    assert isinstance(pdu, C2HData)
    assert pdu.success
    assert pdu.last
    with_flow_control = bench.queue(bench.admin())
    first, second = with_flow_control.command(read_entry(1, 0, 1)).pdus
    assert isinstance(first, C2HData)
    assert not first.success
    assert isinstance(second, CapsuleResp)


@pytest.mark.parametrize(("max_r2t", "expected"), [(1, 1), (2, 2), (64, 4)])
def test_a_transfer_larger_than_maxh2cdata_takes_several_r2ts_within_maxr2t(
    max_r2t: int, expected: int
) -> None:
    bench = CardBench(make_config(max_h2c_data_bytes=8192))
    queue = bench.queue(bench.admin(), init=ICReq(max_r2t=max_r2t))
    data = pattern(8)
    waiting = queue.command(write_entry(1, 0, 8, in_capsule=False)).r2ts
    assert len(waiting) == expected
    sent = 0
    while waiting:
        r2t = waiting.pop(0)
        part = data[r2t.offset_bytes : r2t.offset_bytes + r2t.data_bytes]
        half = len(part) // 2
        queue.send(queue.h2c(r2t, part[:half], last=False))
        answer = queue.send(queue.h2c(r2t, part[half:], offset=r2t.offset_bytes + half))
        waiting += answer.r2ts
        assert len(waiting) <= max_r2t
        sent += 1
    assert sent == 4
    assert [c.status for c in answer.completions] == [0]
    assert bytes(bench.blocks[: len(data)]) == data


def test_writes_wait_in_order_for_buffers() -> None:
    bench = CardBench(buffer_bytes=2 * 4 * BLOCK_BYTES)
    queue = bench.queue(bench.admin())
    granted = [queue.command(write_entry(cid, cid * 4, 4, in_capsule=False)).r2ts for cid in range(4)]
    assert [len(r2ts) for r2ts in granted] == [1, 1, 0, 0]
    assert queue.connection.transfers.starved
    queue.send(queue.h2c(granted[0][0], pattern(4)))
    queue.connection.transfers.retry()
    (r2t,) = queue.answer().r2ts
    assert r2t.command_id == 2
    queue.connection.lost()
    assert not queue.buffers.out


def corrupt(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


def test_a_wrong_data_digest_fails_the_command_and_not_the_connection() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin(), init=ICReq(1, header_digest=False, data_digest=True))
    (r2t,) = queue.command(write_entry(1, 0, 4, in_capsule=False)).r2ts
    (completion,) = queue.send(corrupt(queue.h2c(r2t, pattern(4, 5)))).completions
    assert completion.status == Status.TRANSIENT_TRANSPORT_ERROR
    assert not completion.do_not_retry
    message = encode_command(write_entry(2, 0, 1, in_capsule=True).to_bytes(), BLOCK_BYTES, queue.wire)
    (completion,) = queue.send(message + pattern(1, 5) + bytes(4)).completions
    assert completion.status == Status.TRANSIENT_TRANSPORT_ERROR
    assert not any(bench.blocks)
    assert queue.status(builders.flush(3, 1)) is Status.SUCCESS
    assert not queue.buffers.out


def test_a_wrong_header_digest_ends_the_connection() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin(), init=ICReq(1, header_digest=True))
    answer = queue.send(corrupt(encode_command(builders.flush(1, 1).to_bytes(), 0, queue.wire)))
    assert [term.fatal_status for term in answer.terms] == [FatalStatus.HEADER_DIGEST_ERROR]
    assert queue.connection.ended


ZERO = Sgl.transport(0)


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (read_entry(1, BLOCKS, 1), Status.LBA_OUT_OF_RANGE),
        (read_entry(1, BLOCKS - 1, 2), Status.LBA_OUT_OF_RANGE),
        (read_entry(1, (1 << 64) - 1, 1), Status.LBA_OUT_OF_RANGE),
        (write_entry(1, BLOCKS, 1, in_capsule=False), Status.LBA_OUT_OF_RANGE),
        (read_entry(1, 0, 33), Status.INVALID_FIELD),
        (write_entry(1, 0, 33, in_capsule=False), Status.INVALID_FIELD),
        (replace(read_entry(1, 0, 1), nsid=2), Status.INVALID_NAMESPACE),
        (replace(read_entry(1, 0, 1), nsid=0), Status.INVALID_NAMESPACE),
        (replace(read_entry(1, 0, 1), nsid=NSID_BROADCAST), Status.INVALID_NAMESPACE),
        (replace(read_entry(1, 0, 1), flags=0), Status.INVALID_FIELD),
        (replace(read_entry(1, 0, 1), flags=0x41), Status.INVALID_FIELD),
        (replace(read_entry(1, 0, 1), cdw12=1 << 26), Status.INVALID_FIELD),
        (builders.read(1, 1, 0, 1, Sgl.transport(512)), Status.DATA_SGL_LENGTH_INVALID),
        (builders.read(1, 1, 0, 1, Sgl.in_capsule(4096)), Status.SGL_TYPE_INVALID),
        (builders.read(1, 1, 0, 1, Sgl(0, 4096, 0x40)), Status.SGL_TYPE_INVALID),
        (builders.write(1, 1, 0, 2, Sgl.in_capsule(4096)), Status.DATA_SGL_LENGTH_INVALID),
        (builders.write(1, 1, 0, 1, Sgl.in_capsule(4096, 512)), Status.SGL_OFFSET_INVALID),
        (builders.write(1, 1, 0, 1, Sgl.in_capsule(4096)), Status.DATA_SGL_LENGTH_INVALID),
        (builders.flush(1, 7), Status.INVALID_NAMESPACE),
        (builders.write_zeroes(1, 1, BLOCKS - 1, 2), Status.LBA_OUT_OF_RANGE),
        (builders.dataset_management(1, 1, 2, Sgl.transport(16)), Status.DATA_SGL_LENGTH_INVALID),
        (builders.dataset_management(1, 1, 257, Sgl.transport(257 * 16)), Status.INVALID_FIELD),
        (SubmissionEntry(0x05, 1, 1, Sgl.transport(4096)), Status.INVALID_OPCODE),
        (SubmissionEntry(0x0D, 1, 1, ZERO), Status.DATA_SGL_LENGTH_INVALID),
        (SubmissionEntry(0xC1, 1, 1, ZERO), Status.INVALID_OPCODE),
        (builders.property_get(1, 0, 8), Status.INVALID_OPCODE),
    ],
)
def test_a_wrong_io_command_is_refused_and_the_queue_goes_on(entry: SubmissionEntry, status: Status) -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    completion = queue.command(entry).completions[0]
    assert completion.status == status
    assert completion.do_not_retry
    assert queue.status(builders.flush(2, NSID_BROADCAST)) is Status.SUCCESS
    assert not queue.buffers.out


def test_data_in_the_capsule_of_a_refused_command_is_passed_over() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    assert queue.status(write_entry(1, BLOCKS, 1, in_capsule=True), PATTERN) is Status.LBA_OUT_OF_RANGE
    assert queue.status(builders.read(2, 1, 0, 1, Sgl.transport(4096)), PATTERN) is Status.INVALID_FIELD
    assert queue.status(write_entry(3, 0, 1, in_capsule=True), PATTERN) is Status.SUCCESS
    assert bytes(bench.blocks[:BLOCK_BYTES]) == PATTERN


def test_zero_based_block_counts_reach_the_last_block() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    entry = read_entry(1, BLOCKS - 1, 1)
    assert entry.cdw12 & 0xFFFF == 0
    assert len(queue.command(entry).data[1]) == BLOCK_BYTES
    assert len(queue.command(read_entry(2, 0, 32)).data[2]) == 128 << 10


def test_in_capsule_data_over_the_limit_ends_the_association() -> None:
    bench = CardBench()
    admin = bench.admin()
    queue = bench.queue(admin)
    (term,) = queue.command(write_entry(1, 0, 3, in_capsule=True), pattern(3)).terms
    assert term.fatal_status == FatalStatus.LIMIT_EXCEEDED
    assert queue.connection.ended
    assert admin.connection.ended


@pytest.mark.parametrize(
    ("change", "fatal_status"),
    [
        ({"transfer_tag": 99}, FatalStatus.INVALID_HEADER_FIELD),
        ({"command_id": 2}, FatalStatus.INVALID_HEADER_FIELD),
        ({"offset_bytes": 512}, FatalStatus.OUT_OF_RANGE),
        ({"data_bytes": 5 * BLOCK_BYTES}, FatalStatus.OUT_OF_RANGE),
    ],
)
def test_data_that_nobody_asked_for_ends_the_connection(
    change: dict[str, int], fatal_status: FatalStatus
) -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    (r2t,) = queue.command(write_entry(1, 0, 4, in_capsule=False)).r2ts
    wrong = replace(r2t, **change)
    (term,) = queue.send(queue.h2c(wrong, bytes(wrong.data_bytes))).terms
    assert term.fatal_status == fatal_status
    assert queue.connection.ended
    assert not queue.buffers.out
    assert not any(isinstance(command, WriteCommand) for command in bench.executed)


def test_a_wrong_last_flag_ends_the_connection() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    (r2t,) = queue.command(write_entry(1, 0, 4, in_capsule=False)).r2ts
    (term,) = queue.send(queue.h2c(r2t, bytes(BLOCK_BYTES), last=True)).terms
    assert term.fatal_status == FatalStatus.INVALID_HEADER_FIELD


def test_a_command_id_in_use_is_a_conflict() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    (r2t,) = queue.command(write_entry(1, 0, 4, in_capsule=False)).r2ts
    assert queue.status(write_entry(1, 8, 1, in_capsule=True), PATTERN) is Status.COMMAND_ID_CONFLICT
    assert [c.status for c in queue.send(queue.h2c(r2t, pattern(4))).completions] == [0]
    assert not any(bench.blocks[8 * BLOCK_BYTES : 9 * BLOCK_BYTES])


def test_more_commands_than_the_queue_holds_end_the_connection() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin(), sqsize=3)
    bench.hold = True
    for cid in range(4):
        assert not queue.command(read_entry(cid, 0, 1)).pdus
    (term,) = queue.command(read_entry(9, 0, 1)).terms
    assert term.fatal_status == FatalStatus.SEQUENCE_ERROR
    for connection, command in bench.held:
        bench.finish(connection, command)
    assert not queue.buffers.out


def test_sqhd_follows_the_commands_taken() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin(), sqsize=3)
    heads = [queue.command(builders.flush(cid, 1)).completions[0].sqhd for cid in range(5)]
    assert heads == [2, 3, 0, 1, 2]


def test_deallocate_and_write_zeroes_are_handed_over_in_bytes() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    ranges = [BlockRange(1, 2), BlockRange(10, 0), BlockRange(BLOCKS - 1, 1)]
    data = encode_ranges(ranges)
    entry = builders.dataset_management(1, 1, 3, Sgl.in_capsule(len(data)))
    assert queue.status(entry, data) is Status.SUCCESS
    assert queue.status(builders.write_zeroes(2, 1, 5, 3, deallocate=True)) is Status.SUCCESS
    deallocate, zeroes = bench.executed[-2:]
    assert isinstance(deallocate, DeallocateCommand)
    assert deallocate.ranges == (ByteRange(4096, 8192), ByteRange((BLOCKS - 1) * 4096, 4096))
    assert isinstance(zeroes, WriteZeroesCommand)
    assert zeroes.byte_range == ByteRange(5 * 4096, 3 * 4096)
    assert zeroes.deallocate
    wrong = encode_ranges([BlockRange(BLOCKS - 1, 2)])
    entry = builders.dataset_management(3, 1, 1, Sgl.in_capsule(16))
    assert queue.status(entry, wrong) is Status.LBA_OUT_OF_RANGE


def test_a_range_list_longer_than_its_ranges_is_taken_as_linux_sends_it() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    entry = builders.dataset_management(1, 1, 1, Sgl.transport(4096))
    (r2t,) = queue.command(entry).r2ts
    data = encode_ranges([BlockRange(4, 1)]).ljust(4096, b"\0")
    assert [c.status for c in queue.send(queue.h2c(r2t, data)).completions] == [0]
    assert not queue.buffers.out
    command = bench.executed[-1]
    assert isinstance(command, DeallocateCommand)
    assert command.ranges == (ByteRange(4 * 4096, 4096),)


def test_force_unit_access_reaches_the_shell() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    entry = builders.write(1, 1, 0, 1, Sgl.in_capsule(BLOCK_BYTES), force_unit_access=True)
    assert queue.status(entry, PATTERN) is Status.SUCCESS
    command = bench.executed[-1]
    assert isinstance(command, WriteCommand)
    assert command.force_unit_access


def test_a_pdu_that_only_a_controller_sends_ends_the_connection() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    (term,) = queue.send(encode(C2HData(1, 0, 512, last=True, success=False)) + bytes(512)).terms
    assert term.fatal_status == FatalStatus.INVALID_HEADER_FIELD


@pytest.mark.parametrize(
    "when", ["before the data", "in the data", "while it is executed", "with data unsent"]
)
def test_a_lost_connection_gives_every_buffer_back(when: str) -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    (r2t,) = queue.command(write_entry(1, 0, 4, in_capsule=False)).r2ts
    message = queue.h2c(r2t, pattern(4))
    bench.hold = True
    if when == "in the data":
        queue.send(message[:5000])
    elif when == "while it is executed":
        queue.send(message)
        assert bench.held
    elif when == "with data unsent":
        queue.send(message)
        queue.command(read_entry(2, 0, 4))
    queue.connection.lost()
    for connection, command in bench.held:
        bench.finish(connection, command)
    assert not queue.buffers.out
    assert not queue.connection.outgoing
