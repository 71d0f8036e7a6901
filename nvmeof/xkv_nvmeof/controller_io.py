"""Judges I/O commands (NVM 3, Base 7.1): an entry becomes a plan, or the status that refuses it. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.blockdev import ByteRange
from xkv_nvmeof.builders import DEAC, DSM_DEALLOCATE, FUA
from xkv_nvmeof.command import SubmissionEntry, decode_ranges
from xkv_nvmeof.controller_types import (
    DeallocateCommand,
    FlushCommand,
    IoCommand,
    ReadCommand,
    WriteCommand,
    WriteZeroesCommand,
)
from xkv_nvmeof.spec import DSM_RANGE_BYTES, NSID_BROADCAST, PSDT_SGL, IoOpcode, SglType, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.controller_types import CardConfig, NamespaceInfo

_PROTECTION: Final = 0x3C00_0000
"""PRINFO of dword 12: the namespace has no protection information (NVM 5.3)."""
_DIRECTIVE: Final = 0x00F0_0000
"""DTYPE of dword 12: directives are not supported (Base 8.7)."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """The command needs `length_bytes` of data from the host before it can be executed."""

    length_bytes: int


Judgement = IoCommand | Inbound | Status


def judge(entry: SubmissionEntry, capsule_bytes: int, config: CardConfig) -> Judgement:
    """Judge a command of an I/O queue that carried `capsule_bytes` of data with it."""
    if entry.flags != PSDT_SGL:
        return Status.INVALID_FIELD
    namespace = config.namespace
    opcode = entry.opcode
    if not namespace.attached:
        return Status.INVALID_NAMESPACE
    if opcode == IoOpcode.FLUSH:
        return _flush(entry, namespace)
    judge_one = _JUDGES.get(opcode)
    if judge_one is None:
        return Status.INVALID_OPCODE
    if entry.nsid != namespace.nsid:
        return Status.INVALID_NAMESPACE
    return judge_one(entry, capsule_bytes, config)


def execute(
    entry: SubmissionEntry, data: memoryview, config: CardConfig, *, pooled: bool
) -> IoCommand | Status:
    """Turn a command whose data is complete (it was judged `Inbound`) into what the shell executes."""
    if entry.opcode == IoOpcode.WRITE:
        offset_bytes = _first_block(entry) * config.namespace.block_bytes
        return WriteCommand(entry.cid, offset_bytes, data, bool(entry.cdw12 & FUA), pooled)
    assert entry.opcode == IoOpcode.DATASET_MANAGEMENT
    return _ranges(entry, data, config.namespace)


def _first_block(entry: SubmissionEntry) -> int:
    return entry.cdw10 | entry.cdw11 << 32


def _flush(entry: SubmissionEntry, namespace: NamespaceInfo) -> Judgement:
    if entry.nsid not in (namespace.nsid, NSID_BROADCAST):
        return Status.INVALID_NAMESPACE
    return FlushCommand(entry.cid)


def _block_range(entry: SubmissionEntry, namespace: NamespaceInfo) -> ByteRange | Status:
    first, count = _first_block(entry), (entry.cdw12 & 0xFFFF) + 1
    if first + count > namespace.block_count:
        return Status.LBA_OUT_OF_RANGE
    return ByteRange(first * namespace.block_bytes, count * namespace.block_bytes)


def _transfer_range(entry: SubmissionEntry, config: CardConfig) -> ByteRange | Status:
    """Judge what Read and Write have in common; MDTS comes first, as the range cannot matter then."""
    if entry.cdw12 & (_PROTECTION | _DIRECTIVE):
        return Status.INVALID_FIELD
    if ((entry.cdw12 & 0xFFFF) + 1) * config.namespace.block_bytes > config.max_transfer_bytes:
        return Status.INVALID_FIELD
    return _block_range(entry, config.namespace)


def inbound_status(entry: SubmissionEntry, capsule_bytes: int, length_bytes: int) -> Status:
    """Judge the data pointer of a command with `length_bytes` of data from the host (TCP 3.3.1.3)."""
    sgl = entry.sgl
    if sgl.kind == SglType.IN_CAPSULE_OFFSET:
        if sgl.address != 0:
            return Status.SGL_OFFSET_INVALID
        if sgl.length_bytes != length_bytes or capsule_bytes != length_bytes:
            return Status.DATA_SGL_LENGTH_INVALID
        return Status.SUCCESS
    return outbound_status(entry, capsule_bytes, length_bytes)


def outbound_status(entry: SubmissionEntry, capsule_bytes: int, length_bytes: int) -> Status:
    """Judge the data pointer of a command whose data travels in PDUs of its own."""
    sgl = entry.sgl
    if sgl.kind != SglType.TRANSPORT_DATA_BLOCK:
        return Status.SGL_TYPE_INVALID
    if sgl.length_bytes != length_bytes:
        return Status.DATA_SGL_LENGTH_INVALID
    return Status.INVALID_FIELD if capsule_bytes else Status.SUCCESS


def _read(entry: SubmissionEntry, capsule_bytes: int, config: CardConfig) -> Judgement:
    span = _transfer_range(entry, config)
    if isinstance(span, Status):
        return span
    status = outbound_status(entry, capsule_bytes, span.length_bytes)
    if status:
        return status
    return ReadCommand(entry.cid, span.offset_bytes, span.length_bytes, bool(entry.cdw12 & FUA))


def _write(entry: SubmissionEntry, capsule_bytes: int, config: CardConfig) -> Judgement:
    span = _transfer_range(entry, config)
    if isinstance(span, Status):
        return span
    return inbound_status(entry, capsule_bytes, span.length_bytes) or Inbound(span.length_bytes)


def _write_zeroes(entry: SubmissionEntry, capsule_bytes: int, config: CardConfig) -> Judgement:
    if entry.cdw12 & (_PROTECTION | _DIRECTIVE) or capsule_bytes:
        return Status.INVALID_FIELD
    span = _block_range(entry, config.namespace)
    if isinstance(span, Status):
        return span
    return WriteZeroesCommand(entry.cid, span, bool(entry.cdw12 & DEAC), bool(entry.cdw12 & FUA))


def _dataset_management(entry: SubmissionEntry, capsule_bytes: int, _config: CardConfig) -> Judgement:
    if entry.cdw10 & 0xFFFF_FF00:
        return Status.INVALID_FIELD
    length_bytes = (entry.cdw10 + 1) * DSM_RANGE_BYTES
    sgl_bytes = entry.sgl.length_bytes
    if length_bytes < sgl_bytes <= 4096 and capsule_bytes in (0, sgl_bytes):
        length_bytes = (
            sgl_bytes  # Linux always sends a whole list of 256 ranges; the number says how many count
        )
    return inbound_status(entry, capsule_bytes, length_bytes) or Inbound(length_bytes)


def _ranges(entry: SubmissionEntry, data: memoryview, namespace: NamespaceInfo) -> IoCommand | Status:
    ranges = decode_ranges(data[: ((entry.cdw10 & 0xFF) + 1) * DSM_RANGE_BYTES])
    if any(item.first_block + item.block_count > namespace.block_count for item in ranges):
        return Status.LBA_OUT_OF_RANGE
    if not entry.cdw11 & DSM_DEALLOCATE:
        return DeallocateCommand(entry.cid, ())
    size = namespace.block_bytes
    spans = tuple(ByteRange(r.first_block * size, r.block_count * size) for r in ranges if r.block_count)
    return DeallocateCommand(entry.cid, spans)


_JUDGES: Final[dict[int, Callable[[SubmissionEntry, int, CardConfig], Judgement]]] = {
    IoOpcode.READ: _read,
    IoOpcode.WRITE: _write,
    IoOpcode.WRITE_ZEROES: _write_zeroes,
    IoOpcode.DATASET_MANAGEMENT: _dataset_management,
}
