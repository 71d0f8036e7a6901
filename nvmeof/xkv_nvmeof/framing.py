"""Incremental parser of one direction of an NVMe/TCP connection (NVMe/TCP Transport 1.0, 3.3.1 and 3.6.2).

It judges the form of a PDU (type, lengths, flags, padding, header digest) and never holds more than one header:
data is handed on as slices of what was received, so nothing is buffered whatever PLEN says. The owner of the socket

    reader.feed(chunk)                      whatever was received
    while (event := reader.next_event()) is not None: ...

gets a PDU dataclass, then, when the PDU carries data, memoryviews of consecutive data (valid until the next
`feed`), and then a `DataEnd`. When `next_event` returned None and `data_pending_bytes` is not zero, the next bytes of
the connection are data: they may be received straight into their owner's memory and told with `data_placed`.
The result does not depend on how the bytes were cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from xkv_nvmeof import digest
from xkv_nvmeof.pdu import (
    ALLOWED_FLAGS,
    COMMON_HEADER,
    COMMON_HEADER_BYTES,
    HEADER_BYTES,
    MAX_TERM_DATA_BYTES,
    PLAIN,
    C2HTermReq,
    FatalStatus,
    H2CTermReq,
    Pdu,
    PduType,
    PeerViolation,
    WireFormat,
    decode,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPE_FIELD: Final = 0
_FLAGS_FIELD: Final = 1
_HLEN_FIELD: Final = 2
_PDO_FIELD: Final = 3
_PLEN_FIELD: Final = 4
_DATAL_FIELD: Final = 16
_TYPES: Final[dict[int, PduType]] = {int(kind): kind for kind in PduType}
_HEADER_BYTES: Final[dict[int, int]] = {int(kind): size for kind, size in HEADER_BYTES.items()}
"""By plain numbers: making an enum member of each number received would cost a microsecond, hashing one half of it."""
_FORBIDDEN_FLAGS: Final[dict[int, int]] = {int(kind): ~flags for kind, flags in ALLOWED_FLAGS.items()}
_MAX_HEADER_REGION_BYTES: Final = 255
"""PDO is one byte, so header, digest and padding never take more."""


class DataEnd(Enum):
    """All data of the current PDU was received."""

    INTACT = auto()
    CORRUPT = auto()
    """The data digest does not match: the command is at fault, the connection is not (3.3.1.1)."""


Event = Pdu | memoryview | DataEnd


@dataclass(frozen=True, slots=True)
class FramingLimits:
    """What the peer may send. `max_data_bytes` bounds the data of one PDU of each type; a type not in it: none."""

    max_data_bytes: Mapping[PduType, int]
    setup: PduType
    """The peer's one PDU before anything else: ICReq or ICResp."""
    terminate: PduType
    """The peer's TermReq, allowed at any time."""
    plain: frozenset[PduType] = field(default=frozenset())
    """Types without data that are allowed after the setup, besides those in `max_data_bytes`."""


def host_limits(max_transfer_bytes: int) -> FramingLimits:
    """Return what a controller may send to a host that asks for at most `max_transfer_bytes` at once."""
    return FramingLimits(
        {PduType.C2H_DATA: max_transfer_bytes},
        PduType.IC_RESP,
        PduType.C2H_TERM_REQ,
        frozenset({PduType.CAPSULE_RESP, PduType.R2T}),
    )


def controller_limits(max_in_capsule_bytes: int, max_h2c_data_bytes: int) -> FramingLimits:
    """Return what a host may send to a controller with that in-capsule room and that MAXH2CDATA."""
    return FramingLimits(
        {PduType.CAPSULE_CMD: max_in_capsule_bytes, PduType.H2C_DATA: max_h2c_data_bytes},
        PduType.IC_REQ,
        PduType.H2C_TERM_REQ,
    )


class _Stage(Enum):
    HEADER = auto()
    PADDING = auto()
    DATA = auto()
    DATA_DIGEST = auto()
    TERM = auto()


