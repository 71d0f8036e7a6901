"""Submission and completion queue entries, and the data that commands carry.

Layouts: Base 3.3.3.1 (entry), 3.3.3.2 (completion), 4.1.2 (SGL), 6 (Fabrics); NVM 3 (I/O commands).

    offset | size | type  | field of a submission entry
    -------|------|-------|----------------------------
    0      | 1    | u8    | opcode
    1      | 1    | u8    | flags: FUSE (1:0), PSDT (7:6)
    2      | 2    | u16   | command identifier
    4      | 4    | u32   | namespace id (byte 4 is the type of a Fabrics command)
    8      | 8    | u32x2 | command dwords 2, 3
    16     | 8    | u64   | metadata pointer
    24     | 16   | SGL   | data pointer
    40     | 24   | u32x6 | command dwords 10..15
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final, NewType

from xkv_nvmeof.spec import (
    CONNECT_DATA_BYTES,
    CQE_BYTES,
    DSM_MAX_RANGES,
    DSM_RANGE_BYTES,
    FABRICS_OPCODE,
    PSDT_SGL,
    SQE_BYTES,
    FabricsType,
    SglType,
    Status,
    status_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

CommandId = NewType("CommandId", int)
QueueId = NewType("QueueId", int)

_SQE: Final = Struct("<BBHIIIQQI3xB6I")
CQE: Final = Struct("<IIHHHH")
"""Completion entry: dwords 0 and 1, SQHD, SQID, CID, status field with phase bit."""
_SGL: Final = Struct("<QI3xB")
_CONNECT_DATA: Final = Struct("<16sH238x256s256s256x")
_DSM_RANGE: Final = Struct("<IIQ")
assert _SQE.size == SQE_BYTES
assert CQE.size == CQE_BYTES
assert _CONNECT_DATA.size == CONNECT_DATA_BYTES
assert _DSM_RANGE.size == DSM_RANGE_BYTES


class CommandFormatError(ValueError):
    """Bytes that are no well-formed entry or command data. The sender is at fault."""


@dataclass(frozen=True, slots=True)
class Sgl:
    """One SGL descriptor, 16 bytes. `address` is an offset in bytes for the in-capsule type (Base 4.1.2)."""

    address: int
    length_bytes: int
    kind: int

    def to_bytes(self) -> bytes:
        """Encode."""
        return _SGL.pack(self.address, self.length_bytes, self.kind)

    @classmethod
    def from_bytes(cls, data: bytes) -> Sgl:
        """Decode 16 bytes."""
        return cls(*_SGL.unpack(data))

    @classmethod
    def in_capsule(cls, length_bytes: int, offset_bytes: int = 0) -> Sgl:
        """Data travels in the capsule, `offset_bytes` after its start (ICDOFF = 0)."""
        return cls(offset_bytes, length_bytes, SglType.IN_CAPSULE_OFFSET)

    @classmethod
    def transport(cls, length_bytes: int) -> Sgl:
        """Data travels in PDUs of its own (TCP 3.3.1.3)."""
        return cls(0, length_bytes, SglType.TRANSPORT_DATA_BLOCK)


NO_DATA: Final = Sgl.transport(0)
"""Data pointer of a command without data: a transport data block of length zero."""


@dataclass(frozen=True, slots=True)
class SubmissionEntry:
    """A submission queue entry, fields as they stand on the wire (Base 3.3.3.1)."""

    opcode: int
    cid: int
    nsid: int = 0
    sgl: Sgl = NO_DATA
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0
    cdw13: int = 0
    cdw14: int = 0
    cdw15: int = 0
    flags: int = PSDT_SGL
    cdw2: int = 0
    cdw3: int = 0
    metadata_pointer: int = 0

    @property
    def fabrics_type(self) -> int:
        """Type of a Fabrics command (byte 4)."""
        return self.nsid & 0xFF

    def to_bytes(self) -> bytes:
        """Encode, 64 bytes."""
        return _SQE.pack(
            self.opcode,
            self.flags,
            self.cid,
            self.nsid,
            self.cdw2,
            self.cdw3,
            self.metadata_pointer,
            self.sgl.address,
            self.sgl.length_bytes,
            self.sgl.kind,
            self.cdw10,
            self.cdw11,
            self.cdw12,
            self.cdw13,
            self.cdw14,
            self.cdw15,
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> SubmissionEntry:
        """Decode exactly 64 bytes.

        Raises:
            CommandFormatError: the length is wrong.
        """
        if len(data) != SQE_BYTES:
            raise CommandFormatError(f"a submission entry has {SQE_BYTES} bytes, not {len(data)}")
        opcode, flags, cid, nsid, cdw2, cdw3, mptr, address, length_bytes, kind, *dwords = _SQE.unpack(data)
        sgl = Sgl(address, length_bytes, kind)
        d10, d11, d12, d13, d14, d15 = dwords
        return cls(opcode, cid, nsid, sgl, d10, d11, d12, d13, d14, d15, flags, cdw2, cdw3, mptr)


@dataclass(frozen=True, slots=True)
class CompletionEntry:
    """A completion queue entry (Base 3.3.3.2). `status` is SCT * 256 + SC, possibly unknown to `Status`.

    The phase bit does not exist over Fabrics: it is sent as zero and ignored (Base 3.3.3.2.1).
    """

    cid: int
    status: int = Status.SUCCESS
    sqhd: int = 0
    sqid: int = 0
    dw0: int = 0
    dw1: int = 0
    do_not_retry: bool = False
    more: bool = False
    retry_delay: int = 0

    @property
    def ok(self) -> bool:
        """Whether the command succeeded."""
        return self.status == Status.SUCCESS

    @property
    def result(self) -> int:
        """Dwords 0 and 1 as one 64-bit value (Property Get)."""
        return self.dw0 | self.dw1 << 32

    @property
    def status_text(self) -> str:
        """The status for people."""
        return status_name(self.status)

    def to_bytes(self) -> bytes:
        """Encode, 16 bytes."""
        status = (
            (self.status & 0xFF) << 1
            | (self.status >> 8 & 7) << 9
            | self.retry_delay << 12
            | int(self.more) << 14
            | int(self.do_not_retry) << 15
        )
        return CQE.pack(self.dw0, self.dw1, self.sqhd, self.sqid, self.cid, status)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> CompletionEntry:
        """Decode exactly 16 bytes.

        Raises:
            CommandFormatError: the length is wrong.
        """
        if len(data) != CQE_BYTES:
            raise CommandFormatError(f"a completion entry has {CQE_BYTES} bytes, not {len(data)}")
        dw0, dw1, sqhd, sqid, cid, field = CQE.unpack(data)
        status = (field >> 1 & 0xFF) | (field >> 9 & 7) << 8
        return cls(
            cid, status, sqhd, sqid, dw0, dw1, bool(field >> 15), bool(field >> 14 & 1), field >> 12 & 3
        )


@dataclass(frozen=True, slots=True)
class ConnectCommand:
    """Fabrics Connect (Base 6.3). `sqsize` is zero-based as on the wire; `kato_ms` in milliseconds, 0 = off."""

    cid: int
    qid: int
    sqsize: int
    kato_ms: int = 0
    attributes: int = 0
    record_format: int = 0

    def to_entry(self) -> SubmissionEntry:
        """Encode as an entry; the data is always in the capsule (TCP 3.3.1.3)."""
        return SubmissionEntry(
            FABRICS_OPCODE,
            self.cid,
            FabricsType.CONNECT,
            Sgl.in_capsule(CONNECT_DATA_BYTES),
            self.record_format | self.qid << 16,
            self.sqsize | self.attributes << 16,
            self.kato_ms,
        )

    @classmethod
    def from_entry(cls, entry: SubmissionEntry) -> ConnectCommand:
        """Decode from an entry already known to be a Connect."""
        return cls(
            entry.cid,
            entry.cdw10 >> 16,
            entry.cdw11 & 0xFFFF,
            entry.cdw12,
            entry.cdw11 >> 16 & 0xFF,
            entry.cdw10 & 0xFFFF,
        )


def _nqn_text(field: bytes) -> str:
    text, terminator, _rest = field.partition(b"\0")
    if not terminator:
        raise CommandFormatError("a qualified name without a terminating NUL")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandFormatError("a qualified name that is not UTF-8") from error


@dataclass(frozen=True, slots=True)
class ConnectData:
    """Data of Connect, 1024 bytes (Base 6.3, Figure 381). `hostid` is 16 bytes."""

    hostid: bytes
    cntlid: int
    subnqn: str
    hostnqn: str

    def to_bytes(self) -> bytes:
        """Encode, 1024 bytes."""
        return _CONNECT_DATA.pack(self.hostid, self.cntlid, self.subnqn.encode(), self.hostnqn.encode())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ConnectData:
        """Decode exactly 1024 bytes.

        Raises:
            CommandFormatError: the length is wrong, or a name is not NUL-terminated UTF-8.
        """
        if len(data) != CONNECT_DATA_BYTES:
            raise CommandFormatError(f"Connect data has {CONNECT_DATA_BYTES} bytes, not {len(data)}")
        hostid, cntlid, subnqn, hostnqn = _CONNECT_DATA.unpack(data)
        return cls(hostid, cntlid, _nqn_text(subnqn), _nqn_text(hostnqn))


@dataclass(frozen=True, slots=True)
class BlockRange:
    """One range of Dataset Management: `block_count` is one-based, as on the wire (NVM 3.2.3)."""

    first_block: int
    block_count: int


def encode_ranges(ranges: Iterable[BlockRange]) -> bytes:
    """Encode the range list of Dataset Management, 16 bytes each (NVM 3.2.3, Figure 41)."""
    return b"".join(_DSM_RANGE.pack(0, item.block_count, item.first_block) for item in ranges)


def decode_ranges(data: bytes | bytearray | memoryview) -> list[BlockRange]:
    """Decode a range list.

    Raises:
        CommandFormatError: not a whole number of ranges, none, or more than 256.
    """
    if len(data) % DSM_RANGE_BYTES or not 0 < len(data) <= DSM_MAX_RANGES * DSM_RANGE_BYTES:
        raise CommandFormatError(f"a range list of {len(data)} bytes")
    return [BlockRange(first, count) for _attributes, count, first in _DSM_RANGE.iter_unpack(data)]
