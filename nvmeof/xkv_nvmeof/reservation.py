"""Reservations of a namespace on the wire: actions, types, the data that commands carry and bring (Base 7.2 to 7.5, 8.19).

command   | dword 10                                        | data
----------|-------------------------------------------------|-----------------------------------------
Register  | action 2:0, ignore the key 3, persistence 31:30 | current key u64, new key u64
Acquire   | action 2:0, ignore the key 3, type 15:8         | current key u64, key to pre-empt u64
Release   | action 2:0, ignore the key 3, type 15:8         | current key u64
Report    | dwords to return, zero-based; dword 11 bit 0: host identifiers of 128 bits | brings `ReservationReport`
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct, error
from typing import Final

from xkv_nvmeof.blockdev import Registrant, ReservationStatus, ReservationType
from xkv_nvmeof.command import CommandFormatError

ONCS_RESERVATIONS: Final = 1 << 5
"""ONCS of Identify Controller: the controller has reservations."""
IGNORE_KEY: Final = 1 << 3
"""IEKEY, dword 10: the current key need not be right (Register only)."""
EXTENDED: Final = 1
"""EDS, dword 11 of Report: as Fabrics has it, with host identifiers of 128 bits."""
TWO_KEYS_BYTES: Final = 16
ONE_KEY_BYTES: Final = 8
REPORT_HEAD_BYTES: Final = 64
REPORT_ENTRY_BYTES: Final = 64
REGISTRANTS_MAX: Final = 63
"""Registrants that fit into a report of 4096 bytes: nobody here keeps, or asks for, more."""
REPORT_BYTES: Final = REPORT_HEAD_BYTES + REGISTRANTS_MAX * REPORT_ENTRY_BYTES
KEY_MAX: Final = (1 << 64) - 1
_HEAD: Final = Struct("<IBHxxB54x")
_ENTRY: Final = Struct("<HB5xQ16s32x")
_TWO_KEYS: Final = Struct("<QQ")
_ONE_KEY: Final = Struct("<Q")
assert _HEAD.size == REPORT_HEAD_BYTES
assert _ENTRY.size == REPORT_ENTRY_BYTES


class RegisterAction(IntEnum):
    """RREGA (Base 7.3)."""

    REGISTER = 0
    UNREGISTER = 1
    REPLACE = 2


class AcquireAction(IntEnum):
    """RACQA (Base 7.2)."""

    ACQUIRE = 0
    PREEMPT = 1
    PREEMPT_AND_ABORT = 2


class ReleaseAction(IntEnum):
    """RRELA (Base 7.4)."""

    RELEASE = 0
    CLEAR = 1


class Persistence(IntEnum):
    """CPTPL of Register: what becomes of reservations in a loss of power (Base 7.3)."""

    AS_IT_IS = 0
    RESERVED = 1
    FORGOTTEN = 2
    KEPT = 3


def type_bit(kind: ReservationType) -> int:
    """Return the bit of RESCAP that says that the namespace has this type (NVM 4.1.5.1)."""
    return 1 << kind


def encode_keys(current: int, other: int) -> bytes:
    """Encode the data of Register (the new key) or Acquire (the key to pre-empt)."""
    return _TWO_KEYS.pack(current, other)


def decode_keys(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Decode the data of Register or Acquire.

    Raises:
        CommandFormatError: the length is wrong.
    """
    try:
        current, other = _TWO_KEYS.unpack(data)
    except error as wrong:
        raise CommandFormatError(f"reservation keys of {len(data)} bytes") from wrong
    return current, other


def encode_key(current: int) -> bytes:
    """Encode the data of Release."""
    return _ONE_KEY.pack(current)


def decode_key(data: bytes | bytearray | memoryview) -> int:
    """Decode the data of Release.

    Raises:
        CommandFormatError: the length is wrong.
    """
    try:
        (current,) = _ONE_KEY.unpack(data)
    except error as wrong:
        raise CommandFormatError(f"a reservation key of {len(data)} bytes") from wrong
    return int(current)


@dataclass(frozen=True, slots=True)
class ReservationReport:
    """What Report brings: the extended Reservation Status structure (Base 7.5)."""

    status: ReservationStatus
    persists: bool = False
    """PTPLS: whether a loss of power leaves it as it is."""

    def to_bytes(self) -> bytes:
        """Encode all registrants. They are known by their host, so that the controller id is FFFFh (dynamic controllers)."""
        status = self.status
        head = _HEAD.pack(status.generation, status.kind or 0, len(status.registrants), int(self.persists))
        return head + b"".join(
            _ENTRY.pack(0xFFFF, int(each.holds), each.key, each.host_id) for each in status.registrants
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ReservationReport:
        """Decode.

        Raises:
            CommandFormatError: it is cut, has more registrants than there is room for, or a type that does not exist.
        """
        if len(data) < REPORT_HEAD_BYTES:
            raise CommandFormatError(f"a reservation report of {len(data)} bytes")
        generation, raw_kind, count, persists = _HEAD.unpack_from(data, 0)
        if REPORT_HEAD_BYTES + count * REPORT_ENTRY_BYTES > len(data):
            raise CommandFormatError(f"a reservation report of {len(data)} bytes for {count} registrants")
        try:
            kind = ReservationType(raw_kind) if raw_kind else None
        except ValueError as wrong:
            raise CommandFormatError(f"reservation type {raw_kind}") from wrong
        registrants = []
        for number in range(count):
            _, status, key, host_id = _ENTRY.unpack_from(
                data, REPORT_HEAD_BYTES + number * REPORT_ENTRY_BYTES
            )
            registrants.append(Registrant(host_id, key, bool(status & 1)))
        return cls(ReservationStatus(generation, kind, tuple(registrants)), bool(persists))
