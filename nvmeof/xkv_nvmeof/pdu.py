"""The PDUs of NVMe/TCP: one frozen dataclass each, and their codec (NVMe/TCP Transport 1.0, 3.6.2).

A PDU is a header (HLEN bytes), a header digest when granted, padding up to PDO, data, and a data digest when
granted. `encode` makes everything up to the data; data never passes through here. `decode` reads a header whose
length is right; whether the values are allowed is judged in `framing` (form) and by each side's core (meaning).
All integers are little endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from struct import Struct
from typing import Final

from xkv_nvmeof import digest

COMMON_HEADER_BYTES: Final = 8
SQE_BYTES: Final = 64
CQE_BYTES: Final = 16
MAX_HEADER_BYTES: Final = 128
MAX_TERM_DATA_BYTES: Final = 128
"""At most this much of the offending PDU's header travels back in a TermReq (3.6.2.4)."""
MAX_ALIGNMENT_DWORDS: Final = 32


class PduType(IntEnum):
    """PDU-Type field (figure "Common Header")."""

    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM_REQ = 0x02
    C2H_TERM_REQ = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


class PduFlag(IntFlag):
    """FLAGS field; which bits a type has is in `ALLOWED_FLAGS`."""

    HDGST = 1
    DDGST = 2
    LAST = 4
    SUCCESS = 8


class FatalStatus(IntEnum):
    """FES, the Fatal Error Status of a TermReq (3.6.2.4 and 3.6.2.5)."""

    INVALID_HEADER_FIELD = 0x01
    SEQUENCE_ERROR = 0x02
    HEADER_DIGEST_ERROR = 0x03
    OUT_OF_RANGE = 0x04
    LIMIT_EXCEEDED = 0x05
    """Data transfer limit exceeded (from the controller); R2T limit exceeded (from the host)."""
    UNSUPPORTED_PARAMETER = 0x06


HEADER_BYTES: Final[dict[PduType, int]] = {
    PduType.IC_REQ: 128,
    PduType.IC_RESP: 128,
    PduType.H2C_TERM_REQ: 24,
    PduType.C2H_TERM_REQ: 24,
    PduType.CAPSULE_CMD: COMMON_HEADER_BYTES + SQE_BYTES,
    PduType.CAPSULE_RESP: COMMON_HEADER_BYTES + CQE_BYTES,
    PduType.H2C_DATA: 24,
    PduType.C2H_DATA: 24,
    PduType.R2T: 24,
}

DIGEST_FIELD: Final = 11
"""Place of DGST in ICReq and ICResp."""
_DIGESTS: Final = int(PduFlag.HDGST | PduFlag.DDGST)
ALLOWED_FLAGS: Final[dict[PduType, int]] = {
    PduType.IC_REQ: 0,
    PduType.IC_RESP: 0,
    PduType.H2C_TERM_REQ: 0,
    PduType.C2H_TERM_REQ: 0,
    PduType.CAPSULE_CMD: _DIGESTS,
    PduType.CAPSULE_RESP: int(PduFlag.HDGST),
    PduType.H2C_DATA: _DIGESTS | int(PduFlag.LAST),
    PduType.C2H_DATA: _DIGESTS | int(PduFlag.LAST | PduFlag.SUCCESS),
    PduType.R2T: int(PduFlag.HDGST),
}


