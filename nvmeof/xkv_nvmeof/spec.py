"""Numbers of the NVMe specifications that both sides use.

Sections are those of NVM Express Base 2.0 ("Base"), NVM Command Set 1.0 ("NVM") and NVMe/TCP Transport 1.0
("TCP"). Everything on the wire is little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

DISCOVERY_NQN: Final = "nqn.2014-08.org.nvmexpress.discovery"
"""Well-known name of the discovery subsystem (Base 4.5)."""
NQN_MAX_BYTES: Final = 223
"""Longest NVMe Qualified Name, without its terminating NUL (Base 4.5)."""

SQE_BYTES: Final = 64
CQE_BYTES: Final = 16
IDENTIFY_BYTES: Final = 4096
CONNECT_DATA_BYTES: Final = 1024
DSM_RANGE_BYTES: Final = 16
DSM_MAX_RANGES: Final = 256
"""Most ranges of one Dataset Management command (NVM 3.2.3)."""

CNTLID_DYNAMIC: Final = 0xFFFF
"""Controller ID in a Connect of the admin queue: the target chooses (Base 6.3)."""
NSID_BROADCAST: Final = 0xFFFF_FFFF
VERSION_1_4: Final = 0x0001_0400
VERSION_2_0: Final = 0x0002_0000
FABRICS_OPCODE: Final = 0x7F
"""Opcode of every Fabrics command, on admin and I/O queues (Base 6)."""


class AdminOpcode(IntEnum):
    """Admin commands (Base 5, Figure 138)."""

    DELETE_IO_SQ = 0x00
    CREATE_IO_SQ = 0x01
    GET_LOG_PAGE = 0x02
    DELETE_IO_CQ = 0x04
    CREATE_IO_CQ = 0x05
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT_REQUEST = 0x0C
    KEEP_ALIVE = 0x18
    FABRICS = 0x7F


class IoOpcode(IntEnum):
    """I/O commands of the NVM command set (NVM 3, Base 7)."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_UNCORRECTABLE = 0x04
    COMPARE = 0x05
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09
    VERIFY = 0x0C
    RESERVATION_REGISTER = 0x0D
    RESERVATION_REPORT = 0x0E
    RESERVATION_ACQUIRE = 0x11
    RESERVATION_RELEASE = 0x15
    COPY = 0x19
    FABRICS = 0x7F


class FabricsType(IntEnum):
    """Fabrics command types, byte 4 of the entry (Base 6, Figure 372)."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04
    AUTHENTICATION_SEND = 0x05
    AUTHENTICATION_RECEIVE = 0x06
    DISCONNECT = 0x08


class Status(IntEnum):
    """Status of a completion: status code type * 256 + status code (Base 3.3.3.2.1)."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    COMMAND_ID_CONFLICT = 0x003
    DATA_TRANSFER_ERROR = 0x004
    ABORTED_POWER_LOSS = 0x005
    INTERNAL_ERROR = 0x006
    ABORT_REQUESTED = 0x007
    ABORTED_SQ_DELETION = 0x008
    INVALID_NAMESPACE = 0x00B
    COMMAND_SEQUENCE_ERROR = 0x00C
    INVALID_SGL_SEGMENT = 0x00D
    INVALID_SGL_COUNT = 0x00E
    DATA_SGL_LENGTH_INVALID = 0x00F
    METADATA_SGL_LENGTH_INVALID = 0x010
    SGL_TYPE_INVALID = 0x011
    SGL_OFFSET_INVALID = 0x016
    HOST_IDENTIFIER_INCONSISTENT = 0x018
    KEEP_ALIVE_EXPIRED = 0x019
    KEEP_ALIVE_TIMEOUT_INVALID = 0x01A
    NAMESPACE_WRITE_PROTECTED = 0x020
    COMMAND_INTERRUPTED = 0x021
    TRANSIENT_TRANSPORT_ERROR = 0x022
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    NAMESPACE_NOT_READY = 0x082
    RESERVATION_CONFLICT = 0x083
    INVALID_QUEUE_ID = 0x101
    INVALID_QUEUE_SIZE = 0x102
    ABORT_LIMIT_EXCEEDED = 0x103
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x105
    INVALID_LOG_PAGE = 0x109
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F
    CONNECT_INCOMPATIBLE_FORMAT = 0x180
    CONNECT_CONTROLLER_BUSY = 0x181
    CONNECT_INVALID_PARAMETERS = 0x182
    CONNECT_RESTART_DISCOVERY = 0x183
    CONNECT_INVALID_HOST = 0x184
    AUTHENTICATION_REQUIRED = 0x191
    WRITE_FAULT = 0x280
    UNRECOVERED_READ_ERROR = 0x281
    ACCESS_DENIED = 0x286
    INTERNAL_PATH_ERROR = 0x300
    ASYMMETRIC_ACCESS_LOST = 0x301
    ASYMMETRIC_ACCESS_INACCESSIBLE = 0x302
    ASYMMETRIC_ACCESS_TRANSITION = 0x303
    CONTROLLER_PATHING_ERROR = 0x360

    @property
    def code_type(self) -> int:
        """Status code type (SCT)."""
        return self.value >> 8

    @property
    def code(self) -> int:
        """Status code (SC)."""
        return self.value & 0xFF


