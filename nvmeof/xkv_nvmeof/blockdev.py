"""The block device contract: what every way of reaching a card provides.

Implementations: the userspace initiator (`initiator`), which also reaches the soft card, and later the
kernel's initiator. One contract test-suite (`tests/nvmeof/contract.py`) runs on all of them.

Vocabulary
    block        the logical block of the namespace (512 or 4096 bytes); every offset and length is a multiple.
    association  one connection of this host with the controller, from Connect until it is certainly dead.
                 A command whose association broke may still be executed by the target for a while.
    settle       the moment from which a command of unknown outcome certainly can no longer be executed.
    incarnation  a time in which the target certainly kept its power, since no association ended. Between two of them its
                 volatile write cache may have been lost, and a flush in the later one says nothing of writes in the earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class DeviceState(Enum):
    """Whether commands can be sent now."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the namespace is, as told by the controller. Changes only with a new association or an async event.

    It may grow or shrink while the device is open; nothing of what is left moves, and what lies beyond the end cannot be reached. With
    other blocks it is not usable: the device is OFFLINE until it has those of before.
    """

    block_bytes: int
    block_count: int
    volatile_write_cache: bool
    """Writes are durable only after `flush`."""
    can_deallocate: bool
    deallocate_zeroes: bool
    """Deallocated blocks certainly read back as zeroes."""
    can_write_zeroes: bool
    preferred_io_bytes: int
    """Transfers up to this size are one command; larger ones are split (0 bytes never: at least one block)."""

    @property
    def size_bytes(self) -> int:
        """Size of the namespace in bytes."""
        return self.block_bytes * self.block_count


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Who the namespace is. Never a node name. `nguid` and `uuid` are 16 bytes, all zero when not reported."""

    nqn: str
    nsid: int
    nguid: bytes
    uuid: bytes
    serial: str
    model: str


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of whole blocks: both values are multiples of the block size."""

    offset_bytes: int
    length_bytes: int


@dataclass(slots=True)
class DeviceCounters:
    """Completed commands and payload bytes since the device object was made; only ever grows."""

    read_commands: int = 0
    read_bytes: int = 0
    write_commands: int = 0
    write_bytes: int = 0
    flush_commands: int = 0
    deallocate_commands: int = 0
    write_zeroes_commands: int = 0
    errors: int = 0
    reconnects: int = 0


class ReservationType(IntEnum):
    """What a reservation keeps from whom (Base 8.19)."""

    WRITE_EXCLUSIVE = 1
    EXCLUSIVE_ACCESS = 2
    WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 3
    EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 4
    WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5
    EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 6


@dataclass(frozen=True, slots=True)
class Registrant:
    """A host that has registered a key with the namespace; `holds`: it has the reservation."""

    host_id: bytes
    key: int
    holds: bool


@dataclass(frozen=True, slots=True)
class ReservationStatus:
    """Who is registered with a namespace, and who has it reserved (`kind` of None: nobody)."""

    generation: int
    kind: ReservationType | None
    registrants: tuple[Registrant, ...]

    @property
    def holder(self) -> Registrant | None:
        """The host that has the reservation."""
        return next((each for each in self.registrants if each.holds), None)

    def of_host(self, host_id: bytes) -> Registrant | None:
        """The registration of a host."""
        return next((each for each in self.registrants if each.host_id == host_id), None)


class DeviceError(Exception):
    """Base of all failures of a block device. Nothing else is ever raised, but `asyncio.CancelledError`."""


class DeviceOffline(DeviceError):  # noqa: N818
    """The command was never sent: there is no association. Certainly not executed."""


class CommandFailed(DeviceError):  # noqa: N818
    """The controller completed the command with an error status: it is over, and its effect is undefined.

    `status_code_type` and `status_code` as in NVMe base 2.0, 3.3.3.2.1; `do_not_retry` is the DNR bit.
    """

    def __init__(self, message: str, *, status_code_type: int, status_code: int, do_not_retry: bool) -> None:
        super().__init__(message)
        self.status_code_type = status_code_type
        self.status_code = status_code
        self.do_not_retry = do_not_retry


class ReservationConflict(CommandFailed):
    """Another host has reserved the namespace (status 83h): nothing was done."""


class DataCorrupted(DeviceError):  # noqa: N818
    """The data digest of a read did not match, also on the one retry. The connection is fine."""


class OutcomeUnknown(DeviceError):  # noqa: N818
    """The association ended (or the deadline passed) with the command in flight.

    For a write, deallocate or write-zeroes: the target may execute it until `settles_at_ns` (monotonic clock).
    A read of unknown outcome never touches the caller's buffer after this was raised.
    """

    def __init__(self, message: str, *, settles_at_ns: int) -> None:
        super().__init__(message)
        self.settles_at_ns = settles_at_ns


class Reservations(Protocol):
    """Reservations of a namespace whose controller has them, of the type `WRITE_EXCLUSIVE_REGISTRANTS_ONLY` (Base 8.19).

    A host has one registration whatever its associations are, and it outlives them. Keys are numbers of 64 bits, not zero. All
    methods raise as the calls of `BlockDevice` do; `ReservationConflict` where the namespace does not agree.
    """

    @property
    def host_id(self) -> bytes:
        """Who this host is to the controller: 16 bytes."""
        ...

    async def report(self) -> ReservationStatus:
        """Return who is registered, and who has the namespace reserved."""
        ...

    async def register(self, key: int, *, before: int | None = None) -> None:
        """Register this host under `key`; where it is registered already, `before` is the key that this one replaces."""
        ...

    async def unregister(self, key: int) -> None:
        """Take the registration of this host back, and a reservation that it holds with it."""
        ...

    async def acquire(self, key: int) -> None:
        """Reserve the namespace, which nobody else has reserved. Nothing happens where this host has."""
        ...

    async def preempt(self, key: int, victim: int, *, abort: bool) -> None:
        """End the registrations under the key `victim`, and take the reservation from it where it holds one.

        With `abort` no command of these hosts can still be executed when this returns.
        """
        ...

    async def release(self, key: int) -> None:
        """Give the reservation back; the registration stays."""
        ...


class BlockDevice(Protocol):
    """Asynchronous access to one namespace.

    Transfers take a list of buffers (an iovec): its total length is a multiple of the block size, each
    single length is free. Data lands straight in, and leaves straight from, the caller's memory. The buffers
    belong to the device from the call until it returns or raises; when the awaiting task is cancelled the call
    raises `CancelledError` only when the buffers are not touched any more (rest of a read: discarded; a write
    cut short: its association ends, outcome unknown until `settles_at_ns` of that association).

    Every call has one deadline, set at construction. Calls run concurrently; there is no order between two
    of them that overlap in time, but one that starts after another returned sees its effect.
    """

    @property
    def geometry(self) -> Geometry:
        """Geometry of the namespace as last told. Valid once connected for the first time."""
        ...

    @property
    def identity(self) -> DeviceIdentity:
        """Identity of the namespace; re-checked on each reconnect (a different one keeps the device offline)."""
        ...

    @property
    def state(self) -> DeviceState:
        """Whether commands can be sent now."""
        ...

    @property
    def counters(self) -> DeviceCounters:
        """Live counters; the caller only reads them."""
        ...

    @property
    def settles_at_ns(self) -> int:
        """From when on (monotonic clock) nothing of an association that has ended can still be executed; 0: none has."""
        ...

    @property
    def incarnation(self) -> int:
        """Grows whenever writes that have returned may be lost: whenever a way by which commands went is not used any more.

        A write is durable once a `flush` that was called after it has returned, *and* this number is then what it was before the
        write was called. Where it is another one, both may have succeeded and the data be gone all the same: the target may have
        lost its power in between, and come back. So the write has to be repeated.
        """
        ...

    @property
    def reservations(self) -> Reservations | None:
        """Reservations of the namespace, None where it, its controller or this way of reaching it has none."""
        ...

    def add_state_listener(self, listener: Callable[[DeviceState, str], None]) -> None:
        """Call `listener(state, reason)` from the loop at each change of state; reason is for people."""
        ...

    def add_geometry_listener(self, listener: Callable[[Geometry, Geometry], None]) -> None:
        """Call `listener(before, now)` from the loop when the namespace is not what it was: grown, or shrunk."""
        ...

    async def read_into(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, in order, from the namespace. All bytes were received when it returns."""
        ...

    async def write_from(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers`, in order. Durable only after `flush` where the device has a volatile write cache."""
        ...

    async def flush(self) -> None:
        """Make every write of this incarnation that returned before this call durable. A no-op without a volatile write cache."""
        ...

    async def deallocate(self, ranges: Sequence[ByteRange]) -> None:
        """Tell the device that the ranges hold nothing (NVM Dataset Management, Deallocate)."""
        ...

    async def write_zeroes(self, byte_range: ByteRange) -> None:
        """Zero the range without sending the zeroes."""
        ...

    async def aclose(self) -> None:
        """End the association in order (shutdown notification) and release everything. Idempotent."""
        ...
