"""How an initiator is configured and what it reports: plain data, checked when made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.spec import NQN_MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.dhchap.host import Authenticated, HostKeys
    from xkv_nvmeof.multipath import Access

_MAX_PORT = 65_535
_MAX_NSID = 0xFFFF_FFFE
_MAX_IO_QUEUES = 64
_MAX_QUEUE_DEPTH = 1024
_MAX_MS = 3_600_000
_HOST_ID_BYTES = 16


def _check_nqn(name: str, value: str) -> None:
    if not value:
        raise ValueError(f"{name}: must not be empty")
    if len(value.encode()) > NQN_MAX_BYTES:
        raise ValueError(f"{name}: longer than {NQN_MAX_BYTES} bytes")
    if any(character.isspace() or not character.isprintable() for character in value):
        raise ValueError(f"{name}: must not contain spaces or control characters")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is not in {low}..{high}")


@dataclass(frozen=True, slots=True)
class TargetAddress:
    """Where a namespace is reached. Raises `ValueError` that names the field."""

    host: str
    port: int
    nqn: str
    nsid: int = 1

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: must not be empty")
        _check_range("port", self.port, 1, _MAX_PORT)
        _check_nqn("nqn", self.nqn)
        _check_range("nsid", self.nsid, 1, _MAX_NSID)


@dataclass(frozen=True, slots=True)
class InitiatorOptions:
    """Settings of a `TcpInitiator`; times in milliseconds. Raises `ValueError` that names the field."""

    host_nqn: str
    """This host's NVMe Qualified Name: 1 to 223 bytes without spaces. The same for all queues."""
    host_id: bytes
    """This host's identifier, 16 bytes, not all zero; one host id belongs to one host NQN."""
    io_queues: int = 2
    """I/O queues asked for; the ones that are granted are used."""
    queue_depth: int = 64
    """Commands in flight on each I/O queue, as far as the controller's MQES allows."""
    max_waiting_calls: int = 4096
    """Calls that wait for room in the queues; one more is refused with `DeviceBusy`."""
    max_transfer_bytes: int = 1 << 20
    """Largest single command; the controller's MDTS may make it smaller."""
    keep_alive_ms: int = 10_000
    """Keep-alive timeout asked for. Keep Alive is sent every third of it, whatever the load."""
    command_timeout_ms: int = 10_000
    """Deadline of each call, time in queues included. When it passes the association ends."""
    connect_timeout_ms: int = 5_000
    """Deadline of each step of a connection attempt (CAP.TO bounds the wait for CSTS.RDY)."""
    cancel_grace_ms: int = 1_000
    """How long a cancelled write may take to conclude before its association is ended."""
    close_timeout_ms: int = 2_000
    """Deadline of the shutdown notification in `aclose`."""
    settle_margin_ms: int = 1_000
    """Added to the keep-alive time for the moment at which commands of unknown outcome are over."""
    header_digest: str = "off"
    """"required", "preferred" or "off"."""
    data_digest: str = "off"
    """"required", "preferred" or "off"."""
    dhchap: HostKeys | None = None
    """Keys for authentication; without them a controller that asks for it is refused."""
    sq_flow_control: bool = False
    """Submission queue flow control; without it a controller may skip response capsules (SUCCESS flag)."""
    reconnect_delay_min_ms: int = 100
    """First delay between attempts to reconnect; doubles with each, half of it random."""
    reconnect_delay_max_ms: int = 5_000
    """Longest delay between attempts to reconnect."""
    admits: Callable[[str], bool] | None = None
    """Tells of an IP address whether a controller may be there; asked right before each connection."""
    _digests: tuple[DigestPolicy, DigestPolicy] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_nqn("host_nqn", self.host_nqn)
        if len(self.host_id) != _HOST_ID_BYTES:
            raise ValueError(f"host_id: {len(self.host_id)} bytes instead of {_HOST_ID_BYTES}")
        if not any(self.host_id):
            raise ValueError("host_id: must not be all zero")
        _check_range("io_queues", self.io_queues, 1, _MAX_IO_QUEUES)
        _check_range("queue_depth", self.queue_depth, 1, _MAX_QUEUE_DEPTH)
        _check_range("max_waiting_calls", self.max_waiting_calls, 1, 1 << 20)
        _check_range("max_transfer_bytes", self.max_transfer_bytes, 4096, 1 << 25)
        for name in (
            "keep_alive_ms",
            "command_timeout_ms",
            "connect_timeout_ms",
            "cancel_grace_ms",
            "close_timeout_ms",
            "reconnect_delay_min_ms",
            "reconnect_delay_max_ms",
        ):
            _check_range(name, getattr(self, name), 1, _MAX_MS)
        _check_range("settle_margin_ms", self.settle_margin_ms, 0, _MAX_MS)
        if self.reconnect_delay_max_ms < self.reconnect_delay_min_ms:
            raise ValueError("reconnect_delay_max_ms: smaller than reconnect_delay_min_ms")
        policies = []
        for name in ("header_digest", "data_digest"):
            try:
                policies.append(DigestPolicy(getattr(self, name)))
            except ValueError:
                raise ValueError(f'{name}: not "required", "preferred" or "off"') from None
        object.__setattr__(self, "_digests", tuple(policies))

    @property
    def header_policy(self) -> DigestPolicy:
        """`header_digest` as an enum."""
        return self._digests[0]

    @property
    def data_policy(self) -> DigestPolicy:
        """`data_digest` as an enum."""
        return self._digests[1]


@dataclass(frozen=True, slots=True)
class PathStatus:
    """One of the ways to the card, for status displays."""

    address: TargetAddress
    connected: bool
    access: Access | None
    """What the controller lets this host do with the namespace; None: not connected."""
    reason: str


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What this host and the controller agreed upon, for status displays."""

    max_transfer_bytes: int
    """Largest single command (MDTS and `max_transfer_bytes`)."""
    mdts_bytes: int | None
    """MDTS in bytes; None: the controller has no limit."""
    in_capsule_bytes: int
    """Data that fits into an I/O command capsule (IOCCSZ)."""
    max_h2c_data_bytes: int
    """MAXH2CDATA of the I/O queues, the smallest."""
    header_digest: bool
    data_digest: bool
    queue_entries: int
    """Entries of each I/O queue (SQSIZE + 1)."""
    io_queues: int
    keep_alive_ms: int
    """Keep-alive timeout in force, as the controller reports it."""
    controller_id: int
    authenticated: Authenticated | None
    """How both ends of every I/O queue proved who they are; None: nobody asked."""
