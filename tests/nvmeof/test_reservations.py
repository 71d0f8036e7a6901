"""Reservations: the structures on the wire, the table of a namespace, and whom the controller keeps out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.card_bench import BLOCK_BYTES, CardBench, RawHost, make_config, read_entry, write_entry
from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import Registrant, ReservationStatus, ReservationType
from xkv_nvmeof.command import CommandFormatError, Sgl, SubmissionEntry
from xkv_nvmeof.controller_reservations import ReservationTable
from xkv_nvmeof.controller_types import WriteCommand
from xkv_nvmeof.identify import IdentifyController, IdentifyNamespace
from xkv_nvmeof.reservation import (
    IGNORE_KEY,
    REGISTRANTS_MAX,
    REPORT_BYTES,
    AcquireAction,
    Persistence,
    RegisterAction,
    ReleaseAction,
    ReservationReport,
    decode_key,
    decode_keys,
    encode_key,
    encode_keys,
)
from xkv_nvmeof.spec import Cns, IoOpcode, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))
KEY_A, KEY_B, KEY_C = 0xA, 0xB, 0xC
SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY
OK, CONFLICT, INVALID = Status.SUCCESS, Status.RESERVATION_CONFLICT, Status.INVALID_FIELD


def test_a_report_comes_back_as_it_was() -> None:
    registrants = (Registrant(A, KEY_A, True), Registrant(B, 2**64 - 1, False))
    report = ReservationReport(ReservationStatus(7, SHARED, registrants), persists=True)
    data = report.to_bytes()
    assert len(data) == 3 * 64
    assert data[4] == 3
    assert int.from_bytes(data[5:7], "little") == 2
    assert ReservationReport.from_bytes(data.ljust(REPORT_BYTES, b"\0")) == report


@pytest.mark.parametrize("data", [b"", bytes(63), bytes(5) + b"\1" + bytes(58), bytes(4) + b"\7" + bytes(59)])
def test_a_broken_report_is_refused(data: bytes) -> None:
    with pytest.raises(CommandFormatError):
        ReservationReport.from_bytes(data)


def test_keys_of_another_length_are_refused() -> None:
    assert decode_keys(encode_keys(1, 2)) == (1, 2)
    assert decode_key(encode_key(3)) == 3
    with pytest.raises(CommandFormatError):
        decode_keys(bytes(8))
    with pytest.raises(CommandFormatError):
        decode_key(bytes(16))


# ---- the table -------------------------------------------------------------------------------------------------


def registered(*hosts: tuple[bytes, int]) -> ReservationTable:
    table = ReservationTable()
    for host, key in hosts:
        assert table.register(host, RegisterAction.REGISTER, 0, key) is OK
    return table


def acquire(
    table: ReservationTable,
    host: bytes,
    key: int,
    kind: ReservationType = SHARED,
    action: AcquireAction = AcquireAction.ACQUIRE,
    victim: int = 0,
) -> Status:
    return table.acquire(host, action | kind << 8, key, victim).status


def test_a_registration_is_one_a_host_and_changes_only_with_its_key() -> None:
    table = registered((A, KEY_A))
    assert table.register(A, RegisterAction.REGISTER, 0, KEY_A) is OK
    assert table.register(A, RegisterAction.REGISTER, 0, KEY_B) is CONFLICT
    assert table.register(A, RegisterAction.REPLACE, KEY_B, KEY_C) is CONFLICT
    assert table.register(A, RegisterAction.REPLACE, KEY_A, KEY_C) is OK
    assert table.register(A, RegisterAction.REPLACE | IGNORE_KEY, 0, KEY_B) is OK
    assert table.register(B, RegisterAction.REPLACE, 0, KEY_B) is CONFLICT
    assert table.register(A, RegisterAction.UNREGISTER, KEY_A, 0) is CONFLICT
    assert table.register(A, RegisterAction.UNREGISTER, KEY_B, 0) is OK
    assert table.register(A, RegisterAction.UNREGISTER, KEY_B, 0) is CONFLICT
    assert table.status().registrants == ()


@pytest.mark.parametrize(
    "dword_10",
    [3, 7, Persistence.KEPT << 30, Persistence.RESERVED << 30],
)
def test_a_register_that_cannot_be_is_refused(dword_10: int) -> None:
    assert ReservationTable().register(A, dword_10, 0, KEY_A) is INVALID
    assert ReservationTable().register(A, RegisterAction.REGISTER, 0, 0) is INVALID


def test_there_are_only_so_many_registrants() -> None:
    table = registered(*((bytes([number]) * 16, number) for number in range(1, REGISTRANTS_MAX + 1)))
    assert table.register(b"x" * 16, RegisterAction.REGISTER, 0, 99) is Status.INTERNAL_ERROR
    assert len(ReservationReport(table.status()).to_bytes()) == REPORT_BYTES


def test_only_a_registrant_with_its_key_acquires_and_only_one() -> None:
    table = registered((A, KEY_A), (B, KEY_B))
    assert acquire(table, C, KEY_C) is CONFLICT
    assert acquire(table, A, KEY_B) is CONFLICT
    assert acquire(table, A, KEY_A) is OK
    assert acquire(table, A, KEY_A) is OK
    assert acquire(table, A, KEY_A, ReservationType.WRITE_EXCLUSIVE) is CONFLICT
    assert acquire(table, B, KEY_B) is CONFLICT
    assert table.status().holder == Registrant(A, KEY_A, True)
    assert table.acquire(A, SHARED << 8 | 3, KEY_A, 0).status is INVALID
    assert table.acquire(A, SHARED << 8 | IGNORE_KEY, KEY_A, 0).status is INVALID
    assert table.acquire(A, 0, KEY_A, 0).status is INVALID


def test_preempting_takes_the_reservation_and_ends_the_registration() -> None:
    table = registered((A, KEY_A), (B, KEY_B), (C, KEY_C))
    assert acquire(table, A, KEY_A) is OK
    generation = table.status().generation
    action = AcquireAction.PREEMPT_AND_ABORT
    outcome = table.acquire(B, action | SHARED << 8, KEY_B, KEY_A)
    assert outcome.status is OK
    assert outcome.abort == {A}
    status = table.status()
    assert status.generation == generation + 1
    assert status.registrants == (Registrant(B, KEY_B, True), Registrant(C, KEY_C, False))
    # Who only is registered loses its registration, and nothing else changes.
    assert acquire(table, B, KEY_B, action=AcquireAction.PREEMPT, victim=KEY_C) is OK
    assert table.status().registrants == (Registrant(B, KEY_B, True),)
    assert acquire(table, B, KEY_B, action=AcquireAction.PREEMPT, victim=KEY_C) is CONFLICT
    assert acquire(table, B, KEY_B, action=AcquireAction.PREEMPT, victim=0) is CONFLICT
    assert acquire(table, A, KEY_A, action=AcquireAction.PREEMPT, victim=KEY_B) is CONFLICT


def test_where_all_registrants_hold_it_a_key_of_zero_preempts_all_others() -> None:
    table = registered((A, KEY_A), (B, KEY_B), (C, KEY_C))
    everybody = ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS
    assert acquire(table, A, KEY_A, everybody) is OK
    assert all(each.holds for each in table.status().registrants)
    assert table.register(A, RegisterAction.UNREGISTER, KEY_A, 0) is OK
    assert table.status().kind is everybody
    assert acquire(table, B, KEY_B, action=AcquireAction.PREEMPT, victim=0) is OK
    status = table.status()
    assert status.registrants == (Registrant(B, KEY_B, True),)
    assert status.kind is SHARED


def test_a_reservation_ends_with_a_release_a_clear_or_the_registration_of_its_holder() -> None:
    table = registered((A, KEY_A), (B, KEY_B))
    release, clear = ReleaseAction.RELEASE | SHARED << 8, ReleaseAction.CLEAR
    assert table.release(A, release, KEY_A) is OK
    assert acquire(table, A, KEY_A) is OK
    assert table.release(B, release, KEY_B) is OK
    assert table.status().kind is SHARED
    assert table.release(A, release, KEY_B) is CONFLICT
    assert table.release(A, ReleaseAction.RELEASE | 1 << 8, KEY_A) is INVALID
    assert table.release(A, release | IGNORE_KEY, KEY_A) is INVALID
    assert table.release(A, release | 2, KEY_A) is INVALID
    assert table.release(A, release, KEY_A) is OK
    assert table.status().kind is None
    assert acquire(table, A, KEY_A) is OK
    assert table.register(A, RegisterAction.UNREGISTER, KEY_A, 0) is OK
    assert table.status().kind is None
    assert acquire(table, B, KEY_B) is OK
    assert table.release(C, clear, KEY_C) is CONFLICT
    assert table.release(B, clear, KEY_B) is OK
    assert table.status().registrants == ()
    assert table.status().kind is None


READS = {IoOpcode.READ}
WRITES = {IoOpcode.WRITE, IoOpcode.WRITE_ZEROES, IoOpcode.DATASET_MANAGEMENT, IoOpcode.FLUSH}
KEPT_OUT = {
    # type: what a registrant may not, what anybody else may not
    ReservationType.WRITE_EXCLUSIVE: (WRITES, WRITES),
    ReservationType.EXCLUSIVE_ACCESS: (READS | WRITES, READS | WRITES),
    ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY: (set(), WRITES),
    ReservationType.EXCLUSIVE_ACCESS_REGISTRANTS_ONLY: (set(), READS | WRITES),
    ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS: (set(), WRITES),
    ReservationType.EXCLUSIVE_ACCESS_ALL_REGISTRANTS: (set(), READS | WRITES),
}


@pytest.mark.parametrize("kind", list(ReservationType))
def test_each_type_keeps_out_whom_it_must(kind: ReservationType) -> None:
    table = registered((A, KEY_A), (B, KEY_B))
    opcodes = READS | WRITES
    assert not any(table.conflict(opcode, host) for opcode in opcodes for host in (A, B, C))
    assert acquire(table, A, KEY_A, kind) is OK
    of_registrants, of_others = KEPT_OUT[kind]
    assert {opcode for opcode in opcodes if table.conflict(opcode, A)} == set()
    assert {opcode for opcode in opcodes if table.conflict(opcode, B)} == of_registrants
    assert {opcode for opcode in opcodes if table.conflict(opcode, C)} == of_others


# ---- the controller --------------------------------------------------------------------------------------------


def entry(
    opcode: IoOpcode, cid: int, dword_10: int, length_bytes: int, *, in_capsule: bool = True
) -> SubmissionEntry:
    sgl = Sgl.in_capsule(length_bytes) if in_capsule else Sgl.transport(length_bytes)
    return SubmissionEntry(opcode, cid, 1, sgl, cdw10=dword_10)


def host_queue(bench: CardBench, host_id: bytes) -> RawHost:
    return bench.queue(bench.admin(hostid=host_id), hostid=host_id)


def register(queue: RawHost, key: int) -> Status:
    return queue.status(
        entry(IoOpcode.RESERVATION_REGISTER, 1, RegisterAction.REGISTER, 16), encode_keys(0, key)
    )


def reserve(
    queue: RawHost, key: int, action: AcquireAction = AcquireAction.ACQUIRE, victim: int = 0
) -> Status:
    return queue.status(
        entry(IoOpcode.RESERVATION_ACQUIRE, 2, action | SHARED << 8, 16), encode_keys(key, victim)
    )


def report(queue: RawHost, cid: int = 3, *, dword_11: int = 1, length_bytes: int = REPORT_BYTES) -> bytes:
    wanted = SubmissionEntry(
        IoOpcode.RESERVATION_REPORT,
        cid,
        1,
        Sgl.transport(length_bytes),
        cdw10=length_bytes // 4 - 1,
        cdw11=dword_11,
    )
    answer = queue.command(wanted)
    if cid not in answer.data:
        (completion,) = answer.completions
        raise ValueError(Status(completion.status).name)
    return answer.data[cid]


def test_the_controller_says_that_it_has_reservations_and_that_they_do_not_persist() -> None:
    for has in (True, False):
        admin = CardBench(make_config(reservations=has)).admin()
        answer = admin.command(builders.identify(1, Cns.CONTROLLER))
        assert bool(IdentifyController.from_bytes(answer.data[1]).nvm_commands & 1 << 5) is has
        answer = admin.command(builders.identify(2, Cns.NAMESPACE, nsid=1))
        capabilities = IdentifyNamespace.from_bytes(answer.data[2]).reservation_capabilities
        assert capabilities == (0xFE if has else 0)


def test_a_card_without_reservations_does_not_know_the_commands() -> None:
    bench = CardBench(make_config(reservations=False))
    assert register(host_queue(bench, A), KEY_A) is Status.INVALID_OPCODE


def test_who_is_not_registered_writes_nothing_and_reads_everything() -> None:
    bench = CardBench()
    owner, other = host_queue(bench, A), host_queue(bench, B)
    assert register(owner, KEY_A) is OK
    assert reserve(owner, KEY_A) is OK
    data = b"x" * BLOCK_BYTES
    assert owner.status(write_entry(4, 0, 1, in_capsule=True), data) is OK
    assert other.status(write_entry(4, 0, 1, in_capsule=True), b"y" * BLOCK_BYTES) is CONFLICT
    assert other.status(write_entry(5, 0, 8, in_capsule=False)) is CONFLICT
    assert other.status(builders.flush(6, 1)) is CONFLICT
    assert other.status(builders.write_zeroes(7, 1, 0, 1)) is CONFLICT
    assert other.command(read_entry(8, 0, 1)).data[8] == data
    assert register(other, KEY_B) is OK
    assert other.status(write_entry(9, 1, 1, in_capsule=True), data) is OK
    status = ReservationReport.from_bytes(report(other)).status
    assert status.registrants == (Registrant(A, KEY_A, True), Registrant(B, KEY_B, False))


def test_a_registration_outlives_its_associations() -> None:
    bench = CardBench()
    first = host_queue(bench, A)
    assert register(first, KEY_A) is OK
    assert reserve(first, KEY_A) is OK
    first.connection.lost()
    again = host_queue(bench, A)
    assert again.status(write_entry(1, 0, 1, in_capsule=True), bytes(BLOCK_BYTES)) is OK
    status = ReservationReport.from_bytes(report(again)).status
    assert status.of_host(A) == Registrant(A, KEY_A, True)


def test_data_that_comes_after_its_host_was_preempted_is_not_written() -> None:
    bench = CardBench()
    old, new = host_queue(bench, A), host_queue(bench, B)
    assert register(old, KEY_A) is OK
    assert reserve(old, KEY_A) is OK
    (r2t,) = old.command(write_entry(5, 0, 4, in_capsule=False)).r2ts
    assert register(new, KEY_B) is OK
    assert reserve(new, KEY_B, AcquireAction.PREEMPT_AND_ABORT, KEY_A) is OK
    (completion,) = old.send(old.h2c(r2t, b"z" * 4 * BLOCK_BYTES)).completions
    assert completion.status == CONFLICT
    assert not any(bench.blocks)
    assert not old.buffers.out


def test_preempt_and_abort_is_over_when_nothing_of_the_preempted_host_is_executed() -> None:
    bench = CardBench()
    old, new = host_queue(bench, A), host_queue(bench, B)
    assert register(old, KEY_A) is OK
    assert register(new, KEY_B) is OK
    bench.hold = True
    for cid in (5, 6):
        old.command(write_entry(cid, 0, 1, in_capsule=True), b"1" * BLOCK_BYTES)
    asked = new.command(
        entry(IoOpcode.RESERVATION_ACQUIRE, 2, AcquireAction.PREEMPT_AND_ABORT | SHARED << 8, 16),
        encode_keys(KEY_B, KEY_A),
    )
    assert not asked.completions
    # Its connection may be gone meanwhile; what it has begun is still being executed.
    old.connection.lost()
    held = [pair for pair in bench.held if isinstance(pair[1], WriteCommand)]
    for connection, command in held[:1]:
        bench.finish(connection, command)
    assert not new.answer().completions
    for connection, command in held[1:]:
        bench.finish(connection, command)
    assert [completion.status for completion in new.answer().completions] == [OK]


@pytest.mark.parametrize("in_capsule", [True, False])
def test_keys_travel_in_the_capsule_or_behind_a_request(in_capsule: bool) -> None:
    bench = CardBench()
    queue = host_queue(bench, A)
    command = entry(IoOpcode.RESERVATION_REGISTER, 1, RegisterAction.REGISTER, 16, in_capsule=in_capsule)
    keys = encode_keys(0, KEY_A)
    answer = queue.command(command, keys if in_capsule else b"")
    if not in_capsule:
        (r2t,) = answer.r2ts
        answer = queue.send(queue.h2c(r2t, keys))
    assert [completion.status for completion in answer.completions] == [OK]
    assert not queue.buffers.out
    release = entry(IoOpcode.RESERVATION_RELEASE, 2, SHARED << 8, 8)
    assert queue.status(release, encode_key(KEY_A)) is OK


def malformed() -> Iterator[tuple[SubmissionEntry, bytes, Status]]:
    keys = encode_keys(0, KEY_A)
    good = entry(IoOpcode.RESERVATION_REGISTER, 1, RegisterAction.REGISTER, 16)
    yield entry(IoOpcode.RESERVATION_REGISTER, 1, 0, 8), keys[:8], Status.DATA_SGL_LENGTH_INVALID
    yield SubmissionEntry(good.opcode, 1, 2, good.sgl), keys, Status.INVALID_NAMESPACE
    yield SubmissionEntry(good.opcode, 1, 1, good.sgl, flags=0), keys, INVALID


@pytest.mark.parametrize("number", range(3))
def test_a_malformed_command_about_reservations_is_refused(number: int) -> None:
    command, data, status = list(malformed())[number]
    assert host_queue(CardBench(), A).status(command, data) is status


def test_a_report_needs_long_host_identifiers_and_fits_the_buffer() -> None:
    queue = host_queue(CardBench(), A)
    with pytest.raises(ValueError, match="HOST_IDENTIFIER_INCONSISTENT"):
        report(queue, dword_11=0)
    with pytest.raises(ValueError, match="INVALID_FIELD"):
        report(queue, length_bytes=REPORT_BYTES + 4)
    assert report(queue, 4, length_bytes=4) == bytes(4)
