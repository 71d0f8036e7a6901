"""What a host queue pair is made with, and the ways in which it ends."""

from __future__ import annotations

from dataclasses import dataclass

from xkv_nvmeof.digest import DigestPolicy


class QueueFailure(Exception):  # noqa: N818
    """A queue pair ended, not by a protocol error of the peer (that is `PeerViolation`)."""


class NegotiationRefused(QueueFailure):
    """The controller's ICResp is not acceptable: configuration of host and controller do not fit."""


class PeerTerminated(QueueFailure):
    """The controller sent a TermReq: it says that this host broke the protocol."""

    def __init__(self, reason: str, *, fatal_status: int, field_offset_bytes: int) -> None:
        super().__init__(reason)
        self.fatal_status = fatal_status
        self.field_offset_bytes = field_offset_bytes


class ConnectionLost(QueueFailure):
    """The TCP connection ended or failed."""


class ClosedByHost(QueueFailure):
    """This host ended the queue pair because it wished to."""


class DeadlinePassed(QueueFailure):
    """The controller did not answer in time."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What a host queue pair is made with. `entries` is the queue size (SQSIZE + 1).

    `in_capsule_bytes` is the room for data in a command capsule (IOCCSZ * 16 - 64). `max_receive_bytes` bounds the
    data of one PDU. `alignment_dwords` is HPDA + 1. `flow_control` False asks for CATTR bit 2 (Base 6.3).
    """

    entries: int
    in_capsule_bytes: int = 0
    max_receive_bytes: int = 1 << 30
    header_digest: DigestPolicy = DigestPolicy.OFF
    data_digest: DigestPolicy = DigestPolicy.OFF
    alignment_dwords: int = 1
    max_r2t: int = 1
    flow_control: bool = False
