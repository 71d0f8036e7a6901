"""What the controller side's core and its shell say to each other: configuration, commands, outgoing bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.spec import VERSION_1_4, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.blockdev import ByteRange
    from xkv_nvmeof.dhchap.controller import ControllerKeys

MIN_PAGE_BYTES: Final = 4096
"""CAP.MPSMIN and CAP.MPSMAX: the unit of MDTS."""
MAX_ASYNC_EVENTS: Final = 4
"""Most outstanding Asynchronous Event Requests of one controller (AERL + 1)."""
MAX_ABORTS: Final = 4
"""ACL + 1. Aborts are answered at once, so that the limit never bites."""
KEEP_ALIVE_STEP_NS: Final = 1_000_000_000
"""Keep-alive timeouts are rounded up to whole steps (KAS = 10 units of 100 ms)."""
SETUP_DEADLINE_NS: Final = 10_000_000_000
"""A connection that has not sent its Connect by then is closed."""
MIN_ADMIN_ENTRIES: Final = 32
"""Smallest admin queue that a host asks for (Base 6.3: SQSIZE of the admin queue is at least 31)."""


RETRYABLE: Final = frozenset(
    {
        Status.COMMAND_INTERRUPTED,
        Status.TRANSIENT_TRANSPORT_ERROR,
        Status.INTERNAL_ERROR,
        Status.ABORT_REQUESTED,
        Status.ABORTED_SQ_DELETION,
        Status.NAMESPACE_NOT_READY,
        Status.UNRECOVERED_READ_ERROR,
        Status.WRITE_FAULT,
        Status.CONNECT_CONTROLLER_BUSY,
        Status.ASYMMETRIC_ACCESS_LOST,
        Status.ASYMMETRIC_ACCESS_INACCESSIBLE,
        Status.ASYMMETRIC_ACCESS_TRANSITION,
    }
)
"""Failures that may go away by themselves: the DNR bit stays clear."""


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """The one namespace of the subsystem. `used_blocks` is asked at each Identify (thin provisioning)."""

    block_bytes: int
    block_count: int
    nguid: bytes
    uuid: bytes
    used_blocks: Callable[[], int]
    nsid: int = 1
    attached: bool = True
    """Whether it is there for hosts now."""

    @property
    def size_bytes(self) -> int:
        """Size of the namespace in bytes."""
        return self.block_bytes * self.block_count


@dataclass(frozen=True, slots=True)
class CardConfig:
    """What the subsystem is and what it grants. Sizes in bytes, counts one-based.

    `allowed_hosts` of None lets every host in. `max_transfer_bytes` is a power of two of pages (MDTS).
    """

    nqn: str
    namespace: NamespaceInfo
    serial: str
    model: str = "xkv soft card"
    firmware: str = "1"
    version: int = VERSION_1_4
    allowed_hosts: frozenset[str] | None = None
    max_transfer_bytes: int = 1 << 20
    max_h2c_data_bytes: int = 1 << 20
    in_capsule_bytes: int = 8192
    max_queue_entries: int = 128
    max_io_queues: int = 16
    max_controllers: int = 32
    header_digest: DigestPolicy = DigestPolicy.PREFERRED
    data_digest: DigestPolicy = DigestPolicy.PREFERRED
    min_keep_alive_ns: int = KEEP_ALIVE_STEP_NS
    ready_timeout_ns: int = 15_000_000_000
    reservations: bool = True
    access_reporting: bool = False
    """Asymmetric namespace access: whether the card tells, and keeps, what each portal may do with the namespace."""
    authentication: ControllerKeys | None = None
    """Keys of the hosts and of the card; None: hosts need not prove who they are."""

    @property
    def max_connections(self) -> int:
        """Most TCP connections at once: all queues of all controllers, and some that are being set up."""
        return self.max_controllers * (1 + self.max_io_queues) + 32


@dataclass(frozen=True, slots=True, eq=False)
class ReadCommand:
    """Read `length_bytes` at `offset_bytes`: complete it with a buffer of that length."""

    cid: int
    offset_bytes: int
    length_bytes: int
    force_unit_access: bool


@dataclass(frozen=True, slots=True, eq=False)
class WriteCommand:
    """Write `data`, which belongs to the shell until the completion."""

    cid: int
    offset_bytes: int
    data: memoryview
    force_unit_access: bool
    pooled: bool
    """Whether `data` came from the shell's buffers and goes back there at the completion."""


@dataclass(frozen=True, slots=True, eq=False)
class FlushCommand:
    """Make every write that was completed before durable."""

    cid: int


@dataclass(frozen=True, slots=True, eq=False)
class DeallocateCommand:
    """The ranges hold nothing any more and read as zeroes from now on."""

    cid: int
    ranges: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WriteZeroesCommand:
    """Zero the range."""

    cid: int
    byte_range: ByteRange
    deallocate: bool
    force_unit_access: bool


@dataclass(frozen=True, slots=True, eq=False)
class ShutdownCommand:
    """A normal shutdown was announced: make everything durable; `complete` then reports it in CSTS.SHST."""

    cid: int = -1


@dataclass(slots=True, eq=False)
class AuthenticateCommand:
    """A step of an authentication, which may take long: call `run`, in whatever thread, and complete the command."""

    cid: int
    step: Callable[[], Reply]
    reply: Reply = field(default_factory=lambda: Reply(Status.INTERNAL_ERROR))

    def run(self) -> None:
        """Take the step."""
        self.reply = self.step()


IoCommand = (
    ReadCommand
    | WriteCommand
    | FlushCommand
    | DeallocateCommand
    | WriteZeroesCommand
    | ShutdownCommand
    | AuthenticateCommand
)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Marker in the outgoing queue: everything before it was sent, `buffer` goes back to the pool."""

    buffer: memoryview


Outgoing = bytes | memoryview | Sent


class Buffers(Protocol):
    """Where the payload of writes is received: a bounded pool that belongs to the shell."""

    def allocate(self, length_bytes: int) -> memoryview | None:
        """Return a writable buffer of exactly that length; None: there is none now, ask again later."""
        ...

    def release(self, buffer: memoryview) -> None:
        """Take back a buffer that `allocate` gave out."""
        ...


@dataclass(slots=True)
class CardCounters:
    """Completed commands and payload bytes since the card started; only ever grows."""

    read_commands: int = 0
    read_bytes: int = 0
    write_commands: int = 0
    write_bytes: int = 0
    flush_commands: int = 0
    deallocate_commands: int = 0
    write_zeroes_commands: int = 0
    failed_commands: int = 0
    media_errors: int = 0
    connections: int = 0
    associations: int = 0
    protocol_errors: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of an admin command: a completion and, for reads, data."""

    status: int = 0
    dw0: int = 0
    dw1: int = 0
    data: bytes = field(default=b"", repr=False)
