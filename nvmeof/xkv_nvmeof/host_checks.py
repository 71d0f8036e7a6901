"""Judgements of what a controller sends to a host: is it allowed, given what is known of the command?

Each raises `PeerViolation` with the status, and the place of the bad field, that the TermReq then carries
(NVMe/TCP Transport 1.0, 3.6.2.4 for the codes; 3.3.2 for the rules of data transfers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.host_settings import NegotiationRefused, QueueSettings
from xkv_nvmeof.pdu import (
    DIGEST_FIELD,
    MAX_ALIGNMENT_DWORDS,
    R2T,
    C2HData,
    CapsuleResp,
    FatalStatus,
    ICResp,
    Pdu,
    PeerViolation,
    WireFormat,
    encode,
)

if TYPE_CHECKING:
    from xkv_nvmeof.host_command import Exchange

_FLAGS: Final = 1
_PFV: Final = 8
_CPDA: Final = 10
_MAXH2CDATA: Final = 12
_DATAO: Final = 12
_DATAL: Final = 16
_SQHD: Final = 16
_MIN_MAXH2CDATA: Final = 4096
"""MAXH2CDATA is at least this (3.6.2.3)."""
CID_OF_DATA: Final = 8
"""Place of CCCID in C2HData and R2T."""
CID_OF_RESPONSE: Final = 20
"""Place of the command id in a CapsuleResp."""


def _violation(reason: str, status: FatalStatus, place: int, pdu: Pdu, wire: WireFormat) -> PeerViolation:
    return PeerViolation(reason, status, place, encode(pdu, wire))


def not_in_flight(cid: int, pdu: C2HData | R2T | CapsuleResp, place: int, wire: WireFormat) -> PeerViolation:
    """Return the violation of naming a command that is not in flight."""
    reason = f"{type(pdu).__name__} for command {cid:#06x}, which is not in flight"
    return _violation(reason, FatalStatus.INVALID_HEADER_FIELD, place, pdu, wire)


def judge_setup(settings: QueueSettings, granted: ICResp) -> None:
    """Judge the ICResp (3.6.2.3).

    Raises:
        PeerViolation: a field has an impossible value.
        NegotiationRefused: a required digest is not granted.
    """
    header = encode(granted)
    invalid = FatalStatus.INVALID_HEADER_FIELD
    if granted.pdu_format_version != 0:
        raise PeerViolation("PDU format version of ICResp", FatalStatus.UNSUPPORTED_PARAMETER, _PFV, header)
    if granted.alignment_dwords > MAX_ALIGNMENT_DWORDS:
        raise PeerViolation("CPDA of ICResp", invalid, _CPDA, header)
    if granted.max_h2c_data_bytes < _MIN_MAXH2CDATA or granted.max_h2c_data_bytes % 4:
        raise PeerViolation("MAXH2CDATA of ICResp", invalid, _MAXH2CDATA, header)
    for name, policy, grant in (
        ("header", settings.header_digest, granted.header_digest),
        ("data", settings.data_digest, granted.data_digest),
    ):
        if grant and policy is DigestPolicy.OFF:
            raise PeerViolation(f"{name} digest granted unasked", invalid, DIGEST_FIELD, header)
        if policy is DigestPolicy.REQUIRED and not grant:
            raise NegotiationRefused(f"the {name} digest is required and the controller does not grant it")


def judge_data(exchange: Exchange, pdu: C2HData, wire: WireFormat, *, flow_control: bool) -> None:
    """Judge the header of read data: continuous, in bounds, LAST exactly at the end (3.3.2.1).

    SUCCESS needs LAST, and stands in for a completion only without submission queue flow control.
    """
    if pdu.success and (not pdu.last or flow_control):
        reason = "C2HData with SUCCESS out of place"
        raise _violation(reason, FatalStatus.INVALID_HEADER_FIELD, _FLAGS, pdu, wire)
    if exchange.saw_last:
        raise _violation("C2HData after the last one", FatalStatus.SEQUENCE_ERROR, 0, pdu, wire)
    if pdu.offset_bytes != exchange.received_bytes:
        reason = f"C2HData at offset {pdu.offset_bytes}, {exchange.received_bytes} expected"
        raise _violation(reason, FatalStatus.OUT_OF_RANGE, _DATAO, pdu, wire)
    end = pdu.offset_bytes + pdu.data_bytes
    short = pdu.last and end != exchange.receive_bytes and not exchange.may_be_short
    if end > exchange.receive_bytes or short:
        reason = f"C2HData ends at {end} of {exchange.receive_bytes} bytes"
        raise _violation(reason, FatalStatus.OUT_OF_RANGE, _DATAL, pdu, wire)


def judge_success(exchange: Exchange, pdu: CapsuleResp, wire: WireFormat, *, unsent: bool) -> None:
    """Judge a completion with success: all data of the command must have been transferred before it."""
    ended = exchange.saw_last and exchange.may_be_short
    if exchange.received_bytes != exchange.receive_bytes and not ended:
        reason = f"success after {exchange.received_bytes} of {exchange.receive_bytes} bytes"
        raise _violation(reason, FatalStatus.OUT_OF_RANGE, 0, pdu, wire)
    if unsent or exchange.requested_bytes != exchange.send_bytes:
        reason = "success before all data was taken"
        raise _violation(reason, FatalStatus.SEQUENCE_ERROR, 0, pdu, wire)


def bad_head(head: int, pdu: CapsuleResp, wire: WireFormat) -> PeerViolation:
    """Return the violation of an impossible SQHD."""
    return _violation(f"SQHD {head}", FatalStatus.INVALID_HEADER_FIELD, _SQHD, pdu, wire)


def judge_r2t(exchange: Exchange, pdu: R2T, wire: WireFormat, *, max_r2t: int) -> None:
    """Judge a request for data: the next bytes of the command, and not too many requests at once (3.3.2.2)."""
    if pdu.offset_bytes != exchange.requested_bytes:
        reason = f"R2T at offset {pdu.offset_bytes}, {exchange.requested_bytes} expected"
        raise _violation(reason, FatalStatus.OUT_OF_RANGE, _DATAO, pdu, wire)
    if not 0 < pdu.data_bytes <= exchange.send_bytes - pdu.offset_bytes:
        reason = f"R2T for {pdu.data_bytes} bytes at {pdu.offset_bytes} of {exchange.send_bytes}"
        raise _violation(reason, FatalStatus.OUT_OF_RANGE, _DATAL, pdu, wire)
    if len(exchange.r2t_ends) >= max_r2t:
        raise _violation("more R2Ts than MAXR2T", FatalStatus.LIMIT_EXCEEDED, 0, pdu, wire)