def status_name(status: int) -> str:
    """Name of a status for people, such as `LBA_OUT_OF_RANGE (0/80h)`; unknown ones get their numbers only."""
    numbers = f"{status >> 8:x}/{status & 0xFF:02X}h"
    try:
        return f"{Status(status).name} ({numbers})"
    except ValueError:
        return f"status {numbers}"


class Register(IntEnum):
    """Byte offsets of the controller properties that exist over Fabrics (Base 3.1.3)."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C
    NSSR = 0x20


PROPERTY_BYTES: Final = {
    Register.CAP: 8,
    Register.VS: 4,
    Register.CC: 4,
    Register.CSTS: 4,
    Register.NSSR: 4,
}
"""Size in bytes of each property."""


class FeatureId(IntEnum):
    """Feature identifiers (Base 5.27.1)."""

    ARBITRATION = 0x01
    POWER_MANAGEMENT = 0x02
    TEMPERATURE_THRESHOLD = 0x04
    ERROR_RECOVERY = 0x05
    VOLATILE_WRITE_CACHE = 0x06
    NUMBER_OF_QUEUES = 0x07
    WRITE_ATOMICITY = 0x0A
    ASYNC_EVENT_CONFIGURATION = 0x0B
    KEEP_ALIVE_TIMER = 0x0F
    HOST_IDENTIFIER = 0x81


class LogPageId(IntEnum):
    """Log page identifiers (Base 5.16.1)."""

    SUPPORTED_LOG_PAGES = 0x00
    ERROR_INFORMATION = 0x01
    SMART_HEALTH = 0x02
    FIRMWARE_SLOT = 0x03
    CHANGED_NAMESPACES = 0x04
    COMMANDS_EFFECTS = 0x05
    ASYMMETRIC_ACCESS = 0x0C
    DISCOVERY = 0x70


class Cns(IntEnum):
    """Identify: which structure is returned (Base 5.17, Figure 273)."""

    NAMESPACE = 0x00
    CONTROLLER = 0x01
    ACTIVE_NAMESPACES = 0x02
    NAMESPACE_DESCRIPTORS = 0x03
    IO_NAMESPACE = 0x05
    IO_CONTROLLER = 0x06
    IO_ACTIVE_NAMESPACES = 0x07
    NAMESPACE_INDEPENDENT = 0x08


class ConnectAttribute(IntFlag):
    """CATTR of Connect (Base 6.3, Figure 380)."""

    URGENT_PRIORITY = 0x00
    DISABLE_SQ_FLOW_CONTROL = 0x04


class AuthenticationRequirement(IntFlag):
    """AUTHREQ of Connect's completion, dword 0 bits 31:16 (Base 6.3)."""

    NONE = 0
    TRANSACTION = 1 << 1
    """ATR: an authentication transaction comes before anything else on the queue."""
    SECURE_CHANNEL = 1 << 2
    """ASCR: it is to be concatenated with a secure channel (TLS)."""
    ALL = TRANSACTION | SECURE_CHANNEL


AUTHENTICATION_PROTOCOL: Final = 0xE9 << 24 | 0x01 << 16 | 0x01 << 8
"""Dword 10 of Authentication Send and Receive: SECP E9h, SPSP1 01h, SPSP0 01h (Base 6.1, 6.2)."""


FABRICS_IN_CAPSULE_BYTES: Final = 8192
"""Room for data in the capsule of every Fabrics and admin command (TCP 3.3.1)."""


class SglType(IntEnum):
    """SGL descriptor type and sub type in one byte (Base 4.1.2; TCP 3.3.1.3)."""

    DATA_BLOCK_ADDRESS = 0x00
    IN_CAPSULE_OFFSET = 0x01
    TRANSPORT_DATA_BLOCK = 0x5A


PSDT_SGL: Final = 0x40
"""PSDT = 01b in byte 1 of the entry: SGLs are used, as always over Fabrics (Base 3.3.3.1)."""


class AsyncEventType(IntEnum):
    """Type of an asynchronous event, completion dword 0 bits 2:0 (Base 5.2)."""

    ERROR = 0
    SMART_HEALTH = 1
    NOTICE = 2
    IO_SPECIFIC = 6
    VENDOR = 7


