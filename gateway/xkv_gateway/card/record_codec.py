"""Durable records to bytes and back: frames inside a journal batch, each a small header and whole arrays.

frame = kind, flags, count, extents, frame bytes, LSN  |  arrays in falling order of width  |  zeroes to 8 bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xkv_gateway.card.format_errors import BadField, Truncated
from xkv_gateway.card.structure import align_up
from xkv_gateway.card.tables import (
    EXTENTS_PER_OBJECT_MAX,
    NAMESPACE_BYTES_MAX,
    SCOPE_BYTES_MAX,
    TenantKind,
    tenant_kind,
    ttl_limits,
    ttl_value,
)
from xkv_gateway.core.records import (
    RECORD_OBJECTS_MAX,
    ClockRecord,
    DeleteBatch,
    DeleteCause,
    FreedBatch,
    NamespaceNamed,
    PutBatch,
    ScopeNamed,
    TenantRecord,
    TenantsKnownRecord,
    TtlRecord,
    WipeRecord,
    inseparable,
)
from xkv_gateway.core.tenancy import LIMIT_BYTES_MAX, TTL_S_MAX
from xkv_gateway.core.types import Lsn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xkv_gateway.card.structure import Bytes
    from xkv_gateway.card.tables import AnyArray
    from xkv_gateway.core.records import Record

FRAME_HEADER: Final = Struct("<HHIIIQ")
"""kind, flags, count, extents, frame_bytes, lsn."""
FRAME_FIELDS: Final = (
    ("u16", "kind"),
    ("u16", "flags"),
    ("u32", "count"),
    ("u32", "extents"),
    ("u32", "frame_bytes"),
    ("u64", "lsn"),
)
FRAME_ALIGNMENT: Final = 8
_NAME: Final = "record"


class RecordKind(IntEnum):
    """Kinds of frames. Numbers are never reused; a new one is an incompatible feature of the card."""

    NAMESPACE = 1
    SCOPE = 2
    PUT = 3
    DELETE = 4
    FREED = 5
    WIPE = 6
    TENANT = 7
    CLOCK = 8


PER_OBJECT: Final = {
    RecordKind.PUT: (
        ("digests_low", "<u8"),
        ("digests_high", "<u8"),
        ("checksums", "<u8"),
        ("slots", "<u4"),
        ("generations", "<u4"),
        ("namespace_ids", "<u4"),
        ("scope_ids", "<u4"),
        ("sizes_bytes", "<u4"),
    ),
    RecordKind.DELETE: (("slots", "<u4"), ("generations", "<u4")),
    RecordKind.FREED: (("slots", "<u4"), ("generations", "<u4")),
}
"""Arrays of `count` elements, in their order."""
PER_EXTENT: Final = (("extent_starts_au", "<u4"), ("extent_counts_au", "<u4"))
"""PUT: arrays of `extents` elements, behind those of the objects; then `extent_counts`, one byte an object."""

_CAUSES: Final = frozenset(cause.value for cause in DeleteCause)
_WIDTHS: Final = {"<u8": 8, "<u4": 4, "u1": 1}
_WIDE_ARRAYS: Final = 3
_NARROW_ARRAYS: Final = 5
_PUT_OBJECT_BYTES: Final = _WIDE_ARRAYS * 8 + _NARROW_ARRAYS * 4 + 1
_EXTENT_BYTES: Final = 8


def record_bytes_max(max_objects: int, units: int) -> int:
    """Return the size of the largest frame that such a card can need."""
    objects = min(RECORD_OBJECTS_MAX, max_objects)
    extents = min(objects * EXTENTS_PER_OBJECT_MAX, units)
    return align_up(
        FRAME_HEADER.size + objects * _PUT_OBJECT_BYTES + extents * _EXTENT_BYTES + NAMESPACE_BYTES_MAX
    )


@dataclass(frozen=True, slots=True)
class BatchBody:
    """What one journal batch carries."""

    body: bytes
    first_lsn: int
    last_lsn: int


def encode_batches(records: Sequence[Record], body_bytes_max: int) -> list[BatchBody]:
    """Encode records, LSNs ascending without holes, into as few batches as fit; what is `inseparable` stays together."""
    batches: list[BatchBody] = []
    frames: list[bytes] = []
    size_bytes, first_lsn = 0, 0
    before: Record | None = None
    for record in records:
        frame = encode_record(record)
        assert len(frame) <= body_bytes_max, "a record is larger than a batch may be"
        if frames and size_bytes + len(frame) > body_bytes_max:
            taken_along = frames[-1:] if len(frames) > 1 and inseparable(before, record) else []
            frames = frames[: len(frames) - len(taken_along)]
            batches.append(BatchBody(b"".join(frames), first_lsn, first_lsn + len(frames) - 1))
            first_lsn += len(frames)
            frames, size_bytes = taken_along, sum(map(len, taken_along))
        if not frames:
            first_lsn = record.lsn
        assert record.lsn == first_lsn + len(frames), "LSNs have no holes"
        frames.append(frame)
        size_bytes += len(frame)
        before = record
    if frames:
        batches.append(BatchBody(b"".join(frames), first_lsn, first_lsn + len(frames) - 1))
    return batches


def encode_record(record: Record) -> bytes:  # noqa: C901 - a few lines for each kind
    """Return the frame of one record."""
    match record:
        case PutBatch():
            parts = [
                *_arrays(record, RecordKind.PUT),
                *(_raw(getattr(record, name), code) for name, code in PER_EXTENT),
            ]
            parts.append(_raw(record.extent_counts, "u1"))
            counts = (len(record.slots), len(record.extent_starts_au))
            return _frame(RecordKind.PUT, 0, counts, record.lsn, parts)
        case DeleteBatch():
            parts = _arrays(record, RecordKind.DELETE)
            return _frame(RecordKind.DELETE, record.cause, (len(record.slots), 0), record.lsn, parts)
        case FreedBatch():
            parts = _arrays(record, RecordKind.FREED)
            return _frame(RecordKind.FREED, 0, (len(record.slots), 0), record.lsn, parts)
        case NamespaceNamed():
            return _name_frame(RecordKind.NAMESPACE, record.namespace_id, record.name.encode(), record.lsn)
        case ScopeNamed():
            return _name_frame(RecordKind.SCOPE, record.scope_id, record.name, record.lsn)
        case WipeRecord():
            namespace, scope = record.namespace.encode(), record.scope or b""
            counts = (len(namespace), len(scope))
            return _frame(RecordKind.WIPE, int(record.scope is None), counts, record.lsn, [namespace, scope])
        case TenantRecord():
            name = (record.name or "").encode()
            kind = tenant_kind(record.limit_bytes, record.name)
            parts = [(record.limit_bytes or 0).to_bytes(8, "little"), record.scope, name]
            return _frame(RecordKind.TENANT, kind, (len(record.scope), len(name)), record.lsn, parts)
        case TtlRecord():
            name, value = record.namespace.encode(), ttl_value(record.idle_s, record.total_s)
            parts = [value.to_bytes(8, "little"), name]
            return _frame(RecordKind.TENANT, TenantKind.TTL, (0, len(name)), record.lsn, parts)
        case ClockRecord():
            return _frame(RecordKind.CLOCK, 0, (0, 0), record.lsn, [record.time_s.to_bytes(8, "little")])
        case TenantsKnownRecord():
            kind = TenantKind.COMPLETE if record.known else TenantKind.OTHERS_LOST
            return _frame(RecordKind.TENANT, kind, (0, 0), record.lsn, [bytes(8)])


def _frame(kind: RecordKind, flags: int, counts: tuple[int, int], lsn: int, parts: Iterable[bytes]) -> bytes:
    payload = b"".join(parts)
    size_bytes = align_up(FRAME_HEADER.size + len(payload), FRAME_ALIGNMENT)
    header = FRAME_HEADER.pack(kind, flags, *counts, size_bytes, lsn)
    return (header + payload).ljust(size_bytes, b"\0")


def _name_frame(kind: RecordKind, ident: int, name: bytes, lsn: int) -> bytes:
    return _frame(kind, 0, (len(name), 0), lsn, [ident.to_bytes(4, "little"), name])


def _arrays(record: Record, kind: RecordKind) -> list[bytes]:
    return [_raw(getattr(record, name), code) for name, code in PER_OBJECT[kind]]


def _raw(array: AnyArray, code: str) -> bytes:
    return array.astype(code, copy=False).tobytes()


def decode_records(body: Bytes, first_lsn: int, record_count: int) -> list[Record]:
    """Return the records of a batch. Their arrays are read-only views of `body`.

    Raises:
        Truncated, BadField: the body's checksum was right, and it is not what a gateway writes.
    """
    body = memoryview(body).toreadonly()
    records: list[Record] = []
    at = 0
    while at < len(body):
        if len(body) - at < FRAME_HEADER.size:
            raise Truncated(_NAME, "", "the end of the batch cuts a frame")
        kind, flags, count, extents, frame_bytes, lsn = FRAME_HEADER.unpack_from(body, at)
        _require(
            frame_bytes % FRAME_ALIGNMENT == 0 and frame_bytes >= FRAME_HEADER.size,
            "frame_bytes",
            "not possible",
        )
        if frame_bytes > len(body) - at:
            raise Truncated(_NAME, "frame_bytes", "the end of the batch cuts a frame")
        _require(lsn == first_lsn + len(records), "lsn", "out of order")
        reader = _FrameReader(body[at + FRAME_HEADER.size : at + frame_bytes])
        records.append(_decode_one(reader, kind, flags, (count, extents), Lsn(lsn)))
        reader.finish()
        at += frame_bytes
    _require(len(records) == record_count, "count", f"{len(records)} records, the batch says {record_count}")
    return records


def _decode_one(reader: _FrameReader, kind: int, flags: int, counts: tuple[int, int], lsn: Lsn) -> Record:
    count, extents = counts
    match kind:
        case RecordKind.PUT:
            _require(flags == 0, "flags", "not possible")
            return _decode_put(reader, counts, lsn)
        case RecordKind.DELETE:
            _require(extents == 0 and flags in _CAUSES, "flags", "unknown cause")
            return DeleteBatch(
                lsn, DeleteCause(flags), reader.array(count, "<u4"), reader.array(count, "<u4")
            )
        case RecordKind.FREED:
            _require(extents == 0 and flags == 0, "flags", "not possible")
            return FreedBatch(lsn, reader.array(count, "<u4"), reader.array(count, "<u4"))
        case RecordKind.NAMESPACE:
            _require(extents == 0 and flags == 0, "flags", "not possible")
            return NamespaceNamed(lsn, reader.integer(), reader.text(count))
        case RecordKind.SCOPE:
            _require(extents == 0 and flags == 0, "flags", "not possible")
            return ScopeNamed(lsn, reader.integer(), reader.name(count, SCOPE_BYTES_MAX))
        case RecordKind.WIPE:
            _require(flags in {0, 1} and (not flags or not extents), "flags", "not possible")
            namespace = reader.text(count)
            scope = reader.name(extents, SCOPE_BYTES_MAX)
            return WipeRecord(lsn, namespace, None if flags else scope)
        case RecordKind.TENANT:
            return _decode_tenant(reader, flags, counts, lsn)
        case RecordKind.CLOCK:
            _require(counts == (0, 0) and flags == 0, "flags", "not possible")
            time_s = reader.integer(8)
            _require(time_s < 1 << 32, "time_s", "not possible")
            return ClockRecord(lsn, time_s)
        case _:
            raise BadField(_NAME, "kind", f"unknown kind {kind}")


def _decode_tenant(
    reader: _FrameReader, flags: int, counts: tuple[int, int], lsn: Lsn
) -> TenantRecord | TenantsKnownRecord | TtlRecord:
    _require(flags in set(TenantKind), "flags", "not possible")
    limit_bytes = reader.integer(8)
    scope, name = reader.name(counts[0], SCOPE_BYTES_MAX), reader.text(counts[1])
    if flags == TenantKind.TTL:
        _require(not scope, "count", "the rule of a namespace names a scope")
        idle_s, total_s = ttl_limits(limit_bytes)
        _require(max(idle_s, total_s) <= TTL_S_MAX, "limit", "more than there can be")
        return TtlRecord(lsn, name, idle_s, total_s)
    if flags in {TenantKind.OTHERS_LOST, TenantKind.COMPLETE}:
        _require(not scope and not name and not limit_bytes, "count", "a statement on all tenants names one")
        return TenantsKnownRecord(lsn, flags == TenantKind.COMPLETE)
    _require(limit_bytes <= LIMIT_BYTES_MAX, "limit", "more than there can be")
    _require(flags == TenantKind.LIMITED or not limit_bytes, "limit", "of a tenant without one")
    _require(bool(name) == (flags == TenantKind.NAMED) or flags == TenantKind.LIMITED, "name", "not possible")
    return TenantRecord(lsn, scope, limit_bytes if flags == TenantKind.LIMITED else None, name or None)


def _decode_put(reader: _FrameReader, counts: tuple[int, int], lsn: Lsn) -> PutBatch:
    count, extents = counts
    # One view for all arrays of a width: a small record costs by its arrays, not by its objects.
    wide = reader.rows(_WIDE_ARRAYS, count, "<u8")
    narrow = reader.rows(_NARROW_ARRAYS, count, "<u4")
    placed = reader.rows(len(PER_EXTENT), extents, "<u4")
    extent_counts = reader.array(count, "u1")
    _require(int(extent_counts.sum(dtype=np.int64)) == extents, "extents", "not the sum of extent_counts")
    return PutBatch(
        lsn=lsn,
        digests_low=wide[0],
        digests_high=wide[1],
        checksums=wide[2],
        slots=narrow[0],
        generations=narrow[1],
        namespace_ids=narrow[2],
        scope_ids=narrow[3],
        sizes_bytes=narrow[4],
        extent_starts_au=placed[0],
        extent_counts_au=placed[1],
        extent_counts=extent_counts,
    )


class _FrameReader:
    """Takes typed pieces off the payload of one frame."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def _take(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self._payload) - self._at:
            raise Truncated(_NAME, "count", "more elements than the frame holds")
        piece = self._payload[self._at : self._at + size_bytes]
        self._at += size_bytes
        return piece

    def array(self, count: int, code: str) -> Any:
        return np.frombuffer(self._take(count * _WIDTHS[code]), code)

    def rows(self, arrays: int, count: int, code: str) -> Any:
        return self.array(arrays * count, code).reshape(arrays, count)

    def integer(self, size_bytes: int = 4) -> int:
        return int.from_bytes(self._take(size_bytes), "little")

    def name(self, size_bytes: int, limit_bytes: int) -> bytes:
        _require(size_bytes <= limit_bytes, "name", "too long")
        return bytes(self._take(size_bytes))

    def text(self, size_bytes: int) -> str:
        try:
            return self.name(size_bytes, NAMESPACE_BYTES_MAX).decode()
        except UnicodeDecodeError as error:
            raise BadField(_NAME, "name", "not UTF-8") from error

    def finish(self) -> None:
        rest = self._payload[self._at :]
        _require(len(rest) < FRAME_ALIGNMENT and not any(rest), "frame_bytes", "bytes left over")


def _require(condition: bool, field: str, detail: str) -> None:
    if not condition:
        raise BadField(_NAME, field, detail)
