"""What the durable records say: the index as a recovery would build it, record after record.

A record that does not follow from those before it is a fault of whoever wrote it. Checked here: an object is put into a slot
that is free, over units that no other object (live, or doomed and not yet freed) occupies, under names that are bound;
only what is live is deleted, only what is doomed is freed; LSNs rise without gaps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xkv_gateway.core.records import (
    DeleteBatch,
    FreedBatch,
    NamespaceNamed,
    PutBatch,
    Record,
    ScopeNamed,
    WipeRecord,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Digest = tuple[int, int]


class RecordFault(AssertionError):  # noqa: N818 - a finding about a record
    """A record that does not follow from those before it."""


@dataclass(slots=True)
class Entry:
    """One object."""

    slot: int
    generation: int
    digest: Digest
    namespace: str
    scope: bytes
    size_bytes: int
    checksum: int
    extents: tuple[tuple[int, int], ...]
    """(start, count) in units."""
    doomed: bool = False


@dataclass(slots=True)
class Replay:
    """The index at one LSN."""

    lsn: int = 0
    slots: dict[int, Entry] = field(default_factory=dict)
    live: dict[Digest, Entry] = field(default_factory=dict)
    ever: set[tuple[Digest, int]] = field(default_factory=set)
    """(digest, checksum) of all that was ever put."""
    _units: dict[int, int] = field(default_factory=dict)
    _namespaces: dict[int, str] = field(default_factory=dict)
    _scopes: dict[int, bytes] = field(default_factory=dict)

    def fork(self) -> Replay:
        """A copy that goes its own way."""
        other = copy.copy(self)
        for name in ("live", "_units", "_namespaces", "_scopes"):
            setattr(other, name, dict(getattr(self, name)))
        other.slots = {slot: copy.copy(entry) for slot, entry in self.slots.items()}
        other.live = {entry.digest: entry for entry in other.slots.values() if not entry.doomed}
        other.ever = set(self.ever)
        return other

    def apply(self, records: Sequence[Record]) -> None:
        """Go on. Raises RecordFault."""
        for record in records:
            _require(record.lsn == self.lsn + 1, f"LSN {record.lsn} after {self.lsn}")
            self.lsn = record.lsn
            match record:
                case NamespaceNamed():
                    self._namespaces[record.namespace_id] = record.name
                case ScopeNamed():
                    self._scopes[record.scope_id] = record.name
                case PutBatch():
                    self._put(record)
                case DeleteBatch():
                    self._delete(record)
                case FreedBatch():
                    self._free(record)
                case WipeRecord():
                    pass

    def hold(self, entry: Entry) -> None:
        """Begin with an object that is there already."""
        self.slots[entry.slot] = entry
        if not entry.doomed:
            self.live[entry.digest] = entry
        self.ever.add((entry.digest, entry.checksum))
        self._units.update(dict.fromkeys(_units_of(entry), entry.slot))

    def name(self, namespaces: dict[int, str], scopes: dict[int, bytes]) -> None:
        """Begin with names that are bound already."""
        self._namespaces.update(namespaces)
        self._scopes.update(scopes)

    def _put(self, batch: PutBatch) -> None:
        at = 0
        runs = list(zip(batch.extent_starts_au.tolist(), batch.extent_counts_au.tolist(), strict=True))
        for i, slot in enumerate(batch.slots.tolist()):
            count = int(batch.extent_counts[i])
            entry = Entry(
                slot,
                int(batch.generations[i]),
                (int(batch.digests_low[i]), int(batch.digests_high[i])),
                self._namespaces[int(batch.namespace_ids[i])],
                self._scopes[int(batch.scope_ids[i])],
                int(batch.sizes_bytes[i]),
                int(batch.checksums[i]),
                tuple(runs[at : at + count]),
            )
            at += count
            self._end_reservation(entry)
            _require(slot not in self.slots, f"a put into slot {slot}, which is not free")
            _require(entry.digest not in self.live, "a put of a key that is held")
            for unit in _units_of(entry):
                _require(unit not in self._units, f"a put over unit {unit}, which is not free (R3)")
                self._units[unit] = slot
            self.slots[slot] = self.live[entry.digest] = entry
            self.ever.add((entry.digest, entry.checksum))
        _require(at == len(runs), "extents that belong to no object")

    def _end_reservation(self, entry: Entry) -> None:
        """The commit of a ticket puts again what its reservation has put, and doomed at once."""
        before = self.slots.get(entry.slot)
        if before is None or not before.doomed or before.generation != entry.generation:
            return
        for what in ("digest", "namespace", "scope", "size_bytes", "extents"):
            _require(getattr(before, what) == getattr(entry, what), f"a commit of another {what}")
        del self.slots[entry.slot]
        for unit in _units_of(before):
            del self._units[unit]

    def _delete(self, batch: DeleteBatch) -> None:
        for entry in self._named(batch):
            _require(not entry.doomed, "a delete of what was deleted before")
            entry.doomed = True
            del self.live[entry.digest]

    def _free(self, batch: FreedBatch) -> None:
        for entry in self._named(batch):
            _require(entry.doomed, "something was freed that was not deleted")
            del self.slots[entry.slot]
            for unit in _units_of(entry):
                del self._units[unit]

    def _named(self, batch: DeleteBatch | FreedBatch) -> list[Entry]:
        named: list[Entry] = []
        for slot, generation in zip(batch.slots.tolist(), batch.generations.tolist(), strict=True):
            entry = self.slots.get(slot)
            _require(
                entry is not None and entry.generation == generation, f"slot {slot} holds another object"
            )
            assert entry is not None
            named.append(entry)
        return named


def _units_of(entry: Entry) -> list[int]:
    return [unit for start, count in entry.extents for unit in range(start, start + count)]


def _require(holds: object, what: str) -> None:
    if not holds:
        raise RecordFault(what)