class FrameReader:
    """Parses what one peer sends. Pure; raises `PeerViolation` once, after which it must not be used any more.

    Starts in the setup phase: only the peer's ICReq or ICResp (or TermReq) is accepted, and after that nothing
    until `establish` tells how the rest is laid out; bytes already received wait.
    """

    def __init__(self, limits: FramingLimits) -> None:
        self._limits = limits
        self._max_data_bytes = {int(kind): limit for kind, limit in limits.max_data_bytes.items()}
        self._max_data_bytes[int(limits.terminate)] = MAX_TERM_DATA_BYTES
        self._after_setup = frozenset(map(int, (*limits.max_data_bytes, *limits.plain, limits.terminate)))
        self.wire = PLAIN
        """How the peer lays out its PDUs."""
        self._established = False
        self._plain = False
        self._setup_seen = False
        self._stage = _Stage.HEADER
        self._chunk = memoryview(b"")
        self._at = 0
        self._head = bytearray()
        self._skip_bytes = 0
        self._payload_bytes = 0
        self._term: H2CTermReq | C2HTermReq | None = None
        self._crc = 0
        self._pdu_digest = False
        self.data_pending_bytes = 0
        """The next bytes of the connection are data of the current PDU: this many."""

    def establish(self, wire: WireFormat) -> None:
        """Go on after the setup with the digests that were granted and the alignment that was asked for."""
        assert self._setup_seen
        assert not self._established
        self.wire = wire
        self._established = True
        self._plain = wire == PLAIN

    @property
    def mid_pdu(self) -> bool:
        """Whether the peer stopped in the middle of a PDU."""
        return self._stage is not _Stage.HEADER or bool(self._head)

    def feed(self, chunk: memoryview) -> None:
        """Take the next bytes of the connection. The previous ones must have been consumed."""
        if self._at < len(self._chunk):
            # Only bytes behind the setup PDU wait; a sane peer sends none, so this join is rare and bounded.
            chunk = memoryview(bytes(self._chunk[self._at :]) + bytes(chunk))
        self._chunk = chunk
        self._at = 0

    def next_event(self) -> Event | None:
        """Return the next PDU, data slice or end of data; None: more bytes are needed.

        Raises:
            PeerViolation: the peer broke the protocol.
        """
        while True:
            stage = self._stage
            if stage is _Stage.HEADER:
                event: Event | None = self._next_header()
                if event is not None or self._stage is _Stage.HEADER:
                    return event
            elif stage is _Stage.DATA:
                if self.data_pending_bytes:
                    return self._next_data()
                if not self._pdu_digest:
                    self._stage = _Stage.HEADER
                    return DataEnd.INTACT
                self._stage = _Stage.DATA_DIGEST
            elif stage is _Stage.PADDING:
                if not self._skip_padding():
                    return None
            elif stage is _Stage.TERM:
                return self._next_term()
            else:
                return self._next_digest()

    @property
    def plain(self) -> bool:
        """Whether a PDU starts where `feed` comes next, and PDUs are headers and data alone: no digests, no padding."""
        return self._plain and self._stage is _Stage.HEADER and not self._head

    def begin_data(self, data_bytes: int) -> None:
        """Tell that the owner handled a header itself, and the next `data_bytes` of the connection are its data.

        Only while `plain`. What the owner took must not be fed.
        """
        self._pdu_digest = False
        self._stage = _Stage.DATA
        self.data_pending_bytes = data_bytes

    def plain_placed(self, count: int) -> bool:
        """Tell that `count` bytes of data without a digest were received past this parser; True: it was the last."""
        self.data_pending_bytes -= count
        if self.data_pending_bytes:
            return False
        self._stage = _Stage.HEADER
        return True

    def data_placed(self, *views: memoryview) -> None:
        """Tell that the next data bytes were received into `views`, past this parser."""
        assert self._at == len(self._chunk)
        length = sum(map(len, views))
        assert length <= self.data_pending_bytes
        if self._pdu_digest:
            self._crc = digest.crc32c_of(views, self._crc)
        self.data_pending_bytes -= length

    # -- header ------------------------------------------------------------------------------------------------

    def _next_header(self) -> Pdu | None:
        chunk, at, head = self._chunk, self._at, self._head
        if self._setup_seen and not self._established:
            return None
        available = len(chunk) - at
        if not head:
            if available >= COMMON_HEADER_BYTES:
                need = self._header_need(chunk, at)
                if available >= need:
                    self._at = at + need
                    return self._accept(chunk, at)
            elif not available:
                return None
        need = COMMON_HEADER_BYTES if len(head) < COMMON_HEADER_BYTES else self._header_need(head, 0)
        while len(head) < need:
            take = chunk[self._at : self._at + need - len(head)]
            if not take:
                return None
            head += take
            self._at += len(take)
            if len(head) == COMMON_HEADER_BYTES:
                need = self._header_need(head, 0)
        self._head = bytearray()
        return self._accept(memoryview(head), 0)

    def _header_need(self, data: memoryview | bytearray, at: int) -> int:
        """Return the length of header and header digest, from the type; refuse a wrong type or HLEN at once."""
        number = data[at]
        limits = self._limits
        if self._established:
            if number not in self._after_setup:
                status = (
                    FatalStatus.SEQUENCE_ERROR if number == limits.setup else FatalStatus.INVALID_HEADER_FIELD
                )
                raise self._violation(f"PDU type {number:#04x}", status, _TYPE_FIELD, data, at)
        elif number not in (limits.setup, limits.terminate):
            known = number in limits.max_data_bytes or number in limits.plain
            status = FatalStatus.SEQUENCE_ERROR if known else FatalStatus.INVALID_HEADER_FIELD
            raise self._violation(f"PDU type {number:#04x} before the setup", status, _TYPE_FIELD, data, at)
        header_bytes: int = _HEADER_BYTES[number]
        if data[at + 2] != header_bytes:
            reason = f"HLEN {data[at + 2]} in a PDU of type {number:#04x}"
            raise self._violation(reason, FatalStatus.INVALID_HEADER_FIELD, _HLEN_FIELD, data, at)
        return header_bytes + (digest.DIGEST_BYTES if self._digested(number) else 0)

    def _digested(self, number: int) -> bool:
        return self.wire.header_digest and number != self._limits.terminate

    def _accept(self, data: memoryview, at: int) -> Pdu | None:
        """Judge a complete header and go to what follows it."""
        number, flags, header_bytes, pdo, plen = COMMON_HEADER.unpack_from(data, at)
        kind = _TYPES[number]
        limits = self._limits
        region = header_bytes
        digested = self._digested(number)
        if digested:
            received = digest.from_wire(data, at + header_bytes)
            if digest.crc32c(data[at : at + header_bytes]) != received:
                reason = "the header digest does not match"
                raise self._violation(reason, FatalStatus.HEADER_DIGEST_ERROR, received, data, at)
            region += digest.DIGEST_BYTES
        if flags & _FORBIDDEN_FLAGS[number] or bool(flags & 1) != digested:
            reason = f"flags {flags:#04x} in {kind.name}"
            raise self._violation(reason, FatalStatus.INVALID_HEADER_FIELD, _FLAGS_FIELD, data, at)
        limit = self._max_data_bytes.get(number)
        if limit is None:
            if plen != region:
                raise self._bad_length(kind, plen, data, at)
            if number == limits.setup:
                self._setup_seen = True
            return decode(kind, data, at, 0)
        return self._accept_data(kind, limit, region, (flags, pdo, plen), data, at)

    def _accept_data(
        self, kind: PduType, limit: int, region: int, fields: tuple[int, int, int], data: memoryview, at: int
    ) -> Pdu | None:
        """Judge the lengths of a PDU that may carry data."""
        flags, pdo, plen = fields
        term = kind == self._limits.terminate
        optional = term or kind is PduType.CAPSULE_CMD
        self._pdu_digest = self.wire.data_digest and not term
        if optional and plen == region and not flags & 2:
            return decode(kind, data, at, 0)
        alignment = 1 if term else self.wire.alignment_bytes
        if term and pdo == 0:
            pdo = region
        if pdo < region or pdo % alignment or pdo > _MAX_HEADER_REGION_BYTES:
            reason = f"PDO {pdo} in {kind.name}"
            raise self._violation(reason, FatalStatus.INVALID_HEADER_FIELD, _PDO_FIELD, data, at)
        if bool(flags & 2) != self._pdu_digest:
            reason = f"flags {flags:#04x} in {kind.name}"
            raise self._violation(reason, FatalStatus.INVALID_HEADER_FIELD, _FLAGS_FIELD, data, at)
        length = plen - pdo - (digest.DIGEST_BYTES if self._pdu_digest else 0)
        if length <= 0:
            raise self._bad_length(kind, plen, data, at)
        if length > limit:
            reason = f"{length} bytes of data in {kind.name}, {limit} at most"
            status = FatalStatus.INVALID_HEADER_FIELD if term else FatalStatus.LIMIT_EXCEEDED
            raise self._violation(reason, status, _PLEN_FIELD, data, at)
        pdu = decode(kind, data, at, length)
        if not optional and pdu.data_bytes != length:  # type: ignore[union-attr]
            reason = f"DATAL and PLEN of {kind.name} do not fit"
            raise self._violation(reason, FatalStatus.INVALID_HEADER_FIELD, _DATAL_FIELD, data, at)
        if isinstance(pdu, H2CTermReq | C2HTermReq):
            self._term = pdu
            self._skip_bytes = length
            self._stage = _Stage.TERM
            return None
        self._crc = 0
        self._skip_bytes = pdo - region
        self._payload_bytes = length
        if self._skip_bytes:
            self._stage = _Stage.PADDING
        else:
            self.data_pending_bytes = length
            self._stage = _Stage.DATA
        return pdu

    def _bad_length(self, kind: PduType, plen: int, data: memoryview, at: int) -> PeerViolation:
        reason = f"PLEN {plen} in {kind.name}"
        return self._violation(reason, FatalStatus.INVALID_HEADER_FIELD, _PLEN_FIELD, data, at)

    @staticmethod
    def _violation(
        reason: str, status: FatalStatus, field_offset_bytes: int, data: memoryview | bytearray, at: int
    ) -> PeerViolation:
        return PeerViolation(reason, status, field_offset_bytes, bytes(data[at : at + 24]))

    # -- what follows a header -----------------------------------------------------------------------------------

    def _skip_padding(self) -> bool:
        take = min(self._skip_bytes, len(self._chunk) - self._at)
        self._at += take
        self._skip_bytes -= take
        if self._skip_bytes:
            return False
        self.data_pending_bytes = self._payload_bytes
        self._stage = _Stage.DATA
        return True

    def _next_data(self) -> memoryview | None:
        at = self._at
        view = self._chunk[at : at + self.data_pending_bytes]
        length = len(view)
        if not length:
            return None
        self._at = at + length
        self.data_pending_bytes -= length
        if self._pdu_digest:
            self._crc = digest.crc32c(view, self._crc)
        return view

    def _next_term(self) -> H2CTermReq | C2HTermReq | None:
        head = self._head
        take = self._chunk[self._at : self._at + self._skip_bytes]
        head += take
        self._at += len(take)
        self._skip_bytes -= len(take)
        if self._skip_bytes:
            return None
        term = self._term
        assert term is not None
        self._head = bytearray()
        self._stage = _Stage.HEADER
        return type(term)(term.fatal_status, term.field_offset_bytes, bytes(head))

    def _next_digest(self) -> DataEnd | None:
        head = self._head
        take = self._chunk[self._at : self._at + digest.DIGEST_BYTES - len(head)]
        head += take
        self._at += len(take)
        if len(head) < digest.DIGEST_BYTES:
            return None
        matches = digest.from_wire(head) == self._crc
        self._head = bytearray()
        self._stage = _Stage.HEADER
        return DataEnd.INTACT if matches else DataEnd.CORRUPT
