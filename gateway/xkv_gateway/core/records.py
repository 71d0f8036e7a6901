"""The durable records: what a journal must hold to rebuild the index, in the order of their LSNs.

Batches are structs of arrays, so that a journal encodes them with a few copies. Replayed from the first, they give the
index at any LSN; an object is named by slot and generation, which no two objects share.

    NamespaceNamed, ScopeNamed   bind an id, before the first object that carries it; a later one binds it anew
    PutBatch                     objects that are COMMITTING: LIVE once the record is durable (R2)
    DeleteBatch                  objects that are DOOMED: their extents are free only after a FreedBatch (R3)
    FreedBatch                   objects that are ABSENT: their extents may belong to a later put
    WipeRecord                   a wipe, by name, of all that was put before; its units are erased before they are free
    TenantRecord                 a tenant's limit and name
    TenantsKnownRecord           whether the tenants are complete
    TtlRecord                    how long objects of a namespace may live
    ClockRecord                  the card time: puts that follow were stored then
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from .types import NO_LSN, Lsn

if TYPE_CHECKING:
    from .arrays import U8, U32, U64

RECORD_OBJECTS_MAX: Final = 4096
"""Objects in one record, at most: bounds what a journal writes at once."""
RESERVED_OBJECTS_MAX: Final = 64
"""... in a put that is deleted at once: both fit into one batch of the smallest journal, whatever the extents."""


class DeleteCause(IntEnum):
    """Why objects were doomed."""

    DELETED = 0
    EVICTED_WATERMARK = 1
    EVICTED_DEMAND = 2
    WIPED = 3
    CORRUPT = 4
    EVICTED_QUOTA = 5
    EVICTED_TTL = 6


@dataclass(frozen=True, slots=True)
class NamespaceNamed:
    """From here on `namespace_id` means `name`."""

    lsn: Lsn
    namespace_id: int
    name: str


@dataclass(frozen=True, slots=True)
class ScopeNamed:
    """From here on `scope_id` means `name`."""

    lsn: Lsn
    scope_id: int
    name: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PutBatch:
    """Objects that were stored. All arrays have one element an object, but the last two."""

    lsn: Lsn
    slots: U32
    generations: U32
    digests_low: U64
    digests_high: U64
    namespace_ids: U32
    scope_ids: U32
    sizes_bytes: U32
    checksums: U64
    extent_counts: U8
    """Extents of each object; `extent_*` list them, object after object."""
    extent_starts_au: U32
    extent_counts_au: U32


@dataclass(frozen=True, slots=True, eq=False)
class DeleteBatch:
    """Objects that were doomed."""

    lsn: Lsn
    cause: DeleteCause
    slots: U32
    generations: U32


@dataclass(frozen=True, slots=True, eq=False)
class FreedBatch:
    """Doomed objects that are gone, so that their slots and extents are free."""

    lsn: Lsn
    slots: U32
    generations: U32


@dataclass(frozen=True, slots=True)
class WipeRecord:
    """All objects of a namespace, or of one scope in it, that were put before."""

    lsn: Lsn
    namespace: str
    scope: bytes | None


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """From here on the scope has this limit and this name; neither: it is not registered any more."""

    lsn: Lsn
    scope: bytes
    limit_bytes: int | None
    name: str | None


@dataclass(frozen=True, slots=True)
class TenantsKnownRecord:
    """Whether the tenants that are known are all there are: damage may have taken some away, until the operator confirms."""

    lsn: Lsn
    known: bool


@dataclass(frozen=True, slots=True)
class TtlRecord:
    """From here on objects of the namespace may live so long; 0: no limit."""

    lsn: Lsn
    namespace: str
    idle_s: int
    total_s: int


@dataclass(frozen=True, slots=True)
class ClockRecord:
    """Objects that are put from here on were stored at this card time."""

    lsn: Lsn
    time_s: int


Record = (
    NamespaceNamed
    | ScopeNamed
    | PutBatch
    | DeleteBatch
    | FreedBatch
    | WipeRecord
    | TenantRecord
    | TenantsKnownRecord
    | TtlRecord
    | ClockRecord
)


def inseparable(before: Record | None, record: Record) -> bool:
    """Whether one batch of the journal must hold both: a put of what is only reserved, and the delete that says so.

    With the first alone the objects would be live after a crash, and nobody has written their bytes. More objects are never reserved by one
    put, and a put and a delete of more need not fit into one batch.
    """
    return (
        isinstance(record, DeleteBatch)
        and isinstance(before, PutBatch)
        and len(record.slots) <= RESERVED_OBJECTS_MAX
        and len(before.slots) == len(record.slots)
        and bool((before.slots == record.slots).all())
    )


class RecordLog:
    """Numbers the records and keeps them until the shell takes them."""

    def __init__(self) -> None:
        self.last_lsn = NO_LSN
        self.persisted_lsn = NO_LSN
        self._pending: list[Record] = []

    def next_lsn(self) -> Lsn:
        """The LSN that the record added next must carry."""
        return Lsn(self.last_lsn + 1)

    def add(self, record: Record) -> Lsn:
        """Append a record."""
        assert record.lsn == self.last_lsn + 1, "records are numbered without gaps"
        self.last_lsn = record.lsn
        self._pending.append(record)
        return record.lsn

    def take(self) -> list[Record]:
        """The records since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def unless_durable(self, lsn: Lsn) -> Lsn:
        """`lsn`, or NO_LSN if there is nothing to wait for."""
        return lsn if lsn > self.persisted_lsn else NO_LSN
