"""What the gateway says about itself: one snapshot as data, for status, metrics and people.

Never a secret, never a cache key, nothing that a client chose: every name in here is ours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

DAMAGE_LINES_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class SoftCardStatus:
    """The process behind a soft card."""

    pid: int | None
    restarts: int


@dataclass(frozen=True, slots=True)
class RunStatus:
    """This gateway's run on the card."""

    card_uuid: str
    """Made when the card was formatted."""
    label: str
    epoch: int
    """Counts the runs since the card was formatted."""
    phase: str
    """`recovering`: lookups and loads are served, writes not yet; `owned`: everything is; `closed`: nothing any more."""
    writes_in_s: float
    """While recovering: when the run before certainly cannot write any more, so that writes begin."""
    reservation: str
    """`held`: the target keeps all other hosts from writing; `lost`: not now; `unsupported`: it cannot."""


@dataclass(frozen=True, slots=True)
class RecoveryStatus:
    """What the start read."""

    objects: int
    checkpoint_objects: int
    """Objects in the checkpoint; the journal has changed that number since."""
    journal_batches: int
    journal_bytes: int
    duration_s: float
    dropped_objects: int
    """Given up because of damage."""
    damage: list[str]
    """A sentence for each thing that was damaged; the first DAMAGE_LINES_MAX."""


@dataclass(frozen=True, slots=True)
class JournalStatus:
    """The journal and the checkpoints of this run; all zero until the card is owned."""

    ring_bytes: int
    used_bytes: int
    """What recovery would need of it."""
    batches: int
    batch_bytes: int
    checkpoints: int
    """Completed."""
    checkpoint_objects: int
    checkpoint_bytes: int
    """Of the last one."""


@dataclass(frozen=True, slots=True)
class CardStatus:
    """The card and the connection to it."""

    url: str
    state: str
    """`online`, `offline` or `recovering`."""
    reason: str
    """For people: why it is in that state; empty where there is nothing to say."""
    state_age_s: float
    size_bytes: int
    block_bytes: int
    volatile_write_cache: bool
    nqn: str
    nsid: int
    nguid: str
    uuid: str
    model: str
    serial: str
    connection: dict[str, Any]
    """What was negotiated with the controller: queues, depths, transfer limits, digests."""
    soft_card: SoftCardStatus | None
    run: RunStatus
    recovery: RecoveryStatus
    journal: JournalStatus


@dataclass(frozen=True, slots=True)
class UsageStatus:
    """Where the card's bytes are: free + reserved + live + doomed + quarantined = capacity."""

    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    live_bytes: int
    doomed_bytes: int
    quarantined_bytes: int
    objects: int
    objects_max: int
    leases: int
    leased_bytes: int
    tickets: int = 0
    """Whose room clients write to themselves."""
    ticket_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionStatus:
    """The budget of bytes written a day."""

    bytes_per_day: int = 0
    """What stores may write within 24 hours; 0: no limit."""
    written_bytes: int = 0
    """What they have written in the last 24 hours (whole hours), restarts or not."""


@dataclass(frozen=True, slots=True)
class AddressStatus:
    """Where the gateway really listens."""

    control: str | None
    """Without keys; None: there is no such endpoint."""
    control_socket: str | None
    admin: str
    regions: str
    control_curve: str | None = None
    """With keys."""
    admin_socket: str | None = None
    metrics: str | None = None
    """The address that has nothing but metrics and health."""


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """The SPDK target that the gateway looks after."""

    rpc: str
    """Where it takes orders."""
    state: str
    """`right`, `away` (it does not answer), `wrong` (it cannot be made right) or `unknown`."""
    reason: str
    pid: int | None
    """As it said last."""
    remade: int
    """How often something of it was made anew."""


@dataclass(frozen=True, slots=True)
class Status:
    """Everything at one moment."""

    version: str
    pid: int
    uptime_s: float
    state: str
    """`serving` or `draining`."""
    warm: bool
    """Whether objects of an earlier run are served."""
    state_dir: str
    addresses: AddressStatus
    card: CardStatus
    usage: UsageStatus
    cache: dict[str, int]
    """The engine's counters: hits, misses, stored, evicted ..."""
    requests: dict[str, int]
    """Requests that were carried out, by operation."""
    errors: dict[str, int]
    """Error replies, by code."""
    transport: dict[str, int]
    """The control port's counters: messages, bytes, refusals, dropped replies ..."""
    device: dict[str, int]
    """Commands and payload bytes exchanged with the card."""
    queues: dict[str, int] = field(default_factory=dict)
    """What is under way now: `requests` not answered yet, `loads` and `stores` among them."""
    admission: AdmissionStatus = field(default_factory=AdmissionStatus)
    target: TargetStatus | None = None
    """None: there is none to look after."""

    @property
    def ready(self) -> bool:
        """Whether requests are served from the card now."""
        return self.state == "serving" and self.card.state == "online"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self)


class StatusSource(Protocol):
    """Who can tell the status (the daemon)."""

    def status(self) -> Status:
        """Return a snapshot; called from the loop, cheap, never blocks."""
        ...