class PeerViolation(Exception):  # noqa: N818
    """The peer broke the protocol. The connection ends with a TermReq that says how (7.4.7 of the transport).

    `fatal_status` and `field_offset_bytes` (FEI: the place of the bad field, or the header digest received) and
    `header`, the start of the offending PDU, are what the TermReq carries.
    """

    def __init__(
        self, reason: str, fatal_status: FatalStatus, field_offset_bytes: int = 0, header: bytes = b""
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fatal_status = fatal_status
        self.field_offset_bytes = field_offset_bytes
        self.header = header[:MAX_TERM_DATA_BYTES]


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How one direction of a connection lays out its PDUs, once both sides have agreed."""

    header_digest: bool = False
    data_digest: bool = False
    alignment_bytes: int = 4
    """Data starts at a multiple of this: (CPDA + 1) * 4 towards the controller, (HPDA + 1) * 4 to the host."""

    def data_offset_bytes(self, header_bytes: int) -> int:
        """Return PDO for a PDU with data: the first aligned place behind the header and its digest."""
        end = header_bytes + (digest.DIGEST_BYTES if self.header_digest else 0)
        return -(-end // self.alignment_bytes) * self.alignment_bytes


PLAIN: Final = WireFormat()


@dataclass(frozen=True, slots=True)
class ICReq:
    """Initialize Connection Request (3.6.2.2). `max_r2t` counts from 1; `alignment_dwords` is HPDA + 1."""

    alignment_dwords: int = 1
    header_digest: bool = False
    data_digest: bool = False
    max_r2t: int = 1
    pdu_format_version: int = 0


@dataclass(frozen=True, slots=True)
class ICResp:
    """Initialize Connection Response (3.6.2.3): what is granted. `alignment_dwords` is CPDA + 1."""

    alignment_dwords: int = 1
    header_digest: bool = False
    data_digest: bool = False
    max_h2c_data_bytes: int = 131_072
    pdu_format_version: int = 0


@dataclass(frozen=True, slots=True)
class H2CTermReq:
    """Host to Controller Terminate Connection Request (3.6.2.4). Its data, `header`, is encoded with it."""

    fatal_status: int
    field_offset_bytes: int = 0
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class C2HTermReq:
    """Controller to Host Terminate Connection Request (3.6.2.5). Its data, `header`, is encoded with it."""

    fatal_status: int
    field_offset_bytes: int = 0
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class CapsuleCmd:
    """Command Capsule (3.6.2.6): a submission queue entry and in-capsule data."""

    sqe: bytes
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CapsuleResp:
    """Response Capsule (3.6.2.7): a completion queue entry."""

    cqe: bytes


@dataclass(frozen=True, slots=True)
class H2CData:
    """Host to Controller Data Transfer (3.6.2.8)."""

    command_id: int
    transfer_tag: int
    offset_bytes: int
    data_bytes: int
    last: bool


@dataclass(frozen=True, slots=True)
class C2HData:
    """Controller to Host Data Transfer (3.6.2.9). `success`: no response capsule follows, the status is 0."""

    command_id: int
    offset_bytes: int
    data_bytes: int
    last: bool
    success: bool


@dataclass(frozen=True, slots=True)
class R2T:
    """Ready to Transfer (3.6.2.10)."""

    command_id: int
    transfer_tag: int
    offset_bytes: int
    data_bytes: int


Pdu = ICReq | ICResp | H2CTermReq | C2HTermReq | CapsuleCmd | CapsuleResp | H2CData | C2HData | R2T

COMMON_HEADER: Final = Struct("<BBBBI")
_INIT: Final = Struct("<BBBBIHBBI112x")
_TERM: Final = Struct("<BBBBIHI10x")
_CMD: Final = Struct("<BBBBI64s")
_RESP: Final = Struct("<BBBBI16s")
_DATA: Final = Struct("<BBBBIHHII4x")
"""H2CData, C2HData and R2T share one shape: CCCID, TTAG (reserved in C2HData), offset, length."""
_PLAIN_CMD: Final = COMMON_HEADER.pack(PduType.CAPSULE_CMD, 0, 72, 0, 72)
"""The header of a command capsule without data and digests."""


def _finish(header: bytes, wire: WireFormat, pdo: int) -> bytes:
    """Add the header digest and the padding up to the data at `pdo` (0: no data, no padding)."""
    if wire.header_digest:
        header += digest.to_wire(digest.crc32c(header))
    return header.ljust(pdo, b"\0")


def encode_command(sqe: bytes | bytearray, data_bytes: int, wire: WireFormat) -> bytes:
    """Return a CapsuleCmd up to its in-capsule data; `data_bytes` of it (and its digest) must follow."""
    if not data_bytes and not wire.header_digest:
        return _PLAIN_CMD + sqe
    flags = 1 if wire.header_digest else 0
    end = 72 + (4 if wire.header_digest else 0)
    if not data_bytes:
        return _finish(_CMD.pack(PduType.CAPSULE_CMD, flags, 72, 0, end, sqe), wire, 0)
    pdo = wire.data_offset_bytes(72)
    plen = pdo + data_bytes
    if wire.data_digest:
        flags |= 2
        plen += 4
    return _finish(_CMD.pack(PduType.CAPSULE_CMD, flags, 72, pdo, plen, sqe), wire, pdo)


def encode_response(cqe: bytes | bytearray, wire: WireFormat) -> bytes:
    """Return a whole CapsuleResp."""
    if not wire.header_digest:
        return _RESP.pack(PduType.CAPSULE_RESP, 0, 24, 0, 24, cqe)
    return _finish(_RESP.pack(PduType.CAPSULE_RESP, 1, 24, 0, 28, cqe), wire, 0)


def _encode_data(
    kind: int, flags: int, command_id: int, tag: int, offset_bytes: int, data_bytes: int, wire: WireFormat
) -> bytes:
    pdo = wire.data_offset_bytes(24)
    plen = pdo + data_bytes
    if wire.data_digest:
        flags |= 2
        plen += 4
    if not wire.header_digest:
        return _DATA.pack(kind, flags, 24, pdo, plen, command_id, tag, offset_bytes, data_bytes).ljust(
            pdo, b"\0"
        )
    header = _DATA.pack(kind, flags | 1, 24, pdo, plen, command_id, tag, offset_bytes, data_bytes)
    return _finish(header, wire, pdo)


def h2c_data_header(
    command_id: int, tag: int, offset_bytes: int, data_bytes: int, wire: WireFormat, *, last: bool
) -> bytes:
    """Return an H2CData up to its data; the data (and its digest) must follow."""
    return _encode_data(6, 4 if last else 0, command_id, tag, offset_bytes, data_bytes, wire)


def encode_h2c_data(pdu: H2CData, wire: WireFormat) -> bytes:
    """Return an H2CData up to its data; the data (and its digest) must follow."""
    where = pdu.command_id, pdu.transfer_tag, pdu.offset_bytes, pdu.data_bytes
    return h2c_data_header(*where, wire, last=pdu.last)


def encode_c2h_data(pdu: C2HData, wire: WireFormat) -> bytes:
    """Return a C2HData up to its data; the data (and its digest) must follow."""
    flags = (4 if pdu.last else 0) | (8 if pdu.success else 0)
    return _encode_data(7, flags, pdu.command_id, 0, pdu.offset_bytes, pdu.data_bytes, wire)


def _encode_term(kind: PduType, pdu: H2CTermReq | C2HTermReq) -> bytes:
    data = pdu.header[:MAX_TERM_DATA_BYTES]
    pdo = 24 if data else 0
    return _TERM.pack(kind, 0, 24, pdo, 24 + len(data), pdu.fatal_status, pdu.field_offset_bytes) + data


def _encode_init(kind: PduType, pdu: ICReq | ICResp, value: int) -> bytes:
    digests = (1 if pdu.header_digest else 0) | (2 if pdu.data_digest else 0)
    return _INIT.pack(kind, 0, 128, 0, 128, pdu.pdu_format_version, pdu.alignment_dwords - 1, digests, value)


def encode(pdu: Pdu, wire: WireFormat = PLAIN) -> bytes:
    """Return `pdu` as it goes onto the wire, up to where its data starts (a TermReq: with its data).

    The connection's first two PDUs and TermReqs have no digest and no padding, whatever `wire` says (3.3.1.1).
    """
    match pdu:
        case ICReq():
            return _encode_init(PduType.IC_REQ, pdu, pdu.max_r2t - 1)
        case ICResp():
            return _encode_init(PduType.IC_RESP, pdu, pdu.max_h2c_data_bytes)
        case H2CTermReq():
            return _encode_term(PduType.H2C_TERM_REQ, pdu)
        case C2HTermReq():
            return _encode_term(PduType.C2H_TERM_REQ, pdu)
        case CapsuleCmd():
            return encode_command(pdu.sqe, pdu.data_bytes, wire)
        case CapsuleResp():
            return encode_response(pdu.cqe, wire)
        case H2CData():
            return encode_h2c_data(pdu, wire)
        case C2HData():
            return encode_c2h_data(pdu, wire)
        case R2T():
            flags = 1 if wire.header_digest else 0
            end = 24 + (4 if wire.header_digest else 0)
            fields = (pdu.command_id, pdu.transfer_tag, pdu.offset_bytes, pdu.data_bytes)
            return _finish(_DATA.pack(PduType.R2T, flags, 24, 0, end, *fields), wire, 0)


def decode(kind: PduType, data: bytes | bytearray | memoryview, start: int, pdu_data_bytes: int) -> Pdu:
    """Return the PDU whose header starts at `start` of `data` (at least HLEN bytes follow there).

    `pdu_data_bytes` is what framing worked out for in-capsule data. A TermReq comes without its data.
    """
    match kind:
        case PduType.C2H_DATA:
            _, flags, _, _, _, cid, _, offset, length = _DATA.unpack_from(data, start)
            return C2HData(cid, offset, length, flags & 4 != 0, flags & 8 != 0)
        case PduType.CAPSULE_RESP:
            return CapsuleResp(_RESP.unpack_from(data, start)[5])
        case PduType.R2T:
            return R2T(*_DATA.unpack_from(data, start)[5:])
        case PduType.CAPSULE_CMD:
            return CapsuleCmd(_CMD.unpack_from(data, start)[5], pdu_data_bytes)
        case PduType.H2C_DATA:
            _, flags, _, _, _, cid, tag, offset, length = _DATA.unpack_from(data, start)
            return H2CData(cid, tag, offset, length, flags & 4 != 0)
        case PduType.IC_REQ:
            pfv, pda, bits, max_r2t = _INIT.unpack_from(data, start)[5:]
            return ICReq(pda + 1, bits & 1 != 0, bits & 2 != 0, max_r2t + 1, pfv)
        case PduType.IC_RESP:
            pfv, pda, bits, limit = _INIT.unpack_from(data, start)[5:]
            return ICResp(pda + 1, bits & 1 != 0, bits & 2 != 0, limit, pfv)
        case PduType.H2C_TERM_REQ:
            return H2CTermReq(*_TERM.unpack_from(data, start)[5:])
        case PduType.C2H_TERM_REQ:
            return C2HTermReq(*_TERM.unpack_from(data, start)[5:])
