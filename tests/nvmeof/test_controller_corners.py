"""Corners of the controller side that the other tests do not come by, without sockets."""

from __future__ import annotations

from dataclasses import replace

from tests.nvmeof.card_bench import BLOCK_BYTES, CardBench, RawHost, make_config, read_entry, write_entry
from xkv_nvmeof import builders
from xkv_nvmeof.command import BlockRange, ConnectCommand, ConnectData, Sgl, encode_ranges
from xkv_nvmeof.controller_states import ConnectionState
from xkv_nvmeof.controller_types import DeallocateCommand, Reply, ShutdownCommand
from xkv_nvmeof.pdu import FatalStatus, H2CTermReq, ICReq, encode, encode_command
from xkv_nvmeof.spec import Register, Status

NQN_FIELD = slice(256, 512)


def test_a_card_that_stops_ends_everything() -> None:
    bench = CardBench()
    admin, fresh = bench.admin(), bench.host()
    queue = bench.queue(admin)
    bench.card.shutdown("the end")
    assert all(host.connection.ended for host in (admin, fresh, queue))
    assert admin.connection.end_reason == "the end"
    for host in (admin, fresh, queue):
        host.connection.receive(memoryview(encode(ICReq())), bench.now_ns)
        assert not host.answer().pdus
        host.connection.lost()
        assert host.connection.state is ConnectionState.CLOSED
    assert bench.card.next_deadline_ns() is None


def test_a_connect_with_a_name_that_never_ends_is_refused() -> None:
    host = CardBench().host()
    data = bytearray(ConnectData(b"h" * 16, 0xFFFF, "nqn.x", "nqn.y").to_bytes())
    data[NQN_FIELD] = b"n" * 256
    (completion,) = host.command(ConnectCommand(1, 0, 31).to_entry(), bytes(data)).completions
    assert completion.status == Status.CONNECT_INVALID_PARAMETERS
    assert completion.dw0 == 1 << 16 | 256
    short = replace(ConnectCommand(2, 0, 31).to_entry(), sgl=Sgl.transport(1024))
    assert host.status(short) is Status.DATA_SGL_LENGTH_INVALID


def test_controller_ids_in_use_are_passed_over() -> None:
    bench = CardBench()
    bench.admin()
    bench.card._next_cntlid = 0xFFEF
    assert bench.admin().connection.controller is not None
    third = bench.admin().connection.controller
    assert third is not None
    assert third.cntlid == 2


def test_transfer_tags_in_use_are_passed_over() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    (first,) = queue.command(write_entry(1, 0, 4, in_capsule=False)).r2ts
    queue.connection.transfers._next_tag = first.transfer_tag
    (second,) = queue.command(write_entry(2, 0, 4, in_capsule=False)).r2ts
    assert second.transfer_tag != first.transfer_tag


def test_a_termreq_of_the_host_ends_the_association() -> None:
    bench = CardBench()
    admin = bench.admin()
    queue = bench.queue(admin)
    assert not queue.send(encode(H2CTermReq(FatalStatus.SEQUENCE_ERROR, 0, b"head"))).pdus
    assert queue.connection.ended
    assert admin.connection.ended
    assert "host ended" in queue.connection.end_reason


def test_an_alignment_beyond_the_header_ends_the_connection() -> None:
    (term,) = RawHost(CardBench()).init(ICReq(alignment_dwords=33)).terms
    assert (term.fatal_status, term.field_offset_bytes) == (FatalStatus.INVALID_HEADER_FIELD, 10)


def test_a_write_that_was_not_begun_gives_its_buffer_back_when_a_later_pdu_breaks_the_protocol() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    (r2t,) = queue.command(write_entry(1, 0, 4, in_capsule=False)).r2ts
    (term,) = queue.send(queue.h2c(r2t, bytes(4 * BLOCK_BYTES)) + b"\xff" * 64).terms
    assert term.fatal_status == FatalStatus.INVALID_HEADER_FIELD
    assert not queue.buffers.out
    assert not bench.executed


def test_a_shutdown_survives_the_end_of_its_connection() -> None:
    bench = CardBench()
    admin = bench.admin()
    message = encode_command(builders.property_set(4, Register.CC, 4, 0x464001).to_bytes(), 0, admin.wire)
    admin.send(message + b"\xff" * 64)
    assert any(isinstance(command, ShutdownCommand) for command in bench.executed)
    assert admin.connection.ended


def test_a_command_that_failed_after_its_connection_ended_is_forgotten() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    bench.hold = True
    queue.command(read_entry(1, 0, 1))
    queue.connection.end("over")
    ((connection, command),) = bench.held
    connection.complete(command, Status.INTERNAL_ERROR)
    assert not queue.answer().pdus
    queue.connection.sender.reply(99, Reply())
    assert not queue.answer().pdus


def test_dataset_management_without_deallocate_is_a_hint_and_zeroing_takes_no_data() -> None:
    bench = CardBench(make_config())
    queue = bench.queue(bench.admin())
    data = encode_ranges([BlockRange(0, 1)])
    hint = replace(builders.dataset_management(1, 1, 1, Sgl.in_capsule(16)), cdw11=1)
    assert queue.status(hint, data) is Status.SUCCESS
    command = bench.executed[-1]
    assert isinstance(command, DeallocateCommand)
    assert command.ranges == ()
    assert queue.status(builders.write_zeroes(2, 1, 0, 1), bytes(512)) is Status.INVALID_FIELD