class NoticeInfo(IntEnum):
    """Information of a Notice event, completion dword 0 bits 15:8 (Base Figure 148)."""

    NAMESPACE_CHANGED = 0x00
    FIRMWARE_ACTIVATION = 0x01
    ANA_CHANGE = 0x03
    DISCOVERY_CHANGE = 0xF0


ASYNC_NAMESPACE_ATTRIBUTE: Final = 1 << 8
"""Namespace Attribute Notices: Async Event Configuration bit 8, and OAES bit 8."""
ASYNC_ACCESS_CHANGE: Final = 1 << 11
"""Asymmetric Namespace Access Change Notices: Async Event Configuration bit 11, and OAES bit 11."""
MULTIPATH_ACCESS_REPORTING: Final = 1 << 3
"""CMIC bit 3 of Identify Controller: the controller reports asymmetric namespace access (Base 8.1)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """CAP, controller capabilities, 8 bytes (Base 3.1.3.1).

    `max_queue_entries` is one-based (MQES + 1). `timeout_ns` is CAP.TO, kept in steps of 500 ms.
    Page sizes are in bytes.
    """

    max_queue_entries: int
    timeout_ns: int
    contiguous_queues: bool = True
    command_sets: int = 0x01
    subsystem_reset: bool = False
    min_page_bytes: int = 4096
    max_page_bytes: int = 4096

    def to_int(self) -> int:
        """Encode as the 64-bit property."""
        return (
            (self.max_queue_entries - 1)
            | int(self.contiguous_queues) << 16
            | (self.timeout_ns // 500_000_000 & 0xFF) << 24
            | int(self.subsystem_reset) << 36
            | (self.command_sets & 0xFF) << 37
            | (self.min_page_bytes.bit_length() - 13) << 48
            | (self.max_page_bytes.bit_length() - 13) << 52
        )

    @classmethod
    def from_int(cls, value: int) -> Capabilities:
        """Decode the 64-bit property."""
        return cls(
            max_queue_entries=(value & 0xFFFF) + 1,
            timeout_ns=(value >> 24 & 0xFF) * 500_000_000,
            contiguous_queues=bool(value >> 16 & 1),
            command_sets=value >> 37 & 0xFF,
            subsystem_reset=bool(value >> 36 & 1),
            min_page_bytes=1 << (12 + (value >> 48 & 0xF)),
            max_page_bytes=1 << (12 + (value >> 52 & 0xF)),
        )


class ShutdownNotification(IntEnum):
    """CC.SHN (Base 3.1.3.5)."""

    NONE = 0
    NORMAL = 1
    ABRUPT = 2
    RESERVED = 3


class ShutdownStatus(IntEnum):
    """CSTS.SHST (Base 3.1.3.6)."""

    NORMAL_OPERATION = 0
    OCCURRING = 1
    COMPLETE = 2
    RESERVED = 3


@dataclass(frozen=True, slots=True)
class ControllerConfiguration:
    """CC, controller configuration, 4 bytes (Base 3.1.3.5). Entry sizes are powers of two: 6 = 64 bytes."""

    enable: bool = False
    command_set: int = 0
    page_bytes: int = 4096
    arbitration: int = 0
    shutdown: ShutdownNotification = ShutdownNotification.NONE
    sq_entry_log2: int = 0
    cq_entry_log2: int = 0

    def to_int(self) -> int:
        """Encode as the 32-bit property."""
        return (
            int(self.enable)
            | self.command_set << 4
            | (self.page_bytes.bit_length() - 13) << 7
            | self.arbitration << 11
            | int(self.shutdown) << 14
            | self.sq_entry_log2 << 16
            | self.cq_entry_log2 << 20
        )

    @classmethod
    def from_int(cls, value: int) -> ControllerConfiguration:
        """Decode the 32-bit property."""
        return cls(
            enable=bool(value & 1),
            command_set=value >> 4 & 7,
            page_bytes=1 << (12 + (value >> 7 & 0xF)),
            arbitration=value >> 11 & 7,
            shutdown=ShutdownNotification(value >> 14 & 3),
            sq_entry_log2=value >> 16 & 0xF,
            cq_entry_log2=value >> 20 & 0xF,
        )


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """CSTS, controller status, 4 bytes (Base 3.1.3.6)."""

    ready: bool = False
    fatal: bool = False
    shutdown: ShutdownStatus = ShutdownStatus.NORMAL_OPERATION

    def to_int(self) -> int:
        """Encode as the 32-bit property."""
        return int(self.ready) | int(self.fatal) << 1 | int(self.shutdown) << 2

    @classmethod
    def from_int(cls, value: int) -> ControllerStatus:
        """Decode the 32-bit property."""
        return cls(bool(value & 1), bool(value >> 1 & 1), ShutdownStatus(value >> 2 & 3))
