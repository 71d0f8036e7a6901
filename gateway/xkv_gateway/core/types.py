"""The vocabulary of the engine: identifiers, requests, outcomes. Pure data, no behaviour.

object      the bytes stored under one identity (namespace, scope, key)
unit (AU)   allocation unit of the data area; an object's extents are runs of whole units
slot        index of an object in the parallel arrays of the index; reused, hence:
generation  number that tells two objects apart that had the same slot at different times
pin         an I/O in flight that covers an object's extents; lease: a client's promise to read them soon
lsn         log sequence number of a durable record; a reply that waits for it says so
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, NewType

from .tenancy import EvictionRules, WipeCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

Lsn = NewType("Lsn", int)
Slot = NewType("Slot", int)
Generation = NewType("Generation", int)
LeaseId = NewType("LeaseId", bytes)
TicketId = NewType("TicketId", bytes)
"""16 random bytes each: bearer tokens."""

NO_LSN = Lsn(0)
"""A reply that waits for nothing."""
DEFAULT_RULES: Final = EvictionRules()


class LookupMode(Enum):
    """How a lookup counts (PROTOCOL, `lookup`)."""

    PREFIX = "prefix"
    EACH = "each"


class StoreStatus(Enum):
    """Status of one key of a store, as on the wire."""

    STORED = "stored"
    EXISTS = "exists"
    IN_PROGRESS = "in_progress"
    OVER_QUOTA = "over_quota"
    NO_SPACE = "no_space"
    TOO_LARGE = "too_large"
    IO_ERROR = "io_error"
    CANCELLED = "cancelled"


class LoadStatus(Enum):
    """Status of one key of a load, as on the wire."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    TOO_SMALL = "too_small"
    IO_ERROR = "io_error"


class Extent(NamedTuple):
    """A run of allocation units of the data area."""

    start_au: int
    count_au: int


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine is built for; follows from the card and the configuration."""

    capacity_au: int
    au_bytes: int
    max_objects: int
    object_bytes_max: int
    lease_ttl_max_ns: int
    leases_per_scope_max: int
    leased_bytes_per_scope_max: int
    eviction: EvictionRules = DEFAULT_RULES
    written_bytes_per_day: int = 0
    """Payload bytes that stores may write within 24 hours; 0: no limit."""
    corrupt_hold_ns: int = 600_000_000_000
    """How long the units of an object with a wrong checksum stay out of use."""
    direct_grace_ns: int = 0
    """How long the units of a ticket that ended unsettled stay out of use."""


# --- requests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of the keys are held; with `lease_ttl_ns` > 0, one lease over all hits of the reply."""

    namespace: str
    scope: bytes
    keys: list[bytes]
    mode: LookupMode
    lease_ttl_ns: int


@dataclass(frozen=True, slots=True)
class BeginLoad:
    """Pin the objects of the keys for reading. With a lease: the leased generations, also if doomed meanwhile."""

    namespace: str
    scope: bytes
    keys: list[bytes]
    lease: LeaseId | None


@dataclass(frozen=True, slots=True)
class BeginStore:
    """Reserve room for each key. No key occurs twice (the codec has refused that)."""

    namespace: str
    scope: bytes
    keys: list[bytes]
    sizes_bytes: list[int]
    keep: Sequence[WritePlan] = ()
    """What this batch has stored before it asked again: not evicted for the rest of it."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget the keys."""

    namespace: str
    scope: bytes
    keys: list[bytes]


# --- outcomes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookupOutcome:
    """`sizes_bytes`: prefix mode, of the leading hits; each mode, one or None for each key."""

    hits: int
    sizes_bytes: list[int | None]
    lease: LeaseId | None
    lease_ttl_ns: int


class ReadPlan(NamedTuple):
    """A pinned object: read `extents`, verify `checksum` over `size_bytes`, then `end_load`."""

    slot: Slot
    generation: Generation
    size_bytes: int
    checksum: int
    extents: tuple[Extent, ...]


class WritePlan(NamedTuple):
    """A reservation: write the payload to `extents`, then `commit_store` or `abort_store`."""

    slot: Slot
    generation: Generation
    size_bytes: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """One entry a key: a plan to carry out, a final status, or None: no room yet.

    Where entries are None the shell waits for `wait_lsn` to be durable (evictions were recorded), or, where that is
    NO_LSN, for the next `persisted`, `end_load`, lease end or `tick` that frees space, and asks again with the
    keys that are left, until its deadline; then they are `no_space`.
    """

    entries: list[WritePlan | StoreStatus | None]
    wait_lsn: Lsn


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """One status a plan: STORED (once `lsn` is durable) or CANCELLED (deleted or wiped meanwhile)."""

    statuses: list[StoreStatus]
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class DeleteOutcome:
    """How many keys were held, and the record that the reply waits for."""

    deleted: int
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class WipeOutcome:
    """A wipe that has begun: nothing of it is visible any more; `counts` follows it until all of it is gone."""

    counts: WipeCounts
    lsn: Lsn

    @property
    def objects(self) -> int:
        """Objects that are gone from the index by now."""
        return self.counts.objects

    @property
    def bytes(self) -> int:
        """Their payloads."""
        return self.counts.payload_bytes


class ErasePlan(NamedTuple):
    """A wiped object that nobody reads or writes any more: erase `extents`, then `Wiping.erased`."""

    slot: Slot
    generation: Generation
    wipe: int
    """Id of the wipe."""
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the units are (R5): free + reserved + live + doomed + quarantined = capacity, always."""

    free_au: int
    reserved_au: int
    """Reserved or committing: owned by a store that has not been acknowledged."""
    reserved_objects: int
    live_au: int
    doomed_au: int
    """Deleted or evicted, waiting for a lease, an I/O or the tombstone."""
    quarantined_au: int
    """A failed write may still land there."""
    live_objects: int
    leases: int
    leased_au: int
